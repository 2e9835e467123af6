"""A directory for thousands of small files that live as long as one compile: in memory, if it can.

Writing the 600 headers of CCCL took 170 ms on a disk and 26 ms in `/dev/shm`, beside a compile of
1.3 s. What a killed process left there is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["in_memory"]

_MEMORY = Path("/dev/shm")
_YOUNG = 60.0  # seconds: it may not be locked yet


@contextlib.contextmanager
def in_memory(fallback: Path, need: int) -> Iterator[Path]:
    """A new directory that is gone after the block.

    Parameters
    ----------
    fallback
        Where to make it if there is no directory in memory with room.
    need
        Bytes that will be written; four times as many have to be free in memory.
    """
    prefix = f"max-build-{os.geteuid()}-"
    lock = -1
    try:
        room = os.statvfs(_MEMORY)
        if room.f_bavail * room.f_frsize < 4 * need:
            raise OSError
        _sweep(prefix)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=_MEMORY))
        lock = _locked(path)
    except OSError:
        path = Path(tempfile.mkdtemp(dir=fallback))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _sweep(prefix: str) -> None:
    """Remove the directories whose process is gone: nobody holds their lock."""
    for path in _MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _YOUNG:
                continue
            lock = _locked(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked(path: Path) -> int:
    """Hold a directory; the lock ends with the process.

    Raises
    ------
    OSError
        If another process holds it, or it is not this user's.
    """
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
