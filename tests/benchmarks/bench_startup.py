"""From the start of a process to the first output of MiniLM, wherever its artifact comes from.

    python tests/benchmarks/bench_startup.py [--quick] [--json FILE]

The programs are those of the demonstration, `examples/minilm/demo.py`. MAX compiles the graph
twice: once in a cold build of ours, once in a process of its own that has no cache.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cache_servers
import measure
from measure import ROOT, Figure, Target, process, ratio_at_most, say, turns

sys.path.insert(0, str(ROOT / "examples" / "minilm"))

import demo

Run = Mapping[str, Any]
WARM = "MAX, its own cache warm"
NONE = "MAX, no cache"


def figures(quick: bool) -> Iterator[Figure]:
    """Seconds and peak memory of each way."""
    rounds = 3 if quick else 7
    with measure.scratch() as base, ExitStack() as servers:
        repo = base / "minilm"
        demo.copy(repo)
        say("a cold build of MiniLM: MAX compiles for a minute or more")
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
        cold = process(command, cwd=repo, env=_environment(base, "cold"))
        again = [process(command, cwd=repo, env=_environment(base, "cold")) for _ in range(rounds)]
        wheel = unpacked(repo, base / "wheel")
        # A wheel with a manifest alone: what it lacks comes from the cache.
        process(command, cwd=repo, env=_environment(base, "cold", MAX_BUILD_EMBED=0))
        bare = unpacked(repo, base / "bare")

        say("the same program without max-build: MAX compiles again")
        theirs = _environment(base, "theirs", wheel)
        none = demo.embed(Path(sys.executable), demo.FROM_MAX, theirs)
        yield Figure("cold build, whole process", "s", [cold.seconds], NONE, [none["seconds"]])
        yield Figure("… its peak memory", "MB", [cold.peak_mb], NONE, [none["peak_mb"]])
        yield Figure("build again, all hits", "s", [one.seconds for one in again])
        yield Figure("… its peak memory", "MB", [one.peak_mb for one in again])

        local = base / "cache"
        sources = {
            "the wheel": _environment(base, "none", wheel, MAX_BUILD_CACHE_DIR=base / "nothing"),
            "the local cache": _environment(base, "none", bare, MAX_BUILD_CACHE_DIR=local),
        }
        for name, settings in _remotes(base, servers).items():
            filled = _environment(base, "none", MAX_BUILD_REMOTE_MODE="read-write", **settings)
            process([sys.executable, "-m", "max_build", "push"], cwd=repo, env=filled)
            settings |= {"MAX_BUILD_CACHE_DIR": str(base / "fresh")}
            sources[name] = _environment(base, "none", bare, **settings)
        found = turns(
            rounds,
            **{WARM: functools.partial(demo.embed, Path(sys.executable), demo.FROM_MAX, theirs)},
            **{name: functools.partial(_first, base, env) for name, env in sources.items()},
        )
        for name in sources:
            _check(name, found[name][0], none)
            yield from _rows(name, found[name], found[WARM], [none])


def _rows(name: str, ours: list[Run], warm: list[Run], none: list[Run]) -> Iterator[Figure]:
    def row(key: str, unit: str, peer: str, theirs: list[Run], target: Target | None) -> Figure:
        what = f"from {name}" if unit == "s" else "… its peak memory"
        return Figure(what, unit, [r[key] for r in ours], peer, [r[key] for r in theirs], target)

    held = name == "the wheel"  # what comes from a server depends on the way there as well
    yield row("seconds", "s", WARM, warm, ratio_at_most(0.2) if held else None)
    yield row("seconds", "s", NONE, none, ratio_at_most(0.01) if held else None)
    yield row("peak_mb", "MB", WARM, warm, None)


def _first(base: Path, environment: dict[str, str]) -> Run:
    """The first embedding of a machine that has nothing of a remote yet."""
    shutil.rmtree(base / "fresh", ignore_errors=True)
    return demo.embed(Path(sys.executable), demo.FROM_WHEEL, environment)


def _remotes(base: Path, servers: ExitStack) -> dict[str, dict[str, str]]:
    """Settings of each remote whose server is installed, which is started."""
    found = {}
    if cache_servers.program("nginx"):
        server = servers.enter_context(cache_servers.nginx(_made(base / "nginx")))
        found["nginx"] = {"MAX_BUILD_REMOTE": server.writer_url}
    if cache_servers.program("weed"):
        endpoint = servers.enter_context(cache_servers.seaweed(_made(base / "seaweed")))
        found["S3 (SeaweedFS)"] = {
            "MAX_BUILD_REMOTE": f"s3://{cache_servers.BUCKET}/startup",
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            **cache_servers.S3_ENVIRONMENT,
        }
    return found


def unpacked(repo: Path, site: Path) -> Path:
    """The repo's wheel as an installer would lay it out; the wheel is gone then."""
    (wheel,) = (repo / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    wheel.unlink()
    return site


def _environment(
    base: Path, own: str, site: Path | None = None, **changes: object
) -> dict[str, str]:
    """`own` names the place of MAX's own cache."""
    found = measure.environment(
        XDG_CACHE_HOME=base / own, XDG_CONFIG_HOME=base / "config", **changes
    )
    if site is not None:
        found["PYTHONPATH"] = f"{site}{os.pathsep}{found['PYTHONPATH']}"
    return found


def _check(name: str, ours: Run, theirs: Run) -> None:
    worst = demo.difference(ours["vectors"], theirs["vectors"])
    if worst > 1e-5:
        message = f"from {name}: embeddings differ from MAX's own by {worst:.1e}"
        raise RuntimeError(message)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    measure.main("startup", figures, __doc__)
