"""What was found out about source files on this machine, kept between builds.

Only a memory: each entry is checked against the file's stat before it is believed, and losing it
all costs time alone.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from max_build.compilers.files import Disk
from max_build.compilers.includes import Closure, Layout, changed, resolve
from max_build.compilers.scan import SCAN_VERSION, Scan
from max_build.key import canonical, digest
from max_build.stamp import Stamp

if TYPE_CHECKING:
    from max_build.compilers import Memory
    from max_build.compilers.cuda_libraries import Library

__all__ = ["Notes"]

_NAMESPACE = "cuda"
_CLOSURE = msgspec.json.Decoder(Closure)
_MOST = 50_000  # entries of one kind; more of them are old ones

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a project and its include directories lie, and what its closures are kept under."""

    project: str
    layout: Layout
    name: str


class Notes:
    """The notes of one process over one memory.

    Attributes
    ----------
    stats
        Absolute path → stamp and digest, as `files.Disk` takes it.
    releases
        Digest of a library → its release, as `Library.build_id` takes it.
    """

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory
        self.stats = self._read("stats", dict[str, tuple[Stamp, str]])
        self.releases = self._read("releases", dict[str, str])
        self._disk = Disk(self.stats)
        self._scans: _Noted[str, Scan] | None = None
        self._closures: dict[str, Closure] = {}
        self._texts: dict[str, bytes] = {}
        self._builds: dict[str, str] = {}
        self._places: dict[tuple[str, tuple[str, ...]], _Place] = {}

    def build_id(self, library: Library) -> str:
        """Which build of a library it is; looked at once, as one build of units has one of it."""
        if library.name not in self._builds:
            self._builds[library.name] = library.build_id(self.stats, self.releases)
        return self._builds[library.name]

    def closure(
        self, project: str, source: str, include_dirs: Sequence[str]
    ) -> tuple[Closure, Layout]:
        """The closure of a source of a project as its files are now; see `includes.resolve`."""
        place = self._place(project, tuple(include_dirs))
        path = posixpath.join(place.project, source)
        name = place.name + path
        known = self._closures.get(name) or self._remembered(name)
        if known is None or changed(known, place.layout, self._disk):
            if self._scans is None:
                self._scans = self._read("scans", dict[str, Scan])
            known = resolve(path, place.layout, self._disk, scans=self._scans)
            self._write(name, known)
        self._closures[name] = known
        return known, place.layout

    def save(self) -> None:
        """Keep what is new."""
        for name, noted in (
            ("stats", self.stats),
            ("releases", self.releases),
            ("scans", self._scans),
        ):
            if noted is not None and noted.new:
                self._write(name, noted if len(noted) < _MOST else {})
                noted.new = False

    def _place(self, project: str, include_dirs: tuple[str, ...]) -> _Place:
        """Looked at once, with all closures of the place: most builds ask for every one."""
        found = self._places.get((project, include_dirs))
        if found is None:
            layout = Layout.of(project, include_dirs)
            name = digest(canonical([sorted(layout.roots.items()), layout.include_dirs]))
            found = _Place(os.path.realpath(project), layout, f"closure:{name}:")
            self._places[project, include_dirs] = found
            if self._memory:
                start = f"{SCAN_VERSION}:{found.name}"
                self._texts.update(self._memory.under(_NAMESPACE, start))
        return found

    def _remembered(self, name: str) -> Closure | None:
        data = self._texts.pop(f"{SCAN_VERSION}:{name}", None)
        try:
            return _CLOSURE.decode(data) if data else None
        except msgspec.DecodeError:
            return None

    def _read(self, name: str, kind: type[dict[Key, Value]]) -> _Noted[Key, Value]:
        data = self._memory.get(_NAMESPACE, f"{SCAN_VERSION}:{name}") if self._memory else None
        try:
            return _Noted(msgspec.json.decode(data, type=kind) if data else {})
        except msgspec.DecodeError:
            return _Noted()

    def _write(self, name: str, value: Any) -> None:
        if self._memory is not None:
            self._memory.set(_NAMESPACE, f"{SCAN_VERSION}:{name}", msgspec.json.encode(value))


class _Noted(dict[Key, Value]):
    """A dictionary that knows whether anything was put into it."""

    new = False

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.new = True
