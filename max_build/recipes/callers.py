"""Who asks, told by the interpreter's frames: the project's files, the library, or max-build."""

from __future__ import annotations

import os
import sys
from types import FrameType

__all__ = [
    "LOOKS",
    "OURS",
    "Stack",
    "asked_by",
    "asks_whether",
    "callers",
    "is_library",
    "of_python",
]

Stack = tuple[str, ...]
"""Files of the code that is running, the innermost first; not the interpreter's, not ours."""

_HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.dirname(_HERE) + os.sep
"""What the path of every file of max-build begins with."""

LOOKS = ("stat", "lstat", "access", "readlink")
"""Functions of `os` that look at a place."""

_RECORDER = os.path.join(_HERE, "recorder.py")
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
# Inside them time and chance decide names and log lines, not what is computed.
_UNTOLD = tuple(_LIBRARY + name for name in ("tempfile.py", "logging" + os.sep))
# The library's own questions about what is somewhere, to which a file's size is no part of the
# answer.
_WHETHER = frozenset(
    "exists lexists isfile isdir islink ismount is_file is_dir is_symlink is_mount is_fifo "
    "is_socket is_block_device is_char_device realpath _joinrealpath resolve".split()
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


def callers() -> Stack:
    """Who is asking: empty where only the interpreter's library is, or time is of no account."""
    found: dict[str, None] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _RECORDER:
            break  # what called us is not what is derived
        if not file.startswith("<") and not file.startswith(OURS) and not of_python(file):
            found[file] = None
        elif not found and file.startswith(_UNTOLD):
            return ()
        frame = frame.f_back
    return tuple(found)


def asked_by(part: str, frame: FrameType | None) -> bool:
    """Whether a part of the interpreter's library is asking."""
    while frame is not None and (
        of_python(frame.f_code.co_filename) or frame.f_code.co_filename.startswith("<")
    ):
        if part in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
