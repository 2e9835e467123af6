"""`max-build doctor`: what works on this machine, and what would make the rest work."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from max_build.cli.project import cache_of, print_json, project_of
from max_build.config import load_settings
from max_build.errors import MaxBuildError
from max_build.store.doctor import Check

__all__ = ["register", "run"]

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help="what works on this machine, and how to mend the rest",
        description="Read, write and lease in every tier, and load every compiler. The exit "
        "status is 1 if there is a problem.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine; 1 if there is a problem."""
    found = list(_checks(options))
    if options.json:
        print_json(found)
    else:
        for check in found:
            print(f"{_MARKS[check.verdict]:8} {check.place:9} {check.text}")
            if check.fix:
                print(f"{'':18} -> {check.fix}")
    return 1 if any(check.verdict == "problem" for check in found) else 0


def _checks(options: argparse.Namespace) -> Iterator[Check]:
    from max_build.store import open_cache
    from max_build.store.doctor import examine

    with open_cache(cache_of(options)) as cache:
        yield from examine(cache)
    project = project_of(options)
    units = load_settings(project).units if (project / "pyproject.toml").is_file() else ()
    yield from _compilers({unit.compiler for unit in units})
    yield from _devices()


def _compilers(needed: set[str]) -> Iterator[Check]:
    from max_build.compilers import get, names

    for name in names():
        try:
            get(name)
        except MaxBuildError as error:
            verdict: Any = "problem" if name in needed else "note"
            yield Check("compiler", verdict, f"`{name}`: {error.message}", error.hint)
        else:
            yield Check("compiler", "ok", f"`{name}` loads")


def _devices() -> Iterator[Check]:
    from max_build.runtime import devices

    driver = devices.cuda_driver()
    if driver is not None:
        yield Check("device", "ok", f"NVIDIA driver for CUDA {driver[0]}.{driver[1]}")
    for major, minor in devices.cuda_capabilities():
        yield Check("device", "ok", f"GPU of compute capability {major}.{minor}")
    for name in devices.hip_architectures():
        yield Check("device", "ok", f"GPU {name}")
    if driver is None and not devices.hip_architectures():
        yield Check("device", "note", "no GPU: artifacts for one can be built, but not run")
