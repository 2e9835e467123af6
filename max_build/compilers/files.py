"""Files as the compilers of kernels see them: what tells one from another, and its digest."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from typing import Final, Protocol

from max_build.errors import CompileError

__all__ = ["Disk", "Files", "Found", "Stat"]

_RACY_NS: Final = 2_000_000_000

Stat = tuple[int, int, int, int, int]
"""Size in bytes, mtime and ctime in ns, inode and device of a file whose digest is known."""


@dataclass(frozen=True, slots=True)
class Found:
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
    """The real filesystem, with each digest remembered under the file's stat.

    Parameters
    ----------
    memo
        Absolute path to stat and digest; read and added to. A file that changed within the last
        two seconds is not remembered, since a second change might not show in its times.

    Raises
    ------
    CompileError
        From each method: a file is there but cannot be read.
    """

    def __init__(self, memo: MutableMapping[str, tuple[Stat, str]] | None = None) -> None:
        self._memo = {} if memo is None else memo

    def find(self, path: str) -> Found | None:
        """Return the regular file at `path`, None where there is none."""
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return None  # whatever hides it from us hides it from the compiler
        if not stat.S_ISREG(found.st_mode):
            return None
        known = (
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
            found.st_ino,
            found.st_dev,
        )
        remembered = self._memo.get(path)
        if remembered is not None and remembered[0] == known:
            return Found(known[3:], remembered[1])
        # Read before hashing: a change in between shows in the stat and is found next time.
        digest = hashlib.sha256(self.read(path)).hexdigest()
        if time.time_ns() - max(known[1], known[2]) > _RACY_NS:
            self._memo[path] = (known, digest)
        return Found(known[3:], digest)

    def read(self, path: str) -> bytes:
        """Return the bytes of the file at `path`."""
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            message = f"cannot read `{path}`: {error.strerror}"
            raise CompileError(message) from error
