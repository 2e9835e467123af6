"""Which files a CUDA C++ compile can read: the closure of its includes, and what was not there.

NVRTC has no option that lists what it read, so the closure is derived. Measured with 12.9 to
13.5, and the rules followed here: a quoted name is looked for beside the file that names it and
then in the include directories in their order, an angled one in the include directories alone; a
directory or a dangling link is passed over; `..` is resolved by the operating system; and
`#pragma once` knows a file by its inode. No environment variable adds a directory, and no header
is there without one.

Everything is written down in *tree paths*: where the file lies in the private tree that the
compile sees (`compilers.tree`), the same on every machine. A closure holds no path of this one.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from max_build.compilers.files import Files, Found
from max_build.compilers.scan import Include, Scan, glued, scan
from max_build.errors import CompileError

__all__ = ["SOURCE_ROOT", "Closure", "Header", "Layout", "changed", "pasted", "resolve"]

SOURCE_ROOT: Final = "src"
"""Tree path of the project's root; include directories outside of it become `include-N`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the roots of the tree lie on this machine.

    Attributes
    ----------
    roots
        Tree name of each root to its absolute directory.
    include_dirs
        Tree paths of the include directories, in search order.
    """

    roots: dict[str, str]
    include_dirs: tuple[str, ...]

    @classmethod
    def of(cls, project: str, include_dirs: Sequence[str] = ()) -> Layout:
        """Lay out a project and its include directories, which may be relative to it.

        A directory inside another root keeps its place in it, so that `..` between them works.
        """
        base = os.path.realpath(project)
        wanted = [_directory(base, name) for name in include_dirs]
        outer = [
            path
            for path in dict.fromkeys(wanted)
            if path != base and not any(_inside(path, other) for other in (base, *wanted))
        ]
        roots = {} if any(_inside(base, path) for path in outer) else {SOURCE_ROOT: base}
        roots |= {f"include-{number}": path for number, path in enumerate(outer)}
        layout = cls(roots, ())
        return cls(roots, tuple(layout.tree_path(path) for path in wanted))

    def tree_path(self, path: str) -> str:
        """Where a normalised absolute path lies in the tree.

        Raises
        ------
        CompileError
            It lies under none of the roots.
        """
        for name, directory in self.roots.items():
            if path == directory or _inside(path, directory):
                return posixpath.normpath(posixpath.join(name, posixpath.relpath(path, directory)))
        message = f"`{path}` lies outside of the project and of its include directories"
        raise CompileError(message)

    def disk_path(self, tree_path: str) -> str:
        """Where a tree path lies on this machine."""
        root, _, rest = tree_path.partition("/")
        directory = self.roots[root]
        return f"{directory}/{rest}" if rest and directory != "/" else f"{directory}{rest}"


class Header(msgspec.Struct, frozen=True, array_like=True):
    """One file of a closure: tree path, SHA-256 in hex, and the tree path of its first name.

    `first` differs from `path` where one file goes by two names, which `#pragma once` sees.
    """

    path: str
    digest: str
    first: str


class Closure(msgspec.Struct, frozen=True):
    """All that a compile of `source` can read, in tree paths.

    Attributes
    ----------
    source
        The file compiled; it is the first of `files`.
    include_dirs
        In search order.
    files
        Every file reached, with conditions ignored. With `source` and `include_dirs` they decide
        what the compiler sees: this is what goes into the key.
    absent
        Every name looked for in vain. Such a file, once there, may change the closure.
    detours
        Each name with `..` or `.` in it that was found, as it was looked for.
    problems
        Why the closure cannot be trusted, each as `file:line reason`. Not empty: compile in place
        and store nothing.
    pieces
        What `scan.glued` needs to know of all files.
    """

    source: str
    include_dirs: tuple[str, ...]
    files: tuple[Header, ...]
    absent: tuple[str, ...]
    detours: tuple[str, ...]
    problems: tuple[str, ...]
    pieces: tuple[str, ...] = ()


def resolve(
    source: str,
    layout: Layout,
    files: Files,
    *,
    scans: MutableMapping[str, Scan] | None = None,
) -> Closure:
    """Follow the includes of one source.

    Parameters
    ----------
    source
        Absolute path of the source on this machine, under one of the roots.
    layout
        The roots and the include directories.
    files
        The filesystem; `files.Disk` for the real one.
    scans
        Digest of a file to what it includes; read and added to. Keep it under `SCAN_VERSION`.

    Raises
    ------
    CompileError
        The source is not there, lies outside the roots, or a file cannot be read.
    """
    start = layout.tree_path(posixpath.normpath(source))
    walk = _Walk(layout, files, {} if scans is None else scans)
    if not walk.open(start):
        message = f"there is no file `{source}`"
        raise CompileError(message)
    walk.follow()
    return walk.closure(start)


def pasted(source: str, name: str) -> str:
    """The problem that `name` may be made by `##`."""
    return f"{source} may come to `{name}` by `##`, from what it and its headers hold"


def changed(closure: Closure, layout: Layout, files: Files) -> str:
    """Say what no longer is as `closure` found it: one line, empty where nothing changed.

    The layout must have the include directories of the closure.
    """
    if closure.include_dirs != layout.include_dirs:
        return "the include directories changed"
    identities: dict[str, Hashable] = {}
    for header in closure.files:
        found = files.find(layout.disk_path(header.path))
        if found is None:
            return f"`{header.path}` is gone"
        if found.digest != header.digest:
            return f"`{header.path}` changed"
        # Two names of one file, or two files: `#pragma once` tells them apart.
        identities[header.path] = found.identity
        if header.first != header.path and identities[header.first] != found.identity:
            return f"`{header.path}` no longer is the same file as `{header.first}`"
    if len(set(identities.values())) != len({header.first for header in closure.files}):
        return "two headers have become one file"
    for path in closure.detours:
        found = files.find(layout.disk_path(path))
        if found is None or found.identity != identities[posixpath.normpath(path)]:
            return f"`{path}` no longer is `{posixpath.normpath(path)}`"
    for path in closure.absent:
        if files.find(layout.disk_path(path)) is not None:
            return f"`{path}` is there now"
    return ""


class _Walk:
    """The state of one resolution: files by tree path, and the queue of those to scan."""

    def __init__(self, layout: Layout, files: Files, scans: MutableMapping[str, Scan]) -> None:
        self.layout = layout
        self.disk = files
        self.scans = scans
        self.headers: dict[str, Header] = {}
        self.first_names: dict[Hashable, str] = {}
        self.absent: dict[str, None] = {}
        self.detours: dict[str, None] = {}
        self.problems: list[str] = []
        self.pieces: set[str] = set()
        self.looked: dict[str, bool] = {}
        self.queue: list[str] = []
        self.angled: set[Include] = set()

    def follow(self) -> None:
        """Scan each file reached until nothing new is."""
        for path in self.queue:  # grows while it is walked
            header = self.headers[path]
            found = self.scans.get(header.digest)
            if found is None:
                data = self.disk.read(self.layout.disk_path(path))
                if hashlib.sha256(data).hexdigest() != header.digest:
                    message = f"`{path}` changed while it was read"
                    raise CompileError(message)
                found = self.scans[header.digest] = scan(data)
            self.pieces.update(found.pieces)
            for problem in found.problems:
                where = f"{path}:{problem.line}" if problem.line else path
                self.problems.append(f"{where} {problem.reason}")
            for include in found.includes:
                if include.quoted or include not in self.angled:
                    self.look_up(include, path)

    def look_up(self, include: Include, path: str) -> None:
        if include.name.startswith("/"):
            self.problems.append(f"{path} names a header by an absolute path, `{include.name}`")
            return
        directories = self.layout.include_dirs
        if include.quoted:
            directories = (posixpath.dirname(path), *directories)
        else:
            self.angled.add(include)
        for directory in directories:
            # Which directory `#include_next` starts after depends on how the file was reached:
            # every one is looked into, and all that is found is part of the closure.
            if self.candidate(directory, include.name) and not include.following:
                return

    def candidate(self, directory: str, name: str) -> bool:
        """Whether the file is there; it is part of the closure from then on."""
        tree_path = f"{directory}/{name}"
        known = self.looked.get(tree_path)
        if known is None:
            indirect = "/." in tree_path or "//" in tree_path
            known = self.indirect(directory, name) if indirect else self.open(tree_path)
            self.looked[tree_path] = known
        return known

    def open(self, tree_path: str) -> bool:
        if tree_path in self.headers:
            return True
        return self.take(tree_path, self.disk.find(self.layout.disk_path(tree_path)))

    def take(self, tree_path: str, found: Found | None) -> bool:
        if found is None:
            self.absent[tree_path] = None
            return False
        first = self.first_names.setdefault(found.identity, tree_path)
        header = self.headers.setdefault(tree_path, Header(tree_path, found.digest, first))
        if {header.digest, self.headers[first].digest} != {found.digest}:
            message = f"`{tree_path}` changed while it was read"
            raise CompileError(message)
        if len(self.headers) > len(self.queue):
            self.queue.append(tree_path)
        return True

    def indirect(self, directory: str, name: str) -> bool:
        """Look up a name with `.` or `..` in it, which the operating system resolves.

        The tree resolves it by its own directories, so the two must come to the same file.
        """
        parts = directory.split("/")
        for part in name.split("/"):
            if part == "..":
                parts.pop()
                if not parts:
                    self.problems.append(f"`{name}` leaves `{directory}` by its root")
                    return False
            elif part not in ("", "."):
                parts.append(part)
        tree_path = "/".join(parts)
        detour = f"{directory}/{name}"
        spelled = self.disk.find(self.layout.disk_path(detour))
        direct = self.disk.find(self.layout.disk_path(tree_path))
        if (spelled and spelled.identity) != (direct and direct.identity):
            self.problems.append(f"`{name}`, looked for in `{directory}`, is not `{tree_path}`")
            return False
        if spelled is None:
            self.absent[detour] = None
            return False
        self.detours[detour] = None
        return self.take(tree_path, direct)

    def closure(self, source: str) -> Closure:
        for path in self.headers:
            above = posixpath.dirname(path)
            while above:
                if above in self.headers:
                    self.problems.append(f"`{above}` is a file and holds `{path}`")
                above = posixpath.dirname(above)
        if name := glued(self.pieces):
            self.problems.append(pasted(source, name))
        return Closure(
            source=source,
            include_dirs=self.layout.include_dirs,
            files=tuple(self.headers.values()),
            absent=tuple(self.absent),
            detours=tuple(self.detours),
            problems=tuple(dict.fromkeys(self.problems)),
            pieces=tuple(sorted(self.pieces)),
        )


def _inside(path: str, directory: str) -> bool:
    """Whether a normalised path lies below a directory, which it is not itself."""
    return path != directory and path.startswith(directory.rstrip("/") + "/")


def _directory(base: str, name: str) -> str:
    path = posixpath.join(base, name)
    # `..` after a symbolic link is not what it looks like.
    return os.path.realpath(path) if ".." in path.split("/") else posixpath.normpath(path)
