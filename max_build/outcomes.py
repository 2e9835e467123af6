"""What comes of a build: an outcome per unit and target, the events on the way, one line on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from max_build.config import Unit
    from max_build.errors import MaxBuildError
    from max_build.explain import Explanation
    from max_build.record import Record
    from max_build.target import Target

__all__ = ["STATES", "Build", "Event", "Mode", "Outcome", "Reporter", "State", "summary"]

Mode = Literal["build", "require-hit", "look"]
"""Compile what misses, fail on a miss, or only say what would be compiled."""

State = Literal["cached", "compiled", "uncached", "missed", "failed"]
"""`uncached` was compiled and cannot be kept; `missed` was not compiled, as the mode asked."""

STATES: tuple[State, ...] = get_args(State)
"""Every state, in the order in which a build's are told."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one unit for one target.

    Parameters
    ----------
    key
        Empty where the unit could not even be derived.
    record
        None where nothing was found or made.
    tier
        Where a cached one was found.
    reason
        Why it missed, or why it is not kept.
    always
        Why no recipe can save its derivation, where one was needed.
    explanation
        What is different from the nearest earlier record, of one that missed.
    where
        The host of a farm that compiled it; empty for this machine.
    seconds
        Wall time this build spent on it.
    """

    unit: Unit
    target: Target
    state: State
    key: str = ""
    record: Record | None = None
    tier: str = ""
    reason: str = ""
    always: str = ""
    explanation: Explanation | None = None
    error: MaxBuildError | None = None
    where: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one job, for whoever shows progress.

    `expected` is what the last compile of the same unit and target took, in seconds; 0 if there
    was none. `outcome` comes with `done`.
    """

    what: Literal["deriving", "compiling", "waiting", "done"]
    unit: str
    target: str
    reason: str = ""
    expected: float = 0.0
    outcome: Outcome | None = None


Reporter = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build: one outcome per unit and target, in the order declared."""

    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The outcomes that leave a unit without an artifact."""
        return tuple(one for one in self.outcomes if one.state in ("failed", "missed"))


def summary(result: Build) -> str:
    """One line: `2 units × 2 targets: 3 cached, 1 compiled in 61.2 s`.

    Where not every unit has the same targets: `3 artifacts of 2 units: …`.
    """
    units = len({one.unit.name for one in result.outcomes})
    targets = len({one.target for one in result.outcomes})
    artifacts = len(result.outcomes)
    counted: list[str] = []
    for state in STATES:
        count = sum(one.state == state for one in result.outcomes)
        if count:
            word = "compiled, not kept" if state == "uncached" else state
            counted.append(f"{count} {word}")
    took = f"{result.seconds:.1f} s" if result.seconds >= 1 else f"{1000 * result.seconds:.0f} ms"
    what = f"{units} unit{'s' * (units != 1)}"
    if units * targets == artifacts:
        what = f"{what} × {targets} target{'s' * (targets != 1)}"
    else:
        what = f"{artifacts} artifacts of {what}"
    return f"{what}: {', '.join(counted) or 'nothing to do'} in {took}"
