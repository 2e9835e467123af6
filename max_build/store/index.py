"""The local index: what was found out before and may be forgotten at any time."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from max_build.stamp import read_digest, stamp_of

__all__ = ["Memo"]

log = logging.getLogger(__name__)

_TOGETHER = 64
_PATIENCE = 3  # failures in a row


class Memo:
    """Small values by (namespace, key), in a folder; absent or broken, it remembers nothing.

    Opened at the first use. No method raises for what is wrong with the folder.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._index: Any = None
        self._lock = threading.Lock()
        self._turn = threading.RLock()
        self._owner = os.getpid()
        self._inherited: Any = None  # kept, since ending it here would meddle with the parent's
        self._failures = 0
        self._files: dict[str, bytes] = {}
        self._known: set[str] = set()
        self._unsaved: dict[str, bytes] = {}

    @property
    def is_open(self) -> bool:
        """Whether asking costs no more than a query."""
        return self._index is not None

    @property
    def folder(self) -> Path | None:
        """Where it is, for another process to open; None if it remembers nothing."""
        return self._folder

    def get(self, namespace: str, key: str) -> bytes | None:
        """The value last set, or None."""
        self._save()
        value = self._try(lambda index: index.get(f"{namespace}:{key}"))
        return value if isinstance(value, bytes) else None

    def under(self, namespace: str, prefix: str) -> dict[str, bytes]:
        """The values of the keys that begin with `prefix`, by key, read in one query."""
        return self._try(lambda index: index.rows(f"{namespace}:", prefix)) or {}

    def set(self, namespace: str, key: str, value: bytes) -> None:
        """Remember a value."""
        self.set_all(namespace, {key: value})

    def set_all(self, namespace: str, values: Mapping[str, bytes]) -> None:
        """Remember values, in one step."""

        def within(index: Any) -> None:
            with index.transact():
                for key, value in values.items():
                    with contextlib.suppress(UnicodeError):  # a path that is not UTF-8
                        index.set(f"{namespace}:{key}", value)

        self._try(within)

    def update(self, namespace: str, key: str, change: Any) -> bool:
        """Replace a value by `change(value)` in one step among all processes.

        Returns
        -------
        bool
            False if it was not, e.g. since another process held the index for too long.
        """

        def within(index: Any) -> Any:
            name = f"{namespace}:{key}"
            with index.transact():
                old = index.get(name)
                return index.set(name, change(old if isinstance(old, bytes) else None))

        return bool(self._try(within))

    def digest_of(self, path: Path | str) -> str:
        """SHA-256 (hex) of a file's bytes, read again only if the file may have changed.

        Raises
        ------
        OSError
            If the file cannot be read.
        """
        name = os.path.abspath(path)
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):  # a device has no end, a pipe may not even open
            raise OSError(errno.EINVAL, "is not a regular file", name)
        stamp = repr(stamp_of(info)).encode()
        known = self._file(name)
        if known is not None and known.startswith(stamp + b" "):
            return known[len(stamp) + 1 :].decode()
        found, read = read_digest(path)
        if read is not None:
            self._files[name] = self._unsaved[name] = f"{read!r} {found}".encode()
            if len(self._unsaved) >= _TOGETHER:
                self._save()
        return found

    def _file(self, name: str) -> bytes | None:
        """What is known of a file, looked up for all that lie beside and below it at once."""
        folder = os.path.join(os.path.dirname(name), "")
        if folder not in self._known and not any(map(folder.startswith, self._known)):
            self._files.update(self.under("file", folder))
        self._known.add(folder)
        return self._files.get(name)

    def _save(self) -> None:
        while self._unsaved:
            values, self._unsaved = self._unsaved, {}
            self.set_all("file", values)

    def close(self) -> None:
        """Close the index, if it was opened."""
        self._save()
        self._leave()

    def _leave(self) -> None:
        """Remember nothing from here on."""
        self._after_fork()
        with self._lock:
            index, self._index, self._folder = self._index, None, None
        if index is not None:
            with contextlib.suppress(Exception):
                index.close()

    def _try(self, use: Any) -> Any:
        index = self._open()
        if index is None:
            return None
        try:
            with self._turn:
                found = use(index)
        except Exception as error:  # noqa: BLE001 - whatever sqlite says, it is only a memo
            log.debug("index: %s", error)
            self._failures += 1
            if _damaged(error):
                self._forget()
            elif _hopeless(error) or self._failures == _PATIENCE:
                self._leave()  # each further try may take sqlite 10 s
            return None
        self._failures = 0
        return found

    def _open(self) -> Any:
        self._after_fork()
        with self._lock:
            if self._index is None and self._folder is not None:
                try:
                    from max_build.store.plain_cache import open_index

                    self._index = open_index(self._folder)
                except Exception as error:  # noqa: BLE001 - see `_try`
                    log.debug("index: %s", error)
                    if _damaged(error):
                        shutil.rmtree(self._folder, ignore_errors=True)
                    self._folder = None
            return self._index

    def _after_fork(self) -> None:
        """In a child: neither its parent's connection nor what a thread of the parent held."""
        if self._owner != os.getpid():
            self._inherited, self._index, self._owner = self._index, None, os.getpid()
            self._lock, self._turn = threading.Lock(), threading.RLock()

    def _forget(self) -> None:
        """Drop a damaged index; the next process starts a new one."""
        folder = self._folder
        self._leave()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _damaged(error: Exception) -> bool:
    text = str(error)
    return "not a database" in text or "malformed" in text or "not plain" in text


def _hopeless(error: Exception) -> bool:
    """Whether the file system failed, rather than another process had the index for long."""
    text = str(error)
    return "locking protocol" in text or "disk I/O" in text or "unable to open" in text
