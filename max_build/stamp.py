"""Whether a file is still what it was when it was read, told from its status alone."""

from __future__ import annotations

import hashlib
import os
import time
from functools import partial

__all__ = ["Stamp", "read_digest", "settled", "stamp_of"]

Stamp = tuple[int, int, int, int, int]
"""What stays the same as long as a file does: size, mtime and ctime in ns, inode, device."""

_RACY = 2_000_000_000
_sha256 = partial(hashlib.sha256, usedforsecurity=False)


def stamp_of(info: os.stat_result) -> Stamp:
    """The stamp of a file."""
    return (info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_dev)


def settled(info: os.stat_result, since: int) -> bool:
    """Whether every change after `since` is sure to show in the stamp.

    `since` is `time.time_ns()` from before the file was read. A file written less than two seconds
    earlier may be written again within the same tick of the file system's clock. One from the
    future (another machine's clock) is never settled.
    """
    return since - max(info.st_mtime_ns, info.st_ctime_ns) > _RACY


def read_digest(path: str | os.PathLike[str]) -> tuple[str, Stamp | None]:
    """SHA-256 (hex) of a file's bytes, and the stamp under which it may be remembered.

    None in place of the stamp if the file changed while it was read, or might do so yet without
    its stamp telling. Ask only for a regular file: a device has no end.

    Raises
    ------
    OSError
        If the file cannot be read.
    """
    began = time.time_ns()
    with open(path, "rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        found = hashlib.file_digest(file, _sha256).hexdigest()
        after = os.fstat(file.fileno())
    stamp = stamp_of(before)
    return found, stamp if stamp == stamp_of(after) and settled(before, began) else None
