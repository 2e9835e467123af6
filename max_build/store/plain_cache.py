"""diskcache without pickle: rows are text, numbers and bytes, held inline, or they are refused."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import diskcache

__all__ = ["PlainDisk", "open_index"]

_PATIENCE = 2.0  # seconds; where others work with it, a statement takes milliseconds
_RAW = 1  # diskcache's name for "as sqlite holds it"


class PlainDisk(diskcache.Disk):  # type: ignore[misc, unused-ignore] # diskcache is not typed
    """Takes `str` keys and `str`, `int` or `bytes` values; reads nothing else back."""

    def put(self, key: Any) -> tuple[str, bool]:
        """A key for the database, and whether it stands there as it is."""
        if not isinstance(key, str):
            message = f"the index takes text as key, got {type(key).__name__}"
            raise TypeError(message)
        return key, True

    def get(self, key: Any, raw: bool) -> Any:
        """A key from the database."""
        if not raw or not isinstance(key, str):
            message = "the index holds a key that is not text"
            raise ValueError(message)
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, Any]:  # noqa: ARG002
        """A value for the database: size, mode, file and column."""
        if isinstance(value, bytes):
            return 0, _RAW, None, sqlite3.Binary(value)
        if type(value) not in {int, str}:
            message = f"the index takes text, integers and bytes, got {type(value).__name__}"
            raise TypeError(message)
        return 0, _RAW, None, value

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:  # noqa: ARG002
        """A value from the database."""
        if mode != _RAW or filename is not None:
            message = "the index holds a value that is not plain"
            raise ValueError(message)
        return bytes(value) if isinstance(value, (memoryview, sqlite3.Binary)) else value


class PatientCache(diskcache.Cache):  # type: ignore[misc, unused-ignore]
    """Opens within seconds or not at all; diskcache itself would try for minutes.

    A file system whose locks fail, such as NFS without its lock daemon, looks locked for ever.

    All threads have one connection, so that `close` closes it for all: whoever uses the index has
    to see to it that no two do so at once. diskcache has one for each thread, which nobody closes.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._connection: sqlite3.Connection | None = None
        self._give_up = time.monotonic() + _PATIENCE
        super().__init__(*arguments, **options)
        self._give_up = float("inf")

    @property
    def _con(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(
                os.path.join(self._directory, diskcache.core.DBNAME),
                timeout=self._timeout,
                isolation_level=None,
                check_same_thread=False,
            )
            with contextlib.suppress(sqlite3.OperationalError):  # it is a new file
                kept = self._connection.execute("SELECT key, value FROM Settings").fetchall()
                for key, value in kept:
                    if key.startswith("sqlite_"):  # pragmas are a connection's own
                        self.reset(key, value, update=False)
        return self._connection

    def rows(self, namespace: str, prefix: str) -> dict[str, bytes]:
        """The rows of a namespace whose key begins with `prefix`, read in one query."""
        first = namespace + prefix
        found = self._sql(  # diskcache's own way asks for one row at a time
            "SELECT key, value FROM Cache"
            " WHERE key >= ? AND key < ? AND mode = ? AND filename IS NULL",
            (first, first + chr(0x10FFFF), _RAW),
        )
        return {
            key[len(namespace) :]: bytes(value)
            for key, value in found
            if isinstance(key, str) and isinstance(value, bytes)
        }

    def close(self) -> None:
        """Close the connection; the next use makes another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # e.g. if it was never opened
            self.close()

    @property
    def _sql(self) -> Any:
        execute = super()._sql

        def bounded(*statement: Any) -> Any:
            try:
                return execute(*statement)
            except sqlite3.OperationalError as error:
                if time.monotonic() < self._give_up:
                    raise
                message = "unable to open: it is locked for too long"
                raise sqlite3.OperationalError(message) from error

        return bounded if self._give_up < float("inf") else execute


def open_index(folder: Path) -> Any:
    """Open (or make) the index in `folder`."""
    return PatientCache(
        str(folder),
        timeout=1,  # another process holds it: go without, it is only a memo
        disk=PlainDisk,
        size_limit=256 << 20,
        sqlite_mmap_size=0,  # a truncated file would be SIGBUS
    )
