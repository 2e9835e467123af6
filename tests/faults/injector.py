"""The Python side of inject.c: compile it, and set what its processes meet."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("inject.c")

ERRNOS = {
    name: getattr(errno, name)
    for name in ("ENOENT", "ESTALE", "EBUSY", "EIO", "EACCES", "ENOSPC", "EROFS", "EMFILE", "EINTR")
}


class Action(IntEnum):
    """As in inject.c."""

    COUNT = 0
    FAIL = 1
    SHORT = 2
    KILL_BEFORE = 3
    KILL_AFTER = 4
    CLOCK = 5


class _State(ctypes.Structure):
    """As in inject.c."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("armed", "action", "error", "sticky", "at", "clock")),
        *((name, ctypes.c_long) for name in ("calls", "struck", "slept")),
        ("last", ctypes.c_char * 64),
        ("path", ctypes.c_char * 256),
        ("roots", (ctypes.c_char * 256) * 4),
    ]


@dataclass(frozen=True)
class Fault:
    """What the n-th call meets, and with `sticky` those after it."""

    action: Action
    error: str = ""
    sticky: bool = False
    seconds: int = 0

    def __str__(self) -> str:
        name = self.error or f"{self.action.name.lower()}{self.seconds or ''}"
        return f"{name}{' from then on' if self.sticky else ''}"


def every_fault() -> tuple[Fault, ...]:
    """All kinds; EINTR only once, since the system's callers repeat what it interrupts."""
    once = tuple(Fault(Action.FAIL, name) for name in ERRNOS)
    lasting = tuple(Fault(Action.FAIL, name, True) for name in ERRNOS if name != "EINTR")
    hour = tuple(Fault(Action.CLOCK, seconds=seconds) for seconds in (3600, -3600))
    kills = (Fault(Action.KILL_BEFORE), Fault(Action.KILL_AFTER))
    return (*once, *lasting, Fault(Action.SHORT), Fault(Action.SHORT, sticky=True), *kills, *hour)


class Injector:
    """The page of memory that preloaded processes share."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), ctypes.sizeof(_State))
        self._state = _State.from_buffer(self._page)

    def watch(self, *roots: Path) -> None:
        """Count calls below these folders from now on."""
        for place, root in zip(self._state.roots, (*roots, *[""] * 4), strict=False):
            place.value = os.fsencode(root)

    def set(self, fault: Fault, at: int, *, clock: int = 0) -> None:
        """Let the `at`-th call from now on meet a fault; `clock` is off by so many seconds."""
        state = self._state
        state.armed = state.calls = state.struck = state.slept = 0
        state.last = state.path = b""
        state.action, state.sticky, state.at = fault.action, fault.sticky, at
        state.error = ERRNOS.get(fault.error, 0)
        state.clock = fault.seconds or clock

    def arm(self, on: bool = True) -> None:
        self._state.armed = on

    @property
    def calls(self) -> int:
        return self._state.calls

    @property
    def struck(self) -> bool:
        """Whether the fault was met; for the clock, whether it jumped before the end."""
        if self._state.action == Action.CLOCK:
            return self._state.calls >= self._state.at
        return self._state.struck > 0

    @property
    def slept(self) -> float:
        """Seconds that SQLite would have slept."""
        return self._state.slept / 1e6

    @property
    def kills(self) -> bool:
        return self._state.action in (Action.KILL_BEFORE, Action.KILL_AFTER)

    @property
    def where(self) -> str:
        """The first call that met it."""
        return f"{self._state.last.decode()} {os.fsdecode(self._state.path)}"


def compiled(folder: Path) -> dict[str, str]:
    """Compile inject.c; the variables that preload it. Skips where there is no gcc."""
    compiler = shutil.which("gcc") or pytest.skip("gcc is not installed")
    library, state = folder / "inject.so", folder / "state"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, SOURCE, "-ldl"], check=True
    )
    state.write_bytes(bytes(ctypes.sizeof(_State)))
    return {"LD_PRELOAD": str(library), "FAULT_STATE": str(state)}
