"""What a directory holds, as seen at one time, in a temporary database.

On disk, since there may be any number of entries; without a name, and gone with its process.
"""

from __future__ import annotations

import errno
import sqlite3
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from max_build.errors import StoreError
from max_build.store import actionresult
from max_build.store.directory import DirectoryStore
from max_build.store.entry import named_blobs
from max_build.store.files import read_small

__all__ = ["GOING", "Blobs", "Entries", "Found", "Survey", "ordered", "sizes", "survey", "unkept"]


# `blobs`: raw digests, one after the other.
_TABLES = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE blob (digest BLOB PRIMARY KEY, size, written, kept) WITHOUT ROWID;
CREATE TABLE entry (key, used, size, blobs);
BEGIN;
"""
GOING = "FROM blob WHERE NOT kept AND :now - written > :grace"


class Found(msgspec.Struct, frozen=True, gc=False):
    """An entry: when it was last used, what it takes, and the blobs it names (raw digests)."""

    key: str
    used: float
    size: int
    blobs: tuple[bytes, ...]


class Survey:
    """What a directory holds.

    Parameters
    ----------
    entries
        Gone through once, after `blobs`.
    blobs
        Raw digest → (bytes at rest, last written), or an iterable of such pairs.
    now
        The present by the clock that stamped them.
    """

    def __init__(
        self,
        entries: Iterable[Found],
        blobs: Mapping[bytes, tuple[int, float]] | Iterable[tuple[bytes, tuple[int, float]]],
        now: float,
    ) -> None:
        self.now = now
        self.db = sqlite3.connect("", isolation_level=None)  # on disk, without a name
        weakref.finalize(self, self.db.close)
        self.db.executescript(_TABLES)
        pairs = blobs.items() if isinstance(blobs, Mapping) else blobs
        self.db.executemany(
            "INSERT OR REPLACE INTO blob VALUES (?, ?, ?, 0)",
            ((blob, size, written) for blob, (size, written) in pairs),
        )
        self.db.executemany(
            "INSERT INTO entry VALUES (?, ?, ?, ?)",
            ((one.key, one.used, one.size, b"".join(one.blobs)) for one in entries),
        )

    @property
    def entries(self) -> Iterator[Found]:
        """The entries, in no order."""
        for row in self.db.execute("SELECT * FROM entry"):
            yield _found(row)


def survey(store: DirectoryStore) -> Survey:
    """Look at every name, and into every entry."""
    # Blobs first: one that is published meanwhile is then not seen, rather than seen as unnamed.
    blobs = ((bytes.fromhex(i.name), (i.size, i.modified)) for i in store.list("cas"))
    top = store.root / "ac"
    entries = (
        Found(item.name, item.modified, item.size, _named(f"{top}/{item.name[:2]}/{item.name}"))
        for item in store.list("ac")
    )
    return Survey(entries, blobs, store.now())


class Entries(Collection[Found]):
    """The entries of a survey, by order of `ordered`, after the first ones."""

    def __init__(self, seen: Survey, first: int) -> None:
        self._seen = seen
        self._first = (first,)

    def __iter__(self) -> Iterator[Found]:
        for row in self._seen.db.execute("SELECT * FROM ordered WHERE rowid > ?", self._first):
            yield _found(row)

    def __len__(self) -> int:
        return _first(self._seen.db, "SELECT count(*) FROM ordered WHERE rowid > ?", self._first)

    def __contains__(self, entry: object) -> bool:
        return any(one == entry for one in self)


class Blobs(Mapping[bytes, float]):
    """The blobs of a survey that no entry keeps, nor the grace: raw digest → last written."""

    def __init__(self, seen: Survey, values: Mapping[str, float]) -> None:
        self._seen = seen
        self._values = values

    def __getitem__(self, blob: bytes) -> float:
        query = f"SELECT written {GOING} AND digest = :blob"
        found = self._seen.db.execute(query, {**self._values, "blob": blob}).fetchone()
        if found is None:
            raise KeyError(blob)
        written: float = found[0]
        return written

    def __iter__(self) -> Iterator[bytes]:
        for (blob,) in self._seen.db.execute(f"SELECT digest {GOING}", self._values):
            yield blob

    def __len__(self) -> int:
        return _first(self._seen.db, f"SELECT count(*) {GOING}", self._values)


def _found(row: Sequence[Any]) -> Found:
    key, used, size, blobs = row
    return Found(key, used, size, tuple(blobs[at : at + 32] for at in range(0, len(blobs), 32)))


def ordered(seen: Survey) -> Iterator[Found]:
    """All entries by the order that `plan` made."""
    return iter(Entries(seen, 0))


def unkept(db: sqlite3.Connection, blob: bytes) -> int | None:
    """The size of a blob that is there and that nothing keeps yet."""
    found = db.execute("SELECT size FROM blob WHERE digest = ? AND NOT kept", (blob,)).fetchone()
    return found[0] if found else None


def sizes(db: sqlite3.Connection, rows: str, values: Mapping[str, float]) -> int:
    """What rows take, in bytes."""
    return _first(db, f"SELECT coalesce(sum(size), 0) {rows}", values)


def _first(db: sqlite3.Connection, query: str, values: Any) -> int:
    found: int = db.execute(query, values).fetchone()[0]
    return found


def _named(path: str) -> tuple[bytes, ...]:
    """The blobs that an entry names; none if it is damaged.

    What is altered is for a reader to find: here it is enough to know what is named.

    Raises
    ------
    OSError
        If it cannot be read for now.
    """
    try:
        data = _read_surely(path) or b""
        if not data.startswith(b"{"):  # as a Bazel cache server keeps it
            data = actionresult.decode(data)
        found = named_blobs(data.partition(b"\n")[0])
        named = (bytes.fromhex(blob.digest) for blob in found)
        return tuple(blob for blob in named if len(blob) == 32)
    except StoreError:
        return ()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return ()  # the disk's last word: a reader would not get it either
    except ValueError:
        return ()


def _read_surely(path: str) -> bytes | None:
    """Read an entry, once more where that failed: what passes must not cost what is named."""
    try:
        return read_small(path)
    except OSError:
        return read_small(path)
