"""Files as the compilers of kernels see them: what tells one from another, and its digest."""

from __future__ import annotations

import os
import stat
from collections.abc import Hashable, MutableMapping
from typing import Protocol

import msgspec

from max_build.errors import CompileError
from max_build.stamp import Stamp, read_digest, stamp_of

__all__ = ["Disk", "Files", "Found"]


class Found(msgspec.Struct, frozen=True):
    """One regular file: what tells it from every other, and the SHA-256 of its bytes, in hex."""

    identity: Hashable
    digest: str


class Files(Protocol):
    """How the resolver sees a filesystem."""

    def find(self, path: str) -> Found | None:
        """Return the regular file at an absolute path, None where there is none."""

    def read(self, path: str) -> bytes:
        """Return the bytes of the file at an absolute path."""


class Disk:
    """The real filesystem, with each digest remembered under the file's stamp.

    Parameters
    ----------
    memo
        Absolute path to stamp and digest; read and added to. A file of which another change might
        not show in its times is not remembered: see `read_digest`.

    Raises
    ------
    CompileError
        From each method: a file is there but cannot be read.
    """

    def __init__(self, memo: MutableMapping[str, tuple[Stamp, str]] | None = None) -> None:
        self._memo = {} if memo is None else memo

    def find(self, path: str) -> Found | None:
        """Return the regular file at `path`, None where there is none."""
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return None  # whatever hides it from us hides it from the compiler
        if not stat.S_ISREG(found.st_mode):
            return None
        known = stamp_of(found)
        remembered = self._memo.get(path)
        if remembered is not None and remembered[0] == known:
            return Found(known[3:], remembered[1])
        try:
            digest, read = read_digest(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        if read is not None:
            self._memo[path] = (read, digest)
        return Found(known[3:], digest)

    def read(self, path: str) -> bytes:
        """Return the bytes of the file at `path`."""
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> CompileError:
    return CompileError(f"cannot read `{path}`: {error.strerror}")
