"""One compile of a key per machine: a lock that saves work and is trusted with nothing else."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from max_build.store.files import MAKERS

__all__ = ["node_lock"]

_POLL = 0.05


@contextlib.contextmanager
def node_lock(path: Path, limit: float) -> Iterator[bool]:
    """Hold the lock file at `path`, waiting up to `limit` seconds for another holder.

    The kernel frees the lock when its holder dies. Where there are no locks, or the wait is over,
    the block runs without.

    Yields
    ------
    bool
        Whether another holder was waited for.
    """
    fd, waited = _acquire(path, limit)
    try:
        yield waited
    finally:
        if fd is not None:
            with contextlib.suppress(OSError):
                path.unlink()  # while held: whoever waits on this file finds it gone, and reopens
            with contextlib.suppress(OSError):
                os.close(fd)


def _acquire(path: Path, limit: float) -> tuple[int | None, bool]:
    deadline = time.monotonic() + limit
    waited = False
    missed = 0
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            # Its folder may just be giving way to that of another who made it too.
            missed += 1
            if error.errno != errno.ENOENT or missed > MAKERS:
                return None, waited
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd, waited
        except FileNotFoundError:
            pass  # the last holder removed it just before
        except OSError as error:
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                os.close(fd)
                return None, waited
            waited = True
            if time.monotonic() >= deadline:
                os.close(fd)
                return None, waited
            time.sleep(_POLL)
        os.close(fd)
