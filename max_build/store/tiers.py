"""An outer tier as the cache sees it: never slow for long, never believed, never fatal."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from max_build.errors import StoreError
from max_build.record import Blob
from max_build.store.base import SLOWEST, Item, Kind, Leases, Sink, SinkError, Store
from max_build.store.lanes import GivenUp, Lanes
from max_build.store.settings import Trust

__all__ = ["Tier"]

T = TypeVar("T")

_FAILURES = 3
_SICK = {"timeout", "refused", "server", "io"}  # kinds that say something of the tier itself


class Tier:
    """A store behind deadlines and a breaker.

    A call that gets nowhere for `request_timeout` seconds is given up. An upload has the whole
    budget, and the time in which what may be under way unseen arrives at `SLOWEST`. Three failures
    in a row, or `budget` seconds lost to failures, close the tier for the rest of the process.

    Parameters
    ----------
    store
        What it stands for.
    trust
        What it takes for its entries to be believed.
    request_timeout, budget
        Seconds, see `CacheSettings`.
    note
        Called with each fault, once.
    """

    def __init__(
        self,
        store: Store,
        trust: Trust,
        *,
        request_timeout: float,
        budget: float,
        note: Callable[[str, StoreError], None],
    ) -> None:
        self.label = store.label
        self.store = store
        self.trust = trust
        self._timeout = request_timeout
        self._budget = budget
        self._note = note
        self._lanes = Lanes()
        self._lock = threading.Lock()
        self._failures = 0
        self._lost = 0.0
        self._suspect: set[tuple[Kind, str]] = set()

    @property
    def open(self) -> bool:
        """Whether the tier is still worth a call."""
        return self._failures < _FAILURES and self._lost < self._budget

    @property
    def writable(self) -> bool:
        """Whether it may be written, and is worth trying."""
        return self.store.writable and self.open

    @property
    def leases(self) -> bool:
        """Whether machines can wait for each other here."""
        return self.writable and isinstance(self.store, Leases)

    def entry(self, key: str) -> bytes | None:
        """The entry under `key`.

        Raises
        ------
        StoreError
            If the tier failed at it; it has been noted, here and in the methods below, unless
            its kind is `corrupt`.
        """
        return self._call(lambda: self.store.get_entry(key))

    get_entry = entry  # as a store has it

    def list(self, kind: Kind) -> Iterator[Item]:
        """Everything of that kind, listed to its end at once."""
        found: deque[Item] = deque()
        self._call(lambda: found.extend(self.store.list(kind)), lambda: len(found))
        return iter(found)

    def put_entry(self, key: str, data: bytes, *, replace: bool) -> bool:
        """Store an entry; False if another one stands there and is not known to be bad."""
        replace = replace or ("ac", key) in self._suspect
        stored = self._call(lambda: self.store.put_entry(key, data, replace=replace))
        self._suspect.discard(("ac", key))
        return stored

    def touch(self, key: str) -> None:
        """Note that an entry was used, where the store's gc goes by that."""
        with contextlib.suppress(StoreError):
            self._call(lambda: self.store.touch(key))

    def has_blob(self, digest: str) -> bool:
        """Whether the tier has a blob, and nobody found it damaged."""
        if ("cas", digest) in self._suspect:
            return False
        return self._call(lambda: self.store.has_blob(digest))

    def pour(self, blob: Blob, sink: Sink) -> None:
        """Write a blob into `sink`; StoreError `missing` if the tier does not have it."""
        if not self._call(lambda: self.store.get_blob(blob.digest, sink), lambda: sink.count):
            message = f"{self.label} cache has no blob {blob.digest[:12]}"
            raise StoreError(message, kind="missing")

    def send(self, blob: Blob, path: Path) -> int:
        """Store the blob that `path` holds, unless the tier has it. Returns the bytes sent."""
        if self.has_blob(blob.digest):
            self._call(lambda: self.store.refresh(blob.digest))
            return 0
        with path.open("rb") as file:
            source = _Counted(file)
            self._call(
                lambda: self.store.put_blob(blob.digest, source),  # type: ignore[arg-type]
                lambda: source.count,
                unseen=min(blob.size, self.store.unseen),
            )
        self._suspect.discard(("cas", blob.digest))
        return blob.size

    @contextlib.contextmanager
    def lease(self, key: str, *, expiry: float, limit: float) -> Iterator[bool]:
        """Hold the tier's lease of `key`, where `leases`; see `shared_lease`."""
        assert isinstance(self.store, Leases)
        from max_build.store.lease import shared_lease

        with shared_lease(self.store, key, expiry=expiry, limit=limit, guard=self._call) as waited:
            yield waited

    def doubt(self, kind: Kind, name: str) -> None:
        """Note that an entry or blob is no good, so that it is replaced by the next."""
        self._suspect.add((kind, name))

    def spurn(self, kind: Kind, name: str) -> None:
        """The same, and get it out of the way now if we may."""
        self.doubt(kind, name)
        if self.writable:
            with contextlib.suppress(StoreError):
                self._call(lambda: self.store.discard(kind, name))

    def close(self) -> None:
        """Let go of threads and connections."""
        self._lanes.close()
        if self.open:
            self.store.close()

    def _call(
        self,
        function: Callable[[], T],
        progress: Callable[[], int] | None = None,
        unseen: int = 0,
    ) -> T:
        if not self.open:
            message = f"{self.label} cache is left out"
            raise StoreError(message, kind="closed")
        started = time.monotonic()
        limit = self._budget if unseen else self._timeout  # to store takes longer than to look up
        allowed = max(0.01, min(limit, self._budget - self._lost)) + unseen / SLOWEST
        try:
            result = self._lanes.call(function, allowed, progress)
        except SinkError:
            raise  # not this tier's doing
        except GivenUp:
            error = StoreError(
                f"{self.label} cache did not answer for {allowed:.1f} s", kind="timeout"
            )
        except StoreError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - a store's bug must not cost a build
            # Not its words, which may hold what is secret.
            error = StoreError(f"{self.label} cache failed: {type(raised).__name__}")
        else:
            self._failures = 0
            return result
        self._fail(error, time.monotonic() - started)
        raise error

    def _fail(self, error: StoreError, seconds: float) -> None:
        with self._lock:
            if error.kind in _SICK:
                self._failures += 1
                self._lost += seconds
            closed = not self.open
        if error.kind != "corrupt":  # which is for the reader to tell, who knows what was read
            self._note(self.label, error)
        if closed:
            message = f"{self.label} cache failed too often and is left out from here on"
            self._note(self.label, StoreError(message, kind="closed"))


class _Counted:
    """A file that tells how far it was read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.count += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()
