"""What the benchmarks share: turns, processes with their peak memory, one table, one JSON file."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
sys.path[:0] = [str(TESTS), str(TESTS / "servers")]

T = TypeVar("T")

SCALE = {"s": 1.0, "ms": 1e3, "us": 1e6}
_NAMED = (
    "max-build", "max", "hatchling", "diskcache", "cuda-core", "nvidia-cuda-nvrtc", "triton",
    "obstore", "urllib3", "safetensors", "gguf", "torch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure is held against: its own median, or its ratio to the peer's."""

    limit: float
    of: str = "ours"
    least: bool = False

    def held(self, figure: Figure) -> bool:
        value = figure.ratio if self.of == "ratio" else figure.median
        return value >= self.limit if self.least else value <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.least else "≤"
        return f"{sign} {_short(self.limit)}{' ×' if self.of == 'ratio' else ''}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was measured, beside the same thing of a peer where there is one.

    `ours` and `theirs` are samples in `unit`, taken by turns.
    """

    what: str
    unit: str
    ours: Sequence[float]
    peer: str = ""
    theirs: Sequence[float] = field(default=())
    target: Target | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.ours)

    @property
    def peers(self) -> float:
        return statistics.median(self.theirs) if self.theirs else float("nan")

    @property
    def ratio(self) -> float:
        return self.median / self.peers if self.theirs else float("nan")

    @property
    def held(self) -> bool | None:
        return None if self.target is None else self.target.held(self)

    def plain(self) -> dict[str, Any]:
        """For JSON: every sample, the medians, and what they are held against."""
        return {
            "what": self.what,
            "unit": self.unit,
            "median": self.median,
            "samples": list(self.ours),
            "peer": self.peer or None,
            "peer_median": self.peers if self.theirs else None,
            "peer_samples": list(self.theirs),
            "ratio": self.ratio if self.theirs else None,
            "target": str(self.target) if self.target else None,
            "held": self.held,
        }


def at_most(limit: float) -> Target:
    return Target(limit)


def ratio_at_most(limit: float) -> Target:
    return Target(limit, "ratio")


def ratio_at_least(limit: float) -> Target:
    return Target(limit, "ratio", least=True)


# --- measuring


# A process's peak starts at what its parent had resident, so a small one starts them all.
_LAUNCHER = """
import json, os, sys, time
started = time.perf_counter()
child = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(child, 0)
told = [time.perf_counter() - started, usage.ru_maxrss / 1024, os.waitstatus_to_exitcode(status)]
os.write(int(sys.argv[1]), json.dumps(told).encode())
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended well: wall time, the most it or a child of it had resident, its words.

    Nothing under 10 MB can be told of the memory.
    """

    seconds: float
    peak_mb: float
    out: str


def process(
    command: Sequence[object], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Ended:
    """Run a command to its end, which has to be a good one; standard output and error in one."""
    words = [str(part) for part in command]
    receiver, sender = os.pipe()
    with open(receiver, "rb") as told, tempfile.TemporaryFile() as out:
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(sender), *words]
        done = subprocess.run(
            launch,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=(sender,),
            check=False,
        )
        os.close(sender)
        answer = told.read()
        out.seek(0)
        text = out.read().decode(errors="replace")
    seconds, peak, status = json.loads(answer) if answer else (0.0, 0.0, done.returncode)
    if status:
        message = f"`{' '.join(words)[:300]}` ended with {status}:\n{text[-3000:]}"
        raise RuntimeError(message)
    return Ended(seconds, peak, text)


def environment(**changes: object) -> dict[str, str]:
    """The environment with the cache of `scratch`, `changes`, and nothing else that configures."""
    foreign = ("MAX_BUILD_", "MODULAR_", "HATCH_", "TRITON_", "CCACHE_")
    ours = "MAX_BUILD_CACHE_DIR"
    kept = {k: v for k, v in os.environ.items() if k == ours or not k.startswith(foreign)}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH", ""))))
    return kept | {"PYTHONPATH": path} | {k: str(v) for k, v in changes.items()}


def pyproject(package: str, hook: str | None = None) -> str:
    """What the `pyproject.toml` of a repo begins with; `hook` are the lines of max-build's table.

    `package` is the directory that the wheel is made of.
    """
    text = f"""
