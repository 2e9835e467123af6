"""Compile twice, in two processes, and compare: which compilers give the same bytes again.

A key is of inputs alone, so a compiler whose output varies does no harm to the cache. But a unit
whose *derivation* varies never hits twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from max_build.config import Settings, Unit
from max_build.errors import MaxBuildError
from max_build.explain import told
from max_build.key import changes, digest
from max_build.messages import Compile, Compiled, Derive, Derived
from max_build.workers import Worker

__all__ = ["Finding", "check"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What two compiles of one unit for one target had in common.

    Parameters
    ----------
    derivation
        The components that differed, in words; none where the key is the same.
    artifacts
        The roles whose bytes differed.
    error
        Why it could not be compiled.
    """

    unit: str
    target: str
    compiler: str
    derivation: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    error: str = ""


def check(settings: Settings) -> Iterator[Finding]:
    """Compile each unit for each target twice, past the cache, one after the other."""
    for unit in settings.units:
        for target in unit.targets:
            try:
                first, second = (_compiled(settings, unit, target) for _ in range(2))
            except MaxBuildError as error:
                yield Finding(unit.name, target, unit.compiler, error=str(error))
                continue
            yield Finding(
                unit.name,
                target,
                unit.compiler,
                tuple(told(*one) for one in changes(first[0].components, second[0].components)),
                tuple(
                    role
                    for role in sorted(first[1].keys() | second[1].keys())
                    if first[1].get(role) != second[1].get(role)
                ),
            )


def _compiled(
    settings: Settings, unit: Unit, target: str
) -> tuple[Derived, dict[str, tuple[str, ...]]]:
    """The derivation, and role → digests of its files."""
    worker = Worker(Path(settings.root))
    try:
        with tempfile.TemporaryDirectory(prefix="max-build-") as scratch:
            request = Derive(unit, target, settings.root, settings.python_path, scratch)
            derived = worker.ask(request, Derived, timeout=settings.compile_timeout)
            compiled = worker.ask(Compile(), Compiled, timeout=settings.compile_timeout)
            return derived, {
                role: tuple(digest(Path(name).read_bytes()) for name in names)
                for role, names in compiled.files.items()
            }
    finally:
        worker.close()
