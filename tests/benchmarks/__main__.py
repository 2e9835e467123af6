"""Every figure beside its peer's, in one run: a table, and a JSON file of every sample.

    python tests/benchmarks [--only NAME …] [--quick] [--json FILE]

Each section is a module that runs by itself as well. What a section needs and does not find (nvcc,
ccache, nginx, SeaweedFS, Triton, a peer's package) it leaves out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
from measure import Figure, Section, process

MODULES = {
    "startup": ("bench_startup",),
    "hook": ("bench_hook", "bench_recipes"),
    "hits": ("bench_hits",),
    "kernels": ("bench_kernels",),
    "store": ("bench_entries",),
    "remotes": ("bench_store",),
    "cluster": ("bench_cluster",),
}


def of(*modules: str) -> Section:
    """The figures of some modules, imported when their turn comes."""

    def section(quick: bool) -> Iterator[Figure]:
        for name in modules:
            yield from importlib.import_module(name).figures(quick)

    return section


def weights(quick: bool) -> Iterator[Figure]:
    """Those of `bench_weights.py`, which measures in processes of its own."""
    with measure.scratch() as base:
        told = base / "weights.json"
        size, repeat = (0.05, 1) if quick else (1.0, 3)
        program = Path(__file__).with_name("bench_weights.py")
        options = ["--dir", base, "--size", size, "--repeat", repeat, "--json", told]
        process([sys.executable, program, *options], env=measure.environment())
        rows = json.loads(told.read_text())
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        # Peers that were measured once, with as many threads as the last of ours.
        title = row["title"].replace("warm, peers", f"warm, {row['threads']} threads")
        groups.setdefault(title, []).append(row)
    for title, group in groups.items():
        yield from _weights(title, group)


def _weights(title: str, rows: list[dict[str, Any]]) -> Iterator[Figure]:
    """What each way of ours took beside each peer, and its memory beside the most frugal one."""
    speeds, memories = {"ms": "ms", "gb_s": "GB/s", "us_each": "us"}, ("anon_mb", "peak_mb")
    mine = [row for row in rows if row["method"].startswith("max-build")]
    theirs = [row for row in rows if row not in mine]
    for one in mine:
        for key in one.keys() & speeds.keys():
            what = f"{title}: {one['method']}"
            for peer in theirs or [None]:
                beside = (peer["method"], [peer[key]]) if peer else ()
                yield Figure(what, speeds[key], [one[key]], *beside)
        for key in one.keys() & set(memories):
            frugal = min(theirs, key=lambda row: row[key], default=None)
            beside = (frugal["method"], [frugal[key]]) if frugal else ()
            yield Figure("… its memory above the base", "MB", [one[key]], *beside)


SECTIONS: dict[str, Section] = {
    **{name: of(*modules) for name, modules in MODULES.items() if name != "cluster"},
    "weights": weights,
    "cluster": of(*MODULES["cluster"]),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python tests/benchmarks", description=__doc__.partition("\n")[0]
    )
    measure.command(parser, SECTIONS)
