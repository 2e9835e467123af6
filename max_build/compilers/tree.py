"""The private include tree: exactly the bytes that were hashed, under names that never differ.

NVRTC writes the paths of what it reads into `__FILE__` and into line information, and with them the
times of the files; into debug information it writes its working directory. It has no option to map
any of that. So it runs in the root directory and is given every path through an open directory of a
fixed number, `/proc/self/fd/250`, which reads the same on every machine. A header that the closure
does not know is not there; a source edited after it was hashed is noticed here and not compiled.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from max_build.compilers.files import Files
from max_build.compilers.includes import Closure, Layout
from max_build.errors import CompileError, ToolchainError

__all__ = ["CANONICAL", "Tree", "materialise"]

_NUMBER: Final = 250
CANONICAL: Final = f"/proc/self/fd/{_NUMBER}"
"""How the compiler names the root of the tree while it is entered."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree on disk.

    Attributes
    ----------
    root
        Its directory.
    source
        The bytes to compile.
    name
        The name to give the source.
    include_args
        One `-I` per include directory, in search order.
    """

    root: Path
    source: bytes
    name: str
    include_args: tuple[str, ...]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make `name` and `include_args` valid, and the working directory that of every machine.

        Both belong to the whole process: compile in one that does nothing else meanwhile.

        Raises
        ------
        ToolchainError
            There is no `/proc`, or the number is taken.
        """
        try:
            os.fstat(_NUMBER)
        except OSError:
            pass
        else:
            message = f"file {_NUMBER} is open in this process, where the tree should be"
            raise ToolchainError(message)
        before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        opened = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.dup2(opened, _NUMBER, inheritable=False)
            if not os.path.isdir(CANONICAL):
                message = f"the compiler is given its files by `{CANONICAL}`, and there is none"
                raise ToolchainError(message, hint="mount /proc")
            os.chdir("/")
            yield
        finally:
            os.fchdir(before)
            for number in (before, opened, _NUMBER):
                with suppress(OSError):
                    os.close(number)


def materialise(closure: Closure, layout: Layout, files: Files, root: Path) -> Tree:
    """Write the tree of a closure under `root`, an empty or absent directory.

    One file that goes by two names stays one file, by a hard link inside the tree, so that
    `#pragma once` knows it again.

    Raises
    ------
    CompileError
        A file is no longer what was hashed, or cannot be read.
    """
    source = b""
    made: set[str] = set()

    def make(directory: str) -> None:
        if directory not in made:
            os.makedirs(f"{root}/{directory}", exist_ok=True)
            made.add(directory)

    for directory in closure.include_dirs:
        make(directory)
    for detour in closure.detours:
        # `a/b/../c.h` is there only where `a/b` is.
        parts = detour.split("/")
        for index, part in enumerate(parts):
            if part == "..":
                make(posixpath.normpath("/".join(parts[:index])))
    for header in closure.files:
        data = files.read(layout.disk_path(header.path))
        if hashlib.sha256(data).hexdigest() != header.digest:
            message = f"`{header.path}` changed while the unit was being built"
            raise CompileError(message, hint="build again")
        if header.path == closure.source:
            source = data
        make(os.path.dirname(header.path))
        path = f"{root}/{header.path}"
        if header.first != header.path:
            os.link(f"{root}/{header.first}", path)
            continue
        with open(path, "xb", buffering=0) as file:
            file.write(data)
            os.utime(file.fileno(), (0, 0))  # line information holds the time of each file
    return Tree(
        root=root,
        source=source,
        name=f"{CANONICAL}/{closure.source}",
        include_args=tuple(f"-I{CANONICAL}/{directory}" for directory in closure.include_dirs),
    )
