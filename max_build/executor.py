"""Who compiles: this machine's workers, or a farm's. The pipeline knows no more than this.

An executor decides nothing about what is right: wherever a unit was compiled, its artifact counts
when this machine finds it under the key that it derived itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from max_build.workers import capacity

if TYPE_CHECKING:
    from max_build.config import Settings, Unit
    from max_build.outcomes import Outcome, Reporter
    from max_build.store import Cache
    from max_build.target import Target

__all__ = ["Executor", "Here", "LocalPool", "open_executor"]


class Here(Protocol):
    """What a build can do on this machine."""

    def look(self, unit: Unit, target: Target) -> Outcome | None:
        """Look up what can be keyed without a worker; None if that, or the lookup, fails."""
        ...

    def work(self, unit: Unit, target: Target) -> Outcome:
        """Derive in a worker, look up, and compile what misses."""
        ...


class Executor(Protocol):
    """Brings units that a lookup did not find to their artifacts."""

    @property
    def width(self) -> int:
        """How many jobs to hand over at once."""
        ...

    def run(self, unit: Unit, target: Target, here: Here) -> Outcome:
        """One job from beginning to end; called from `width` threads."""
        ...

    def close(self) -> None:
        """Let go of whoever works for us."""
        ...


class LocalPool:
    """The workers of this machine.

    Parameters
    ----------
    jobs
        How many at once; 0 means as many as the machine carries.
    """

    def __init__(self, jobs: int = 0) -> None:
        self.width = jobs or capacity()

    def run(self, unit: Unit, target: Target, here: Here) -> Outcome:
        """Work here."""
        return here.work(unit, target)

    def close(self) -> None:
        """Nothing to do: the build ends its workers itself."""


def open_executor(settings: Settings, cache: Cache, report: Reporter) -> Executor:
    """The executor that `settings.executor` names; empty or `local` means this machine.

    A farm that does not answer or lacks what it takes is left out, with a line in the warnings of
    `cache`: this machine compiles instead.
    """
    address = settings.executor
    if address in ("", "local"):
        return LocalPool(settings.jobs)
    from max_build.cluster.dask_farm import Farm
    from max_build.errors import ConfigError

    try:
        return Farm(address, settings, cache, report)
    except ConfigError as error:
        way_out = f" ({error.hint})" if error.hint else ""
        cache.warnings.append(f"the farm is left out: {error.message}{way_out}")
        return LocalPool(settings.jobs)
