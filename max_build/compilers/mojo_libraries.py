"""Kernel libraries that a graph was built with: from paths on this machine to digests.

The text of a graph names the library's compiled file and nothing of what is in it, and that
file changes with the folder it was built from. So a library is known by its Mojo sources, every
file of the package, or by its own bytes where it came compiled.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from max_build.errors import CompileError
from max_build.key import canonical, digest

__all__ = ["Libraries", "build_library", "observed", "tree_digest"]

_PATHS = re.compile(r"_kernel_library_paths = \[(?P<paths>[^\]]*)\]")
_PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class Libraries:
    """What was learnt while a graph was built: compiled file → the sources it was built from."""

    built: dict[str, Path] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)

    def digest_of(self, path: str) -> str:
        """Digest of the library whose compiled file the graph names."""
        if path not in self.seen:
            source = self.built.get(path, Path(path))
            self.seen[path] = tree_digest(source)
        return self.seen[path]

    def without_paths(self, text: str) -> str:
        """`text` of a graph, each library's path replaced by `sha256:<digest>`, order kept."""

        def replace(found: re.Match[str]) -> str:
            digests = (f'"sha256:{self.digest_of(path)}"' for path in _PATH.findall(found["paths"]))
            return f"_kernel_library_paths = [{', '.join(digests)}]"

        return _PATHS.sub(replace, text)

    def digests(self) -> dict[str, str]:
        """Label → digest of each library the text named; labels are positions, not paths."""
        return {f"library.{n}": one for n, one in enumerate(sorted(set(self.seen.values())), 1)}

    def changed(self) -> str:
        """Name of a library that came compiled and is another file by now; empty if none is."""
        for path, found in self.seen.items():
            if path not in self.built and tree_digest(Path(path)) != found:
                return Path(path).name
        return ""

    def sources(self) -> tuple[Path, ...]:
        """What the libraries came from: folders of Mojo sources, and files that came compiled."""
        return tuple(sorted({self.built.get(path, Path(path)) for path in self.seen}))

    def unknown(self, graph: Any) -> str:
        """Why the libraries of a `max.graph.Graph` cannot be keyed; empty when they can."""
        for path in graph.kernel_libraries_paths:
            if str(path) not in self.seen:
                return f"kernel library `{Path(path).name}` is not named in the graph's text"
            if str(path) not in self.built and not Path(path).is_file():
                return f"kernel library `{Path(path).name}` cannot be read"
        return ""


@contextlib.contextmanager
def observed(scratch: Path) -> Iterator[Libraries]:
    """Note which sources each library is compiled from, while the block builds a graph.

    MAX compiles a library to a file that all processes of a user share. Here it is made in
    `scratch`, so that what is hashed is what is compiled, whoever else compiles another state of
    the same sources meanwhile.

    Raises
    ------
    CompileError
        If the sources changed while they were compiled.
    """
    from max.graph import graph as module

    libraries = Libraries()
    build = module._build_mojo_source_package

    def noting(path: Path) -> Path:
        shared = tempfile.tempdir
        tempfile.tempdir = str(scratch)
        try:
            compiled, sources = build_library(build, Path(path))
        finally:
            tempfile.tempdir = shared
        if not sources:
            message = f"kernel library `{Path(path).name}` changed while it was compiled"
            raise CompileError(message, hint="build again")
        libraries.built[str(compiled)] = Path(path)
        libraries.seen[str(compiled)] = sources
        return compiled

    module._build_mojo_source_package = noting
    try:
        yield libraries
    finally:
        module._build_mojo_source_package = build


def build_library(build: Callable[[Path], Path], path: Path) -> tuple[Path, str]:
    """Compile a library with `build`; the compiled file, and the digest of its sources.

    The digest is empty if the sources changed meanwhile: which of them are in the file is not
    known then.
    """
    before = tree_digest(path)
    compiled = build(path)
    return compiled, before if tree_digest(path) == before else ""


def tree_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, or of the relative names and bytes of every file below `path`."""
    if path.is_file():
        return digest(path.read_bytes())
    rows: list[tuple[str, str]] = []
    entered: set[tuple[int, int]] = set()
    # Mojo follows links to folders, so their files count as well; a loop is entered once.
    for folder, folders, names in os.walk(path, followlinks=True):
        info = os.stat(folder)
        if (info.st_dev, info.st_ino) in entered:
            folders.clear()
            continue
        entered.add((info.st_dev, info.st_ino))
        folders[:] = sorted(one for one in folders if one != "__pycache__")
        for name in names:
            file = Path(folder, name)
            if file.is_file():
                rows.append((str(file.relative_to(path)), digest(file.read_bytes())))
    return digest(canonical(sorted(rows)))
