"""One tier of the cache, seen as bytes: what every store has to do, and nothing above it."""

from __future__ import annotations

import errno
import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import BinaryIO, Literal, Protocol, runtime_checkable

import msgspec

from max_build.errors import StoreError

__all__ = [
    "CHUNK",
    "ENTRY_LIMIT",
    "LARGEST",
    "PIECE",
    "SLOWEST",
    "Item",
    "Kind",
    "Leases",
    "Output",
    "Sink",
    "SinkError",
    "Store",
    "fault_of",
]

Kind = Literal["ac", "cas"]
"""`ac`: entries, by key. `cas`: blobs, by the SHA-256 of their raw bytes."""

CHUNK = 1 << 20
"""Bytes moved at a time."""

PIECE = 64 << 10
"""Bytes received at a time: few enough for a slow link to bring them within any timeout."""

SLOWEST = 256 << 10
"""Bytes a second: what is uploaded unseen has to get on as fast as that, or counts as hung."""

ENTRY_LIMIT = 4 << 20
"""An entry is small text; whatever is larger than this is not one."""

LARGEST = ENTRY_LIMIT - (64 << 10)
"""What is written as one: a server's form of it takes some more."""


class Item(msgspec.Struct, frozen=True):
    """What a store holds under one name: bytes at rest, and when it was last written or used."""

    kind: Kind
    name: str
    size: int
    modified: float


class SinkError(Exception):
    """The receiving side failed or gave up. Never the fault of the store that was read."""


class Output(Protocol):
    """What bytes can be written to."""

    def write(self, data: bytes | bytearray | memoryview, /) -> object:
        """Take all of `data`."""


class Sink:
    """Where a blob is poured: counts, bounds and hashes what passes.

    Parameters
    ----------
    file
        Takes the bytes.
    limit
        The blob's size. One byte more is an altered blob, or a decompression bomb.
    """

    def __init__(self, file: Output, limit: int) -> None:
        self.count = 0
        self.cancelled = False
        self._file = file
        self._limit = limit
        self._hash = hashlib.sha256(usedforsecurity=False)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Take all of `data`.

        Raises
        ------
        StoreError
            `corrupt`, if the blob is longer than it can be.
        SinkError
            If the file refuses, or nobody waits for the blob any more.
        """
        if self.cancelled:
            message = "the transfer was given up"
            raise SinkError(message)
        self.count += len(data)
        if self.count > self._limit:
            message = f"blob is longer than its {self._limit} bytes"
            raise StoreError(message, kind="corrupt")
        # Here, not on a second thread: measured, that was slower on a busy machine of two cores.
        self._hash.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise SinkError(str(error)) from error
        return len(data)

    def digest(self) -> str:
        """SHA-256 (hex) of what was received."""
        return self._hash.hexdigest()

    def holds(self, digest: str) -> bool:
        """Whether exactly the blob `digest` was received."""
        return self.count == self._limit and self.digest() == digest


@runtime_checkable
class Leases(Protocol):
    """A store where one machine can show the others that it is compiling a key.

    A lease is a small file with its owner's name. Nobody compares clocks: whoever waits watches
    whether the mark changes.
    """

    def take_lease(self, key: str, owner: bytes) -> bool:
        """Take the lease if nobody has it."""

    def lease_mark(self, key: str) -> str | None:
        """Something that changes whenever the lease is taken or renewed; None if it is free."""

    def renew_lease(self, key: str, owner: bytes) -> None:
        """Change the mark, if the lease is still the owner's."""

    def drop_lease(self, key: str, owner: bytes | None) -> None:
        """Free the lease, if it is still the owner's; with None, whoever's it is."""


class Store(ABC):
    """One tier: entries by key, blobs by digest.

    A store moves bytes and judges none of them: whoever reads verifies. Every method may be
    called from several threads and processes at once. What goes wrong is a `StoreError` whose
    `kind` says how; that a name is absent is not an error.
    """

    label: str
    """The tier's name in counters and messages: `local`, `shared`, `remote`."""

    writable: bool
    """Whether this machine may change it."""

    unseen: int = sys.maxsize
    """Bytes, as they are stored, that `put_blob` may have on their way unseen; all, by default."""

    @abstractmethod
    def get_entry(self, key: str) -> bytes | None:
        """The entry under `key`, or None."""

    @abstractmethod
    def put_entry(self, key: str, data: bytes, *, replace: bool = False) -> bool:
        """Store an entry, in one step. The first writer wins unless `replace`.

        Returns
        -------
        bool
            False if another entry stood there and was left. A tier that cannot tell may
            replace it all the same.
        """

    @abstractmethod
    def get_blob(self, digest: str, sink: Sink) -> bool:
        """Pour the raw bytes of a blob into `sink`; False if there is none."""

    @abstractmethod
    def put_blob(self, digest: str, source: BinaryIO) -> None:
        """Store the raw bytes of `source`, read from where it stands, replacing what is there."""

    @abstractmethod
    def has_blob(self, digest: str) -> bool:
        """Whether a blob of that name is there, without reading it."""

    @abstractmethod
    def list(self, kind: Kind) -> Iterator[Item]:
        """Everything of that kind, in no order. Names that are not the store's are left out."""

    @abstractmethod
    def delete(self, kind: Kind, name: str) -> None:
        """Remove a name, if it is there."""

    def touch(self, key: str) -> None:  # noqa: B027 - a server notes by itself, or not at all
        """Note that an entry was used, where gc goes by that; never raises."""

    def refresh(self, digest: str) -> None:  # noqa: B027 - most stores have nothing to do
        """Note that an entry is about to name a blob that is there, so that gc leaves it."""

    def discard(self, kind: Kind, name: str) -> None:
        """Get a damaged entry or blob out of the way, keeping it for a look where that is cheap."""
        self.delete(kind, name)

    def close(self) -> None:  # noqa: B027 - most stores hold nothing open
        """Let go of connections."""


_KINDS = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EFBIG: "full",
    errno.EROFS: "read-only",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.ETIMEDOUT: "timeout",
    errno.ECONNREFUSED: "refused",
}


def fault_of(error: OSError, what: str) -> StoreError:
    """The `StoreError` for an operating-system error at `what`."""
    kind = _KINDS.get(error.errno or 0, "io")
    return StoreError(f"{what}: {error.strerror or error}", kind=kind)
