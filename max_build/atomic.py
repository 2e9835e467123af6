"""Files that appear whole under their name, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: str | Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """A new file beside `path`, which takes that name when the block ends.

    It has a name of its own until then, so that any number may write at once: the last one stays.
    Where the block or the renaming fails, it is removed and the error goes on.

    Parameters
    ----------
    path
        In a folder that is there.
    mode
        Its permissions whatever the umask is; None for what the umask leaves of 0666.
    """
    temp = os.path.join(os.path.dirname(path), f".max-build-{os.urandom(8).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(temp, flags, 0o666 if mode is None else mode)
    try:
        with os.fdopen(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            yield file
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):  # which may be why
            os.unlink(temp)
        raise
