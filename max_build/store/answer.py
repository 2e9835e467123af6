"""What a lookup answers."""

from __future__ import annotations

import msgspec

from max_build.record import Record

__all__ = ["Hit", "Miss", "NoGoodError"]


class Hit(msgspec.Struct, frozen=True):
    """The record of a key, and the tier it came from."""

    record: Record
    tier: str


class Miss(msgspec.Struct, frozen=True):
    """Why a key is not there.

    `reason` is a word to count: `absent`, `damaged` (an entry or blob that is not what it should
    be), `dangling` (an entry whose blob is gone), `unsigned` or `altered` (see `trust`), `fault`
    (a tier failed). `detail` says it in full.
    """

    reason: str
    detail: str = ""


class NoGoodError(Exception):
    """What a tier has under a key is of no use."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.detail)
        self.miss = miss
