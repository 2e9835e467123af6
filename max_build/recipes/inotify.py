"""inotify(7): which files of some directory trees are opened or changed, by whatever process."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
from collections.abc import Iterable, Iterator
from typing import Self

__all__ = ["CHANGED", "OPENED", "Overflow", "Watch", "directories"]

# <sys/inotify.h>
OPENED = 0x20
CHANGED = 0x2 | 0x40 | 0x80 | 0x100 | 0x200  # modified, moved from, moved to, created, deleted
_CREATED = 0x80 | 0x100
_ONLYDIR = 0x01000000
_OVERFLOW = 0x4000
_ISDIR = 0x40000000
_HEADER = struct.Struct("iIII")

LIMIT = 8192
"""Directories that one watch holds; a user has a few ten thousand in all."""


class Overflow(Exception):  # noqa: N818 - said of the queue
    """Events were lost, or there is more to watch than can be."""


def directories(root: str, *, all: bool = False) -> Iterator[str]:  # noqa: A002
    """`root` and the directories below it.

    Left out are those of caches (with a CACHEDIR.TAG), packages (`__pycache__`, `node_modules`),
    version control and virtual environments; without `all`, also hidden ones and `site-packages`.
    Links are not followed.
    """
    todo = [root]
    while todo:
        directory = todo.pop()
        yield directory
        try:
            with os.scandir(directory) as entries:
                todo += [
                    one.path
                    for one in entries
                    if one.is_dir(follow_symlinks=False) and _own(one, all)
                ]
        except OSError:
            continue


def _own(entry: os.DirEntry[str], all: bool) -> bool:  # noqa: A002
    if entry.name in {"__pycache__", "node_modules", ".git", ".hg", ".svn"}:
        return False
    if not all and (entry.name.startswith(".") or entry.name == "site-packages"):
        return False
    marks = ("pyvenv.cfg", "conda-meta", "CACHEDIR.TAG")
    return not any(os.path.exists(os.path.join(entry.path, one)) for one in marks)


class Watch:
    """Watches directory trees from the moment it is made. A context manager.

    Parameters
    ----------
    roots
        Directories, each with all below it, as `directories` lists them; for `OPENED`, all.
    mask
        `OPENED`, `CHANGED` or both. New directories are watched too when `CHANGED` is.

    Raises
    ------
    OSError
        If the kernel refuses.
    Overflow
        If there are more than `LIMIT` directories.
    """

    def __init__(self, roots: Iterable[str], mask: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._mask = mask
        self._places: dict[int, str] = {}
        self.fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            for root in roots:
                self._add(root)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def wait(self, seconds: float | None = None) -> bool:
        """Whether there is something to read, within `seconds`."""
        return bool(select.select([self.fd], [], [], seconds)[0])

    def read(self) -> set[str]:
        """The files that were opened or changed since the last call, absolute.

        Raises
        ------
        Overflow
            If events were lost.
        """
        found: set[str] = set()
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return found
            offset = 0
            while offset < len(data):
                watch, mask, _, length = _HEADER.unpack_from(data, offset)
                offset += _HEADER.size + length
                name = os.fsdecode(data[offset - length : offset].rstrip(b"\0"))
                if mask & _OVERFLOW:
                    raise Overflow
                if not name or watch not in self._places:
                    continue
                path = os.path.join(self._places[watch], name)
                if not mask & _ISDIR:
                    found.add(path)
                elif self._mask & CHANGED and mask & _CREATED and not name.startswith("."):
                    self._add(path)
                    found.update(self._files_below(path))

    def _add(self, root: str) -> None:
        for directory in directories(root, all=bool(self._mask & OPENED)):
            if len(self._places) >= LIMIT:
                message = f"there are more than {LIMIT} directories"
                raise Overflow(message)
            mask = self._mask | _ONLYDIR
            found = self._libc.inotify_add_watch(self.fd, os.fsencode(directory), mask)
            if found < 0 and ctypes.get_errno() in {errno.ENOENT, errno.ENOTDIR, errno.EACCES}:
                continue
            self._places[self._checked(found)] = directory

    def _files_below(self, root: str) -> Iterator[str]:
        for directory in directories(root):
            try:
                with os.scandir(directory) as entries:
                    yield from (one.path for one in entries if one.is_file())
            except OSError:
                continue

    def _checked(self, result: int) -> int:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result
