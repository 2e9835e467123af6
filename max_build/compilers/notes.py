"""What was found out about source files on this machine, kept between builds.

Only a memory: each entry is checked against the file's stat before it is believed, and losing it
all costs time alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from max_build.compilers.includes import Closure, Disk, Layout, Stat, changed, resolve
from max_build.compilers.scan import SCAN_VERSION, Scan
from max_build.key import canonical, digest

if TYPE_CHECKING:
    from max_build.compilers import Memory

__all__ = ["Notes"]

_NAMESPACE = "cuda"
_MOST = 50_000  # entries of one kind; more of them are old ones

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Notes:
    """The notes of one process over one memory.

    Attributes
    ----------
    stats
        Absolute path → stat and digest, as `includes.Disk` takes it.
    """

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory
        self.stats = self._read("stats", dict[str, tuple[Stat, str]])
        self._scans: _Noted[str, Scan] | None = None
        self._closures: dict[str, Closure] = {}

    def closure(self, source: str, layout: Layout) -> Closure:
        """The closure of a source as its files are now; see `includes.resolve`."""
        disk = Disk(self.stats)
        name = digest(canonical([source, sorted(layout.roots.items()), layout.include_dirs]))
        known = self._closures.get(name) or self._remembered(name)
        if known is None or changed(known, layout, disk):
            if self._scans is None:
                self._scans = self._read("scans", dict[str, Scan])
            known = resolve(source, layout, disk, scans=self._scans)
            self._write(f"closure:{name}", known)
        self._closures[name] = known
        return known

    def save(self) -> None:
        """Keep what is new."""
        for name, noted in (("stats", self.stats), ("scans", self._scans)):
            if noted is not None and noted.new:
                self._write(name, noted if len(noted) < _MOST else {})
                noted.new = False

    def _remembered(self, name: str) -> Closure | None:
        data = self._get(f"closure:{name}")
        try:
            return msgspec.json.decode(data, type=Closure) if data else None
        except msgspec.DecodeError:
            return None

    def _read(self, name: str, kind: type[dict[Key, Value]]) -> _Noted[Key, Value]:
        data = self._get(name)
        try:
            return _Noted(msgspec.json.decode(data, type=kind) if data else {})
        except msgspec.DecodeError:
            return _Noted()

    def _get(self, name: str) -> bytes | None:
        return self._memory.get(_NAMESPACE, f"{SCAN_VERSION}:{name}") if self._memory else None

    def _write(self, name: str, value: Any) -> None:
        if self._memory is not None:
            self._memory.set(_NAMESPACE, f"{SCAN_VERSION}:{name}", msgspec.json.encode(value))


class _Noted(dict[Key, Value]):
    """A dictionary that knows whether anything was put into it."""

    new = False

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.new = True
