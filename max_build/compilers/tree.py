"""The private include tree: exactly the bytes that were hashed, under names that never differ.

NVRTC writes the paths of what it reads into `__FILE__` and into line information, into the latter
the times of the files too, and has no option to map either. So it runs with the tree as its working
directory and is given every path through `/proc/self/cwd`, which reads the same on every machine. A
header that the closure does not know is not there, and a source edited after it was hashed is
noticed here and not compiled.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from max_build.compilers.includes import SOURCE_ROOT, Closure, Files, Layout
from max_build.errors import CompileError, ToolchainError

__all__ = ["CANONICAL", "Tree", "materialise"]

CANONICAL = "/proc/self/cwd"
"""How the compiler names the root of the tree."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree on disk.

    Attributes
    ----------
    root
        Its directory: the working directory the compiler must run in.
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

    def readable(self, log: str) -> str:
        """A log with the paths of the project as they are written in the project."""
        return log.replace(f"{CANONICAL}/{SOURCE_ROOT}/", "").replace(f"{CANONICAL}/", "")


def materialise(closure: Closure, layout: Layout, files: Files, root: Path) -> Tree:
    """Write the tree of a closure under `root`, an empty or absent directory.

    One file that goes by two names stays one file, by a hard link inside the tree, so that
    `#pragma once` knows it again.

    Raises
    ------
    CompileError
        A file is no longer what was hashed, or cannot be read.
    ToolchainError
        There is no `/proc` on this machine.
    """
    if not os.path.isdir(CANONICAL):
        message = f"the compiler is given its files by `{CANONICAL}`, and there is none"
        raise ToolchainError(message, hint="mount /proc")
    source = b""
    made: set[str] = set()
    for directory in (*closure.directories, *closure.include_dirs):
        (root / directory).mkdir(parents=True, exist_ok=True)
    for header in closure.files:
        data = files.read(layout.disk_path(header.path))
        if hashlib.sha256(data).hexdigest() != header.digest:
            message = f"`{header.path}` changed while the unit was being built"
            raise CompileError(message, hint="build again")
        if header.path == closure.source:
            source = data
        path = root / header.path
        parent = os.path.dirname(header.path)
        if parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(parent)
        if header.first == header.path:
            path.write_bytes(data)
            os.utime(path, (0, 0))  # line information holds the time of each file
        else:
            path.hardlink_to(root / header.first)
    return Tree(
        root=root,
        source=source,
        name=f"{CANONICAL}/{closure.source}",
        include_args=tuple(f"-I{CANONICAL}/{directory}" for directory in closure.include_dirs),
    )
