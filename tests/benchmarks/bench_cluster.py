"""What a second worker brings: the same misses on a farm of one and of two Dask workers.

    python tests/benchmarks/bench_cluster.py [--units 8] [--kind cuda|max] [--rounds 3] [--pin]

Prints the wall time of each and their ratio beside the load average. Two workers on one machine
share its CPUs, and a MAX compile uses 1.25 of them; with `--pin`, worker n has CPU n to itself, as
if each were a machine of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]

from farms import Farm, farm  # noqa: E402
from test_farm import SLOW, kernels, settings_of, waiting  # noqa: E402

from max_build import open_cache  # noqa: E402
from max_build.pipeline import build  # noqa: E402
from support import GRAPH, write_project  # noqa: E402


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

    from max_build.farmhand import describe

    with Client(found.address, set_as_default=False) as client:
        client.run(describe)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--kind", choices=("cuda", "max"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pin", action="store_true")
    options = parser.parse_args()
    taken: dict[int, list[float]] = {1: [], 2: []}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        for n in range(options.rounds):
            for workers in (1, 2):
                base = Path(folder, f"{n}-{workers}")
                began = time.monotonic()
                taken[workers].append(
                    once(base, options.kind, options.units, workers, pin=options.pin)
                )
                print(
                    f"{options.units} {options.kind} units, {workers} worker(s): "
                    f"{taken[workers][-1]:.1f} s (with the farm's start "
                    f"{time.monotonic() - began:.1f} s)",
                    flush=True,
                )
            loads.append(os.getloadavg()[0])
    one, two = (statistics.median(taken[workers]) for workers in (1, 2))
    figures = {
        "units": options.units,
        "kind": options.kind,
        "pinned": options.pin,
        "one": round(one, 2),
        "two": round(two, 2),
        "ratio": round(two / one, 3),
        "load": [round(load, 1) for load in loads],
        "cpus": os.cpu_count(),
    }
    print(msgspec.json.encode(figures).decode())


if __name__ == "__main__":
    main()
