"""Which distribution a file was installed by: the installed RECORDs, read as far as needed."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata

from max_build.distributions import normalise
from max_build.recipes.places import below
from max_build.recipes.surroundings import is_site

__all__ = ["Owners", "brings"]

_PINNED = re.compile(r"([A-Za-z0-9._-]+)\s*==\s*[^*;,\s]+\s*$")


class Owners:
    """Which distribution a file was installed by."""

    def __init__(self, compiler: tuple[str, ...]) -> None:
        self.compiler = frozenset(normalise(name) for name in compiler)
        self._known: dict[str, str | None] = {}
        self._files: dict[str, str] = {}
        self._scanned: set[str] = set()
        self._sites = tuple(one for one in sys.path if one and is_site(one))
        self._records: list[tuple[metadata.Distribution, str]] | None = None

    def of(self, path: str) -> str | None:
        """Normalised name of the distribution that lists a file, or a file in that directory."""
        if path not in self._known:
            self._known[path] = self._find(path)
        return self._known[path]

    def of_tree(self, path: str) -> str | None:
        """The distribution that brought the files of a directory, or a file."""
        for folder, _, names in os.walk(path):
            for name in names:
                return self.of(os.path.join(folder, name))
        return self.of(path)

    def _find(self, path: str) -> str | None:
        site = next((one for one in self._sites if below(path, one)), None)
        if site is None:
            return None
        inside = path[len(site) :].lstrip(os.sep)
        likely = (part.partition(".")[0] for part in inside.split(os.sep))
        for name in dict.fromkeys((*sorted(self.compiler), *map(normalise, likely))):
            self._scan(name)
            if path in self._files:
                return self._files[path]
        if self._records is None:
            self._records = [
                (one, one.read_text("RECORD") or "") for one in metadata.distributions()
            ]
        for one, text in self._records:
            if f"{inside}," in text or f"{inside}{os.sep}" in text:
                self._scan(normalise(one.name))
        if path in self._files:
            return self._files[path]
        return next((self._files[one] for one in self._files if below(one, path)), None)

    def _scan(self, name: str) -> None:
        if not name or name in self._scanned:
            return
        self._scanned.add(name)
        try:
            found = metadata.distribution(name)
        except (metadata.PackageNotFoundError, ValueError):
            return
        base = str(found.locate_file(""))
        for line in (found.read_text("RECORD") or "").splitlines():
            path = os.path.join(base, line.split(",", 1)[0])
            self._files[os.path.normpath(path) if os.pardir in path else path] = normalise(name)


def brings(name: str) -> tuple[str, ...]:
    """The distributions that one requires in exactly one version."""
    found = (
        _PINNED.match(text.partition(";")[0].strip())
        for text in metadata.requires(name) or ()
        if ";" not in text
    )
    return tuple(sorted({normalise(one[1]) for one in found if one}))