[build-system]
requires = ["hatchling", "max-build"]
build-backend = "hatchling.build"
[project]
name = "many"
version = "1"
[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""
    if hook is None:
        return text
    return f"{text}[tool.hatch.build.targets.wheel.hooks.max-build]\n{hook}"


def timed(action: Callable[[], object]) -> float:
    """Seconds of wall time."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def turns(rounds: int, **actions: Callable[[], T]) -> dict[str, list[T]]:
    """What each action gave, by turns (A B C A B C), so that a load falls on all alike."""
    found: dict[str, list[T]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            found[name].append(action())
    return found


def timed_turns(rounds: int, **actions: Callable[[], object]) -> dict[str, list[float]]:
    """The same, for the seconds that each action takes."""
    return turns(rounds, **{k: lambda run=run: timed(run) for k, run in actions.items()})


def each(values: Iterable[float], scale: float) -> list[float]:
    return [scale * value for value in values]


def growth(what: str, costs: Mapping[int, Sequence[float]], unit: str, limit: float) -> Figure:
    """What one more item costs between the two largest of three sizes, and between the smallest.

    A cost that grows in proportion has a ratio of 1 or less.
    """
    small, middle, large = sorted(costs)[-3:]

    def slope(low: int, high: int) -> float:
        between = statistics.median(costs[high]) - statistics.median(costs[low])
        return max(between / (high - low), 1e-12) * SCALE[unit]

    return Figure(
        f"{what}: one more of {middle:,} to {large:,}",
        unit,
        [slope(middle, large)],
        f"one more of {small:,} to {middle:,}",
        [slope(small, middle)],
        ratio_at_most(limit),
    )


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory that is removed again, and a cache of ours in it."""
    folder = Path(tempfile.mkdtemp(prefix="max-build-bench-"))
    before = os.environ.get("MAX_BUILD_CACHE_DIR")
    os.environ["MAX_BUILD_CACHE_DIR"] = str(folder / "cache")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop("MAX_BUILD_CACHE_DIR")
        if before is not None:
            os.environ["MAX_BUILD_CACHE_DIR"] = before


def settle() -> None:
    """Wait until no file is too young for a memory of it: what a build an hour later finds."""
    time.sleep(2.1)


def say(text: str) -> None:
    """Tell what happens next, on standard error."""
    print(f"— {text}", file=sys.stderr, flush=True)


# --- telling

Section = Callable[[bool], Iterable[Figure]]
"""Takes whether to be quick."""


def run(sections: Mapping[str, Section], quick: bool) -> dict[str, list[Figure]]:
    """Run sections one after the other, printing each figure's row as it is there."""
    found: dict[str, list[Figure]] = {}
    _row("", "ours", "peer", "ratio", "target")
    for name, section in sections.items():
        started = time.perf_counter()
        print(f"\n{name}", flush=True)
        found[name] = []
        for figure in section(quick):
            found[name].append(figure)
            _show(figure)
        say(f"{name}: {time.perf_counter() - started:.0f} s")
    missed = [one for figures in found.values() for one in figures if one.held is False]
    print(f"\n{sum(map(len, found.values()))} figures, {len(missed)} beside their target")
    return found


def main(name: str, section: Section, description: str) -> None:
    """The command of one module: `[--quick] [--json FILE]`."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    command(parser, {name: section})


def command(
    parser: argparse.ArgumentParser,
    sections: Mapping[str, Section],
    default: Sequence[str] | None = None,
) -> None:
    """Parse the options all benchmarks have, run, and write the JSON file."""
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    if len(sections) > 1:
        parser.add_argument("--only", nargs="+", choices=sections, metavar="NAME", default=default)
    options = parser.parse_args()
    wanted = options.only if len(sections) > 1 else list(sections)
    before = os.getloadavg()
    found = run({name: sections[name] for name in wanted}, options.quick)
    if options.json:
        written = {
            "machine": machine() | {"load_before": before, "load_after": os.getloadavg()},
            "quick": options.quick,
            "sections": {name: [one.plain() for one in figures] for name, figures in found.items()},
        }
        options.json.write_text(json.dumps(written, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: found for name in _NAMED if (found := _version(name))},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _show(figure: Figure) -> None:
    ours = f"{_short(figure.median)} {figure.unit}"
    theirs = f"{_short(figure.peers)} {figure.unit}  {figure.peer}" if figure.theirs else ""
    ratio = f"{_short(figure.ratio)} ×" if figure.theirs else ""
    held = {None: "", True: "  held", False: "  NOT HELD"}[figure.held]
    _row(f"  {figure.what}", ours, theirs, ratio, f"{figure.target or ''}{held}")


def _row(*cells: str) -> None:
    what, ours, theirs, ratio, target = cells
    print(f"{what:58} {ours:>12}   {theirs:42} {ratio:>9}   {target}".rstrip(), flush=True)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
