"""Whether a file is still what it was when it was read, told from its status alone."""

from __future__ import annotations

import os

__all__ = ["Stamp", "settled", "stamp_of"]

Stamp = tuple[int, int, int, int, int]
"""What stays the same as long as a file does: size, mtime and ctime in ns, inode, device."""

_RACY = 2_000_000_000


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
