"""Whose a place is: the project's, the interpreter's, an installer's, or nobody's."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from typing import NoReturn

from max_build.recipes.places import below, within

__all__ = ["Belonging", "UnsuitableError", "refuse"]


class UnsuitableError(Exception):
    """Why no recipe can stand for the derivation."""


def refuse(reason: str) -> NoReturn:
    """Raise `UnsuitableError`."""
    raise UnsuitableError(reason)


class Belonging:
    """Whose a place is, in one derivation. Places are absolute.

    Parameters
    ----------
    root, python_path
        The project's directory, and those it imports from, which belong to it wherever they lie.
    scratch
        The derivation's own directory for temporary files.
    """

    def __init__(self, root: str, python_path: tuple[str, ...], scratch: str) -> None:
        self.own = (root, *python_path)
        self._root = root
        self._temporary = (scratch, os.path.realpath(tempfile.gettempdir()), tempfile.gettempdir())

    def inside(self, place: str) -> str | None:
        """A place's path from the root with `/`, where it is the project's."""
        if self.in_site(place):
            return None
        if any(within(place, one) for one in self.own):
            return self.relative(place)
        return None

    def relative(self, place: str) -> str:
        """A place's path from the root, whosever it is; `UnsuitableError` if it is not UTF-8."""
        path = os.path.relpath(place, self._root)
        try:
            path.encode()
        except UnicodeEncodeError:
            refuse(f"the name of {path!r} is not UTF-8")
        return path

    def known_as(self, real: str) -> str:
        """A real path as the project, Python and the distributions are known by."""
        for base, known in self._bases:
            if below(real, base):
                return os.path.join(known, real[len(base) :].lstrip(os.sep))
        return real

    @functools.cached_property
    def _bases(self) -> list[tuple[str, str]]:
        """Real directory → how it is known, the innermost first."""
        known = dict.fromkeys((*self.own, os.path.dirname(os.__file__), *sys.path))
        found = [(os.path.realpath(one), os.path.abspath(one)) for one in known if one]
        return sorted(found, key=lambda one: -len(one[0]))

    def in_site(self, place: str) -> bool:
        """Whether a place is an installer's: also in an environment inside the project's tree.

        There, only what Python imports from: a folder of that name may be the project's own.
        """
        around = (one for one in self.own if below(place, one))
        base = max(around, key=len, default="")
        parts = place[len(base) :].split(os.sep)
        for number, part in enumerate(parts, 1):
            if part in ("site-packages", "dist-packages"):
                return not base or base + os.sep.join(parts[:number]) in self._searched
        return False

    @functools.cached_property
    def _searched(self) -> set[str]:
        return {at(one) for one in sys.path if one for at in (os.path.abspath, os.path.realpath)}

    def of_python(self, place: str) -> bool:
        """Whether a place is the interpreter's own library's."""
        library = os.path.dirname(os.path.abspath(os.__file__))
        return below(place, library) and not self.in_site(place)

    def is_scrap(self, place: str) -> bool:
        """Whether what is written to a place is of no account: temporary, or bytecode."""
        if place == os.devnull or f"{os.sep}__pycache__{os.sep}" in place:
            return True
        if self.inside(place):
            return False
        return any(below(place, one) for one in self._temporary)
