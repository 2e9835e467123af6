"""What a second worker brings: the same misses on a farm of one and of two Dask workers.

    python tests/benchmarks/bench_cluster.py [--units 8] [--kind cuda|max] [--rounds 3] [--pin]
                                             [--quick] [--json FILE]

Two workers on one machine
share its CPUs, and a MAX compile uses 1.25 of them; with `--pin`, worker n has CPU n to itself, as
if each were a machine of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import measure
from measure import Figure, ratio_at_most, say, turns

sys.path.insert(0, str(measure.TESTS / "cluster"))

from farms import Farm, farm
from test_farm import SLOW, kernels, settings_of, waiting

from max_build import open_cache
from max_build.pipeline import build
from support import GRAPH, write_project


def project(root: Path, kind: str, count: int) -> Path:
    """Units that differ and cost about the same."""
    team = root / "team"
    team.mkdir(parents=True)
    if kind == "cuda":
        units = {f"k{n}": SLOW.replace("DEPTH", str(90 + n)) for n in range(count)}
        return kernels(root / "repo", team, units)
    repo = write_project(root / "repo")
    lines = ['[project]\nname = "toy"\nversion = "1"\n[tool.max-build]\ntargets = ["cpu"]']
    for n in range(count):
        text = GRAPH.replace("[1.0, 2.0,", f"[{n + 1}.5, 2.0,")
        (repo / "src" / "toy" / f"g{n}.py").write_text(text)
        lines.append(f'[tool.max-build.graphs.g{n}]\nentry = "toy.g{n}:build"')
    lines.append(f'[tool.max-build.cache]\nshared = "{team}"')
    (repo / "pyproject.toml").write_text("\n".join(lines))
    return repo


def once(base: Path, kind: str, count: int, workers: int, *, pin: bool) -> float:
    """Seconds of one build in which everything misses."""
    root = project(base, kind, count)
    with farm(base / "farm") as found:
        for n in range(workers):
            process = found.worker(f"w{n}")
            if pin:  # what it starts inherits it
                os.sched_setaffinity(process.pid, {n})
        waiting(found, workers)
        warm(found)
        settings = settings_of(root, found.address, dir=str(base / "home"))
        with open_cache(settings.cache) as cache:
            result = build(settings, cache)
        states = [one.state for one in result.outcomes]
        assert states == ["compiled"] * count, (states, cache.warnings)
        assert all(one.where for one in result.outcomes), cache.warnings
    return result.seconds


def warm(found: Farm) -> None:
    """Let each worker import what it needs, which a standing farm has done long ago."""
    from distributed import Client

    from max_build.cluster.farmhand import describe

    with Client(found.address, set_as_default=False) as client:
        client.run(describe)


def figures(
    quick: bool, units: int = 8, kind: str = "cuda", rounds: int = 3, *, pin: bool = True
) -> Iterator[Figure]:
    """A build on two workers beside one on one, by turns."""
    with measure.scratch() as base:
        numbers = itertools.count()

        def build_on(workers: int) -> float:
            say(f"{units} {kind} units on {workers} worker{'s' * (workers > 1)}")
            return once(base / f"{next(numbers)}", kind, units, workers, pin=pin)

        found = turns(1 if quick else rounds, one=lambda: build_on(1), two=lambda: build_on(2))
    what = f"{units} {kind} units, two workers"
    yield Figure(what, "s", found["two"], "one worker", found["one"], ratio_at_most(0.6))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--kind", choices=("cuda", "max"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pin", action="store_true")
    chosen = parser.parse_known_args()[0]

    def section(quick: bool) -> Iterator[Figure]:
        return figures(quick, chosen.units, chosen.kind, chosen.rounds, pin=chosen.pin)

    measure.command(parser, {"cluster": section})


if __name__ == "__main__":
    main()
