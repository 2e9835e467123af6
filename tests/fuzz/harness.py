"""What a fuzz target is, and what holds for every input of every target."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import tempfile
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from forms import Form

__all__ = ["MEMORY", "SECONDS", "Target", "attempt", "scratch"]

SECONDS = 1.0
"""CPU time that any input may take."""

MEMORY = 100_000_000
"""Bytes that a reader of headers may have allocated at any one time."""


@dataclass(frozen=True, slots=True)
class Target:
    """One reader and what has to hold for it.

    Parameters
    ----------
    check
        Reads the input; True if it was accepted, False if it was refused by the documented error.
        Any other exception is a finding, an AssertionError one about what was accepted.
    seeds
        Name → input. `good-…` is accepted, `bad-…` was once taken amiss, or is of a kind that is.
    forms, tokens
        See `mutation.mutated`.
    bounded
        Whether the memory it takes is measured too.
    weight
        How many of its inputs cost what those of the others do: the default run tries so many
        times fewer.
    """

    name: str
    check: Callable[[bytes], bool]
    seeds: Callable[[], Mapping[str, bytes]]
    forms: tuple[Form, ...] = ()
    tokens: tuple[bytes, ...] = ()
    bounded: bool = False
    weight: int = 1


class SlowError(AssertionError):
    """An input that keeps a reader busy."""


def attempt(target: Target, data: bytes) -> bool:
    """Give one input to a target, and hold it to its bounds."""
    _warm(target)
    with _in_time(), _in_memory() if target.bounded else contextlib.nullcontext():
        return target.check(data)


@functools.cache
def _warm(target: Target) -> None:
    """Have everything imported that a target needs, which is not what is measured."""
    target.check(next(iter(target.seeds().values())))


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def late(_: int, frame: FrameType | None) -> NoReturn:
        message = f"still busy after {SECONDS} s of CPU time"
        raise SlowError(message)

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _in_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY, f"{peak} bytes were allocated at once"


@functools.cache
def scratch(name: str) -> Path:
    """A folder that the targets of this process share, gone with it."""
    # In memory where that is possible: what is tried a thousand times need not reach a disk.
    quick = "TMPDIR" not in os.environ and os.access("/dev/shm", os.W_OK)
    parent = "/dev/shm" if quick else None
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-", dir=parent))
    weakref.finalize(scratch, shutil.rmtree, folder, ignore_errors=True)
    return folder
