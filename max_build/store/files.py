"""Files as a directory store reads them: regular ones alone, and what NFS does to them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from max_build.errors import StoreError
from max_build.store.base import ENTRY_LIMIT, fault_of

__all__ = [
    "ABSENT",
    "MAKERS",
    "Reading",
    "again",
    "names_in",
    "on_nfs3",
    "open_regular",
    "read_opened",
    "read_small",
    "read_whole",
    "scan",
]

T = TypeVar("T")

ABSENT = {errno.ENOENT, errno.ENOTDIR}
"""Errors that say that a name is not there."""

MAKERS = 16
"""Writers that may find the same folder missing at once."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block


class Reading:
    """Turns an error of the system into one of the store; a generator would take thrice as long."""

    __slots__ = ("_label", "_path")

    def __init__(self, label: str, path: Path | str) -> None:
        self._label = label
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise fault_of(error, f"{self._label} cache cannot read `{self._path}`") from error


def open_regular(path: Path | str) -> tuple[int, os.stat_result] | None:
    """Open a regular file for reading: it and its status, or None if nothing is there."""
    try:
        fd = os.open(path, _READ)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        if error.errno in {errno.ELOOP, errno.ENXIO}:  # a link, a socket
            message = f"`{path}` is not a regular file"
            raise StoreError(message, kind="corrupt") from error
        raise
    try:
        info = os.fstat(fd)
    except OSError:
        os.close(fd)
        raise
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        message = f"`{path}` is not a regular file"
        raise StoreError(message, kind="corrupt")
    return fd, info


def read_small(path: Path | str) -> bytes | None:
    """The bytes of a regular file no larger than an entry can be, or None if there is none."""
    opened = open_regular(path)
    return opened and read_opened(*opened, path)


def read_opened(fd: int, info: os.stat_result, path: Path | str) -> bytes:
    """The same of a file that `open_regular` opened; it is closed."""
    try:
        data = read_whole(fd, min(info.st_size, ENTRY_LIMIT + 1))
    finally:
        os.close(fd)
    if len(data) > ENTRY_LIMIT:
        message = f"`{path}` is larger than any entry"
        raise StoreError(message, kind="corrupt")
    return data


def read_whole(fd: int, size: int) -> bytes:
    """The first `size` bytes of an open file, fewer where it is shorter."""
    data = os.read(fd, size)
    while len(data) < size and (chunk := os.read(fd, size - len(data))):
        data += chunk
    return data


def again(read: Callable[[], T], unless: Callable[[], bool] = lambda: False) -> T:
    """Read anew where a file was replaced or removed under an NFS client's feet."""
    for _ in range(2):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE or unless():
                raise
    return read()


def on_nfs3(folder: Path) -> bool:
    """Whether a folder lies on NFS before version 4, which calls itself `nfs4` from there on."""
    from max_build.machine import mount_of

    try:
        device = os.stat(folder).st_dev
    except OSError:
        return False
    return mount_of(str(folder), device).kind == "nfs"


def names_in(folder: Path) -> list[str] | None:
    """What a folder holds, asked for anew; None if it cannot be listed."""
    try:
        return os.listdir(folder)
    except OSError:
        return None


def scan(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """What a folder holds; nothing if it is not there."""
    try:
        found = os.scandir(folder)
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        return
    with found:
        yield from found
