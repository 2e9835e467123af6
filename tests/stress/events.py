"""What the actors and their driver tell of: a line of JSON each, in a file of each one's own.

A line is written by one system call, so a kill loses none that was told. All times are of the
machine's monotonic clock, which its processes share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from max_build.store.stats import Totals


class Event(msgspec.Struct, frozen=True, tag=True):
    """Something that happened, by `at` at the latest."""

    at: float


class Compiled(Event, frozen=True):
    """A compile is done; its result is about to be published."""

    key: str
    digests: tuple[str, ...]
    machine: int


class Published(Event, frozen=True):
    """`publish` has returned."""

    key: str
    digest: str


class Bad(Event, frozen=True):
    """Bytes that were handed out or mapped after `since` are not those of their name."""

    since: float
    digest: str
    held: bool


class Lost(Event, frozen=True):
    """A blob of a record that was found after `since` is not there any more."""

    since: float
    digest: str
    machine: int


class Planned(Event, frozen=True):
    """A gc is about to remove these from a place, unless they are used first."""

    place: str
    keys: tuple[str, ...]
    digests: tuple[str, ...]


class Collected(Event, frozen=True):
    """That gc is over: how many entries and blobs went."""

    place: str
    entries: int
    blobs: int


class Found(Event, frozen=True):
    """`verify` moved something aside."""

    place: str
    kind: str
    name: str
    problem: str


class Verified(Event, frozen=True):
    """`verify` has read a place."""

    place: str


class Closing(Event, frozen=True):
    """An actor is about to close its cache, and what it and the cache counted."""

    machine: int
    lookups: int
    checked: int
    totals: Totals
    warnings: tuple[str, ...]


class Closed(Event, frozen=True):
    """It has closed it; the index, where counters are kept, failed so many times meanwhile."""

    failures: int


class Damaged(Event, frozen=True):
    """The driver damaged a name in a place, after `since`; `gone` where it was removed."""

    since: float
    place: str
    name: str
    gone: bool


class Killed(Event, frozen=True):
    """The driver killed an actor."""

    actor: int


AnyEvent = (
    Compiled | Published | Bad | Lost | Planned | Collected | Found | Verified | Closing | Closed
    | Damaged | Killed
)  # fmt: skip
_LINE = msgspec.json.Decoder(AnyEvent)


class Log:
    """An actor's file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def tell(self, event: Event) -> None:
        os.write(self._fd, msgspec.json.encode(event) + b"\n")


def read(path: Path) -> Sequence[AnyEvent]:
    """The events of one file, in their order."""
    return [_LINE.decode(line) for line in path.read_bytes().split(b"\n")[:-1]]


def now() -> float:
    return time.monotonic()
