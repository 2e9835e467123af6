"""Kernel libraries that a graph was built with: from paths on this machine to digests.

The text of a graph names the library's compiled file and nothing of what is in it, and that
file changes with the folder it was built from. So a library is known by its Mojo sources, every
file of the package, or by its own bytes where it came compiled; and, either way, by what lies
beside it for its imports to find.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from max_build.compilers.mojo_imports import UnkeyableError, beside, walk
from max_build.errors import CompileError
from max_build.key import canonical, digest

__all__ = ["Libraries", "build_library", "library_digest", "observed", "tree_digest"]

_PATHS = re.compile(r"_kernel_library_paths = \[(?P<paths>[^\]]*)\]")
_PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class Libraries:
    """What was learnt while a graph was built: compiled file → the sources it was built from."""

    built: dict[str, Path] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    def digest_of(self, path: str) -> str:
        """Digest of the library whose compiled file the graph names."""
        if path not in self.seen:
            source = self.built.get(path, Path(path))
            try:
                self.seen[path] = library_digest(source)
            except UnkeyableError as error:
                self.problem = str(error)
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
        """Name of a library that came compiled and is no more what it was; empty if none is."""
        came = {path: found for path, found in self.seen.items() if path not in self.built}
        now = Libraries()
        return next((Path(one).name for one in came if now.digest_of(one) != came[one]), "")

    def sources(self) -> tuple[Path, ...]:
        """What the libraries came from: folders of Mojo sources, and files that came compiled.

        With the files beside them; the names there, which an import chooses among, were listed.
        """
        found = {self.built.get(path, Path(path)) for path in self.seen}
        for one in tuple(found) if not self.problem else ():
            found |= set(filter(None, beside(one).values()))
        return tuple(sorted(found))

    def unknown(self, graph: Any) -> str:
        """Why the libraries of a `max.graph.Graph` cannot be keyed; empty when they can."""
        for path in graph.kernel_libraries_paths:
            if str(path) not in self.seen:
                return f"kernel library `{Path(path).name}` is not named in the graph's text"
            if str(path) not in self.built and not Path(path).is_file():
                return f"kernel library `{Path(path).name}` cannot be read"
        return self.problem


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
        except UnkeyableError as error:
            libraries.problem = str(error)
            compiled, sources = build(Path(path)), tree_digest(Path(path))
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

    Raises
    ------
    UnkeyableError
        As `library_digest`.
    """
    before = library_digest(path)
    compiled = build(path)
    return compiled, before if library_digest(path) == before else ""


def library_digest(path: Path) -> str:
    """Digest of a library, a file or a folder, and of what its imports could find beside it.

    Raises
    ------
    UnkeyableError
        If what lies beside it cannot be told.
    """
    own, others = tree_digest(path), _digests(beside(path).items())
    return digest(canonical([own, others])) if others else own


def tree_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, or of the relative names and bytes of every file below `path`."""
    if path.is_file():
        return digest(path.read_bytes())
    return digest(canonical(_digests(walk(path, lambda _: True))))


def _digests(files: Iterable[tuple[str, Path | None]]) -> list[tuple[str, str]]:
    return sorted((name, digest(file.read_bytes()) if file else "") for name, file in files)
