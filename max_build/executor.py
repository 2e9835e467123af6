"""Who compiles: this machine's workers, or a farm's. The pipeline knows no more than this.

An executor decides nothing about what is right: wherever a unit was compiled, its artifact counts
when this machine finds it under the key that it derived itself.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from max_build.errors import ConfigError
from max_build.workers import capacity

if TYPE_CHECKING:
    from max_build.config import Settings, Unit
    from max_build.outcomes import Outcome, Reporter
    from max_build.store import Cache
    from max_build.target import Target

__all__ = ["Executor", "Here", "LocalPool", "open_executor"]

_FARM = re.compile(r"dask://(?:\[[^\s/@\[\]]+\]|[^\s/:@\[\]]+):(\d{1,5})/?")
_LAST_PORT = 65535


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

    Raises
    ------
    ConfigError
        If the address is of no known kind.
    """
    address = settings.executor
    if address in ("", "local"):
        return LocalPool(settings.jobs)
    found = _FARM.fullmatch(address)
    if found is None or int(found[1]) > _LAST_PORT:
        message = f"`executor` must be `local` or `dask://HOST:PORT`, got {address!r}"
        raise ConfigError(message, hint="it may come from `MAX_BUILD_EXECUTOR` or the user file")
    from max_build.cluster.dask_farm import Farm

    try:
        return Farm(address, settings, cache, report)
    except ConfigError as error:
        way_out = f" ({error.hint})" if error.hint else ""
        cache.warnings.append(f"the farm is left out: {error.message}{way_out}")
        return LocalPool(settings.jobs)
