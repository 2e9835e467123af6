"""One tier of the cache, seen as bytes: what every store has to do, and nothing above it."""

from __future__ import annotations

import errno
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import BinaryIO, Literal, Protocol

import msgspec

from max_build.errors import StoreError

__all__ = [
    "CHUNK",
    "ENTRY_LIMIT",
    "Item",
    "Kind",
    "Leases",
    "Sink",
    "SinkError",
    "Store",
    "fault_of",
    "kind_of",
]

Kind = Literal["ac", "cas"]
"""`ac`: entries, by key. `cas`: blobs, by the SHA-256 of their raw bytes."""

CHUNK = 1 << 20
"""Bytes moved at a time."""

ENTRY_LIMIT = 4 << 20
"""An entry is small text; whatever is larger than this is not one."""


class Item(msgspec.Struct, frozen=True):
    """What a store holds under one name: bytes at rest, and when it was last written or used."""

    kind: Kind
    name: str
    size: int
    modified: float


class SinkError(Exception):
    """The receiving side failed or gave up. Never the fault of the store that was read."""


class Sink:
    """Where a blob is poured: counts, bounds and hashes what passes.

    Parameters
    ----------
    file
        Takes the bytes.
    limit
        The blob's size. One byte more is an altered blob, or a decompression bomb.
    """

    def __init__(self, file: BinaryIO, limit: int) -> None:
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
        self._hash.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise SinkError(str(error)) from error
        return len(data)

    def holds(self, digest: str) -> bool:
        """Whether exactly the blob `digest` was received."""
        return self.count == self._limit and self._hash.hexdigest() == digest


class Leases(Protocol):
    """A place where one machine can tell the others that it is compiling a key."""

    def acquire(self, key: str, owner: str, expiry: float) -> bool:
        """Take the lease if it is free, or was not renewed for `expiry` seconds."""

    def renew(self, key: str, owner: str) -> None:
        """Show that the owner still lives."""

    def release(self, key: str, owner: str) -> None:
        """Give the lease back, if it is still the owner's."""


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

    leases: Leases | None = None
    """Where the tier can hold leases."""

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


def kind_of(error: OSError) -> str:
    """The counted kind of an operating-system error."""
    return _KINDS.get(error.errno or 0, "io")


def fault_of(error: OSError, what: str) -> StoreError:
    """The `StoreError` for an operating-system error at `what`."""
    return StoreError(f"{what}: {error.strerror or error}", kind=kind_of(error))
