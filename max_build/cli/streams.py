"""The three standard streams of a command: closed ones, full ones, and readers that leave."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["PIPE", "outputs", "prepare"]

PIPE = 141
"""Exit status where the reader of stdout has left: 128 + SIGPIPE, as of any other Unix tool."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Talk(io.FileIO):
    """The file of stderr, whose reader may leave: talk that nobody hears ends no build."""

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def prepare() -> None:
    """Make the process's streams such that talking never fails, whatever they are."""
    # A stream that was closed would be the next file that is opened, and take what is said.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    encoding = sys.stderr.encoding if sys.stderr is not None else None
    file = io.BufferedWriter(_Talk(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(file, encoding, "backslashreplace", write_through=True)
    sys.stderr.reconfigure(line_buffering=True)


@contextlib.contextmanager
def outputs() -> Iterator[list[int]]:
    """What is printed in the block goes out at its end; faults of stdout are an exit status.

    Yields
    ------
    list[int]
        Empty; afterwards it has the exit status that a fault of stdout asks for.
    """
    status: list[int] = []
    try:
        try:
            yield status
        finally:
            sys.stdout.flush()  # the interpreter would do it with a traceback
    except BrokenPipeError:
        status.append(PIPE)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        place = f"`{error.filename}`" if error.filename else "standard output"
        print(f"max-build: {place} cannot be written: {error.strerror}", file=sys.stderr)
        status.append(1)
    if status:  # what is still in the buffer must not fail again at the interpreter's exit
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
