"""The tier that everything is used from: this machine's directory, and what stands in for it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from max_build.errors import StoreError
from max_build.key import digest
from max_build.record import Blob
from max_build.stamp import Stamp, settled, stamp_of
from max_build.store.base import Sink
from max_build.store.directory import DirectoryStore
from max_build.store.files import open_regular, read_whole
from max_build.store.index import Memo

__all__ = ["Local"]

_MEMO_FROM = 2 << 20  # bytes: below, hashing is quicker than opening the index,
_MEMO_OPEN_FROM = 64 << 10  # and here, than asking it where it is open
_AT_ONCE = 1 << 20


class Local:
    """Verified files of blobs, from the user's directory, or from scratch where that fails.

    Parameters
    ----------
    store
        The user's directory, or None where there is no usable one.
    memo
        Remembers which files were verified.
    note
        Called with each fault that was worked around.
    """

    def __init__(
        self, store: DirectoryStore | None, memo: Memo, note: Callable[[str, StoreError], None]
    ) -> None:
        self.store = store
        self._memo = memo
        self._note = note
        self._scratch: dict[str, DirectoryStore] = {}
        self._stores = (store,) if store is not None else ()
        self._lock = threading.Lock()
        self._verified: dict[str, Stamp] = {}
        self._unsaved: dict[str, Stamp] = {}
        self._cleanup: list[Callable[[], object]] = []
        self.grown = False
        """Whether anything was added to the user's directory."""

    @property
    def uses_scratch(self) -> bool:
        """Whether there is scratch space, with files that `close` removes."""
        return bool(self._scratch)

    def get_entry(self, key: str) -> bytes | None:
        """The entry of `key`, or None.

        Raises
        ------
        StoreError
            If there is something that cannot be read.
        """
        for store in self._stores:
            data = store.get_entry(key)
            if data is not None:
                return data
        return None

    def put_entry(self, key: str, data: bytes, blobs: Iterable[Blob] = ()) -> bool:
        """Let `data` stand under `key`, replacing what does, where the blobs that it names lie.

        Returns
        -------
        bool
            Whether that is the user's directory, where it lasts.
        """
        for store in self._stores:
            if not store.writable:
                continue
            if not all(os.path.lexists(store.place("cas", blob.digest)) for blob in blobs):
                continue  # they found no room there, or a gc has just taken them
            try:
                store.put_entry(key, data, replace=True)
            except StoreError as error:
                self._note("local", error)
            else:
                self.grown = self.grown or store is self.store
                return store is self.store
        return False

    def keeps(self, key: str, blobs: Iterable[Blob]) -> bool:
        """Whether an entry and these blobs are in the user's directory, unread."""
        if self.store is None or not os.path.lexists(self.store.place("ac", key)):
            return False
        return all(os.path.lexists(self.store.place("cas", blob.digest)) for blob in blobs)

    def discard_entry(self, key: str) -> None:
        """Move a damaged entry aside."""
        for store in self._stores:
            with contextlib.suppress(StoreError):
                store.discard("ac", key)

    def touch(self, key: str) -> None:
        """Note that an entry was used."""
        if self.store is not None:
            self.store.touch(key)

    def holds(self, blob: Blob) -> bool:
        """Whether a file of the blob's name and size is there, unread."""
        for store in self._stores:
            with contextlib.suppress(OSError):
                if os.lstat(store.place("cas", blob.digest)).st_size == blob.size:
                    return True
        return False

    def file(self, blob: Blob) -> Path:
        """The blob's file, verified: its digest is right, or was and the file is unchanged.

        Raises
        ------
        StoreError
            `corrupt` if what was there was damaged and has been moved aside, `missing` if
            nothing was there, `mismatch` if it is sound and of another size.
        """
        return self.verified(blob).path("cas", blob.digest)

    def verified(self, blob: Blob) -> DirectoryStore:
        """The store that has it, verified; raises as `file` does."""
        damage: StoreError | None = None
        for store in self._stores:
            path = store.place("cas", blob.digest)
            try:
                if self._verify(path, blob):
                    return store
            except StoreError as error:
                damage = error
                if error.kind != "corrupt":
                    continue
                with contextlib.suppress(StoreError):
                    store.discard("cas", blob.digest)
        if damage is not None:
            raise damage
        message = f"blob {blob.digest[:12]} ({blob.role}) is not in the local cache"
        raise StoreError(message, kind="missing")

    def keep(self, blob: Blob, pour: Callable[[Sink], None]) -> bool:
        """Store the blob that `pour` writes, in the first place that takes it.

        Returns
        -------
        bool
            Whether that is the user's directory, where it lasts.

        Raises
        ------
        StoreError
            What `pour` raised; `corrupt` if it poured something else; or the last refusal, when
            not even scratch space is left.
        """
        failure: StoreError | None = None

        def watched(sink: Sink) -> None:
            nonlocal failure
            try:
                pour(sink)
            except StoreError as error:
                failure = error
                raise

        refusal = StoreError("no place takes the blob", kind="full")
        for store in self._writers():
            try:
                with store.receive(blob.digest, blob.size) as sink:
                    watched(sink)
            except StoreError as error:
                if error is failure or error.kind in {"corrupt", "mismatch"}:
                    raise
                self._note("local", error)
                refusal = error
            else:
                self.grown = self.grown or store is self.store
                return store is self.store
        raise refusal

    def refresh(self, digest: str) -> None:
        """Start the grace period of a blob again."""
        if self.store is not None and self.store.writable:
            self.store.refresh(digest)

    def close(self) -> None:
        """Keep what was verified, and remove the scratch space with the files it gave."""
        if self._unsaved:
            stamps = {digest: repr(stamp).encode() for digest, stamp in self._unsaved.items()}
            self._memo.set_all("verified", stamps)
            self._unsaved.clear()
        for clean in self._cleanup:
            clean()
        self._scratch.clear()
        self._stores = (self.store,) if self.store is not None else ()

    def _verify(self, path: str, blob: Blob) -> bool:
        """Whether the file is there and is the blob; StoreError `corrupt` if it is another."""
        try:
            known = self._verified.get(path)
            remembers = blob.size >= (_MEMO_OPEN_FROM if self._memo.is_open else _MEMO_FROM)
            if (known is not None or remembers) and (info := _status(path)) is not None:
                stamp = stamp_of(info)
                if stamp == known and info.st_size == blob.size:
                    return True
                if remembers and info.st_size == blob.size and self._remembered(blob.digest, stamp):
                    self._verified[path] = stamp
                    return True
            began = time.time_ns()
            opened = open_regular(path)
            if opened is None:
                return False
            fd, info = opened
            try:
                right = _digest_of(fd, info.st_size) == blob.digest
            finally:
                os.close(fd)
        except StoreError:
            raise  # no regular file
        except OSError as error:
            # It may pass, so the file stays; where it does not, the next compile replaces it.
            message = f"blob {blob.digest[:12]} cannot be read: {error.strerror}"
            raise StoreError(message) from error
        if not right:
            message = f"blob {blob.digest[:12]} ({blob.role}) is damaged: `{path}`"
            raise StoreError(message, kind="corrupt")
        if info.st_size != blob.size:
            message = (
                f"blob {blob.digest[:12]} ({blob.role}) has {info.st_size} bytes, "
                f"and its record says {blob.size}"
            )
            raise StoreError(message, kind="mismatch")
        if settled(info, began):
            stamp = stamp_of(info)
            self._verified[path] = stamp
            if remembers:
                self._unsaved[blob.digest] = stamp
        return True

    def _remembered(self, digest: str, stamp: Stamp) -> bool:
        return self._memo.get("verified", digest) == repr(stamp).encode()

    def _writers(self) -> Iterator[DirectoryStore]:
        if self.store is not None and self.store.writable:
            yield self.store
        for parent in (tempfile.gettempdir(), "/dev/shm"):
            with self._lock:
                if parent not in self._scratch:
                    try:
                        root = tempfile.mkdtemp(prefix="max-build-", dir=parent)
                    except OSError:
                        continue
                    self._scratch[parent] = DirectoryStore(Path(root))
                    self._stores = (*self._stores, self._scratch[parent])
                    self._cleanup.append(weakref.finalize(self, _remove, root, os.getpid()))
                scratch = self._scratch[parent]
            yield scratch


def _digest_of(fd: int, size: int) -> str:
    if size <= _AT_ONCE:
        return digest(read_whole(fd, size))
    with open(fd, "rb", buffering=0, closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None  # opening it has the last word


def _remove(root: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves it to its parent
        shutil.rmtree(root, ignore_errors=True)
