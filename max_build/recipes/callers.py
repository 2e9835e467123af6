"""Who asks, told by the interpreter's frames: the project's files, the library, or max-build."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

__all__ = [
    "LOOKS",
    "OURS",
    "Stack",
    "asked_by",
    "asks_whether",
    "callers",
    "importer",
    "is_library",
    "of_python",
    "start_with",
    "waits",
]

Stack = tuple[str, ...]
"""Files of the code that is running, the innermost first; not the interpreter's, not ours.

`*` is whoever it was that gave a thread its work, where its frames do not tell.
"""

_HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.dirname(_HERE) + os.sep
"""What the path of every file of max-build begins with."""

LOOKS = ("stat", "lstat", "access", "readlink")
"""Functions of `os` that look at a place."""

_RECORDER = os.path.join(_HERE, "recorder.py")
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
# Inside them time and chance decide names and log lines, not what is computed.
_UNTOLD = tuple(_LIBRARY + name for name in ("tempfile.py", "logging" + os.sep))
# Inside them clocks and the number of CPUs decide who waits for how long, and how many work.
_WAITING = tuple(
    _LIBRARY + name
    for name in (
        "asyncio" + os.sep,
        "concurrent" + os.sep,
        "logging" + os.sep,
        "multiprocessing" + os.sep,
        "queue.py",
        "selectors.py",
        "socket.py",
        "subprocess.py",
        "tempfile.py",
        "threading.py",
    )
)
_started = threading.local()
# The library's own questions about what is somewhere, to which a file's size is no part of the
# answer.
_WHETHER = frozenset(
    "exists lexists isfile isdir islink ismount is_file is_dir is_symlink is_mount is_fifo "
    "is_socket is_block_device is_char_device realpath _joinrealpath resolve "
    "updatecache checkcache".split()  # of `linecache`
)


def of_python(file: str) -> bool:
    """Whether a file is one of the interpreter's own library."""
    return file.startswith(_LIBRARY) and "-packages" + os.sep not in file


def is_library(frame: FrameType) -> bool:
    """Whether what runs in a frame is the interpreter's own library, or frozen into it."""
    file = frame.f_code.co_filename
    return of_python(file) or file.startswith("<frozen")


def asks_whether(frame: FrameType | None) -> bool:
    """Whether a look by the library is for what is there, and not for its size."""
    if frame is not None and frame.f_code.co_name in LOOKS and is_library(frame):
        frame = frame.f_back  # `Path.stat`
    return frame is not None and frame.f_code.co_name in _WHETHER and is_library(frame)


def waits(frame: FrameType) -> bool:
    """Whether a frame is the library's, and asks for the time or for CPUs for itself alone."""
    if frame.f_code.co_name == "time" and frame.f_back is not None and is_library(frame):
        frame = frame.f_back  # `loop.time`
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    return file.startswith(_WAITING) and name not in ("run", "_run")  # those call what was given


def start_with(stack: Stack) -> None:
    """Say on whose behalf this thread was started."""
    _started.stack = stack


def callers() -> Stack:
    """Who is asking: empty where only the interpreter's library is, or time is of no account.

    In a thread, whoever started it too. A pool's thread works for others as well, and tells them
    by no frame where it was given a function of the interpreter's: then anybody may be asking.
    """
    found: dict[str, None] = {}
    ours = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _RECORDER:
            return tuple(found)  # what called us is not what is derived
        if file.startswith(OURS):
            ours = ours or not file.startswith(_HERE)
        elif not file.startswith("<") and not of_python(file):
            found[os.path.abspath(file)] = None
        elif not found and file.startswith(_UNTOLD):
            return ()
        frame = frame.f_back
    base = getattr(_started, "stack", ())
    if not found and not ours:
        return ("*", *base)
    return tuple(dict.fromkeys((*found, *base)))


def importer(frame: FrameType | None) -> str:
    """The file on whose behalf the library, or code without a file, imports; `*` if none tells."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not file.startswith(OURS) and not of_python(file):
            return os.path.abspath(file)
        frame = frame.f_back
    return "*"


def asked_by(part: str, frame: FrameType | None) -> bool:
    """Whether a part of the interpreter's library is asking."""
    while frame is not None and (
        of_python(frame.f_code.co_filename) or frame.f_code.co_filename.startswith("<")
    ):
        if part in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
