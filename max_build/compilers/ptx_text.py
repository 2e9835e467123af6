"""What a PTX module says about itself in its first directives."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from max_build.errors import CompileError

__all__ = ["Ptx", "read_ptx"]

_COMMENT: Final = re.compile(rb"//[^\n]*|/\*.*?\*/", re.DOTALL)
_VERSION: Final = re.compile(rb"^\s*\.version\s+(\d+)\.(\d+)\s", re.MULTILINE)
_TARGET: Final = re.compile(rb"^\s*\.target\s+(sm_\d+[af]?)\b", re.MULTILINE)


class Ptx(NamedTuple):
    """The ISA version of a module, and the architecture it is for."""

    isa: tuple[int, int]
    target: str


def read_ptx(ptx: bytes, name: str) -> Ptx:
    """Read the directives at the head of a PTX module, called `name` in messages.

    Follows "PTX ISA", sections "Comments", `.version` and `.target`.

    Raises
    ------
    CompileError
        It is not PTX: one of the first two directives is missing.
    """
    text = _COMMENT.sub(b" ", ptx)
    version = _VERSION.search(text)
    target = _TARGET.search(text)
    if version is None or target is None:
        missing = ".version" if version is None else ".target"
        message = f"`{name}` is not PTX: it has no `{missing}` directive"
        raise CompileError(message)
    return Ptx(isa=(int(version[1]), int(version[2])), target=target[1].decode())
