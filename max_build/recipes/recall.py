"""Direct mode: a unit's key from a recipe that still holds, without running anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from max_build import compilers
from max_build.compilers import Direct
from max_build.config import Settings, Unit
from max_build.errors import ToolchainError
from max_build.key import digest
from max_build.recipes.recipe import Recipe, broken, decode, encode, lookup_key
from max_build.recipes.surroundings import Here
from max_build.store import Cache
from max_build.target import Target
from max_build.workers import environment

__all__ = ["Recall"]


_DECIDES = ("distributions", "key", "messages", "stamp", "target", "worker", "workers")


class Recall:
    """The recipes of one project in one build."""

    def __init__(self, settings: Settings, cache: Cache) -> None:
        self._settings = settings
        self._cache = cache
        self._environ = environment(os.environ)
        self._here = Here(
            settings.root,
            settings.python_path,
            self._environ,
            cache.memo.digest_of,
            settings.toolchain,
        )
        self._ambient: dict[str, dict[str, str] | None] = {}
        self._stale: dict[tuple[str, str], str] = {}
        self._version = _own_version(cache.memo.digest_of)

    def key(self, unit: Unit, target: Target) -> str:
        """The key that a recipe which holds leads to; empty where none does.

        The newest recipe is tried first, the nearest tier first.
        """
        lookup = self.lookup_key(unit, target)
        if not lookup:
            return ""
        tried: set[bytes] = set()
        for everywhere in (False, True) if self._cache.outer else (False,):
            for data in self._cache.recipes(lookup, everywhere=everywhere):
                recipe = None if data in tried else decode(data)
                tried.add(data)
                if recipe is None:
                    continue
                why = broken(recipe, self._here)
                if not why:
                    return recipe.key
                self._stale.setdefault((unit.name, str(target)), why)
        return ""

    def stale(self, unit: Unit, target: Target) -> str:
        """Why the newest recipe did not hold; empty where there was none."""
        return self._stale.get((unit.name, str(target)), "")

    def remember(self, unit: Unit, target: Target, recipe: Recipe) -> None:
        """Keep the recipe of a derivation that came to an artifact."""
        if lookup := self.lookup_key(unit, target):
            self._cache.add_recipe(lookup, encode(recipe))

    def lookup_key(self, unit: Unit, target: Target) -> str:
        """The key that the unit's recipes stand under; empty where its compiler knows none."""
        if unit.compiler not in self._ambient:
            self._ambient[unit.compiler] = self._ambient_of(unit.compiler)
        ambient = self._ambient[unit.compiler]
        if ambient is None:
            return ""
        return lookup_key(
            unit,
            target,
            root=self._settings.root,
            python_path=self._settings.python_path,
            ambient=ambient,
            version=self._version,
        )

    def _ambient_of(self, compiler: str) -> dict[str, str] | None:
        """What the compiler takes from the machine; None if it knows no recipes, or is missing."""
        adapter = compilers.get(compiler)
        if not isinstance(adapter, Direct):
            return None
        try:
            return adapter.ambient(self._environ)
        except ToolchainError:
            return None  # the derivation says it in full


def _own_version(digest_of: Callable[[str], str]) -> str:
    """Digest of the code that derives and records: its changes make every recipe worthless.

    The code, not the version: it is the same whether max-build was installed from a wheel or is
    being worked on.
    """
    package = Path(__file__).parent.parent
    files = [package / f"{name}.py" for name in _DECIDES]
    files += sorted(
        path for one in ("compilers", "recipes") for path in (package / one).glob("*.py")
    )
    return digest("".join(digest_of(str(path)) for path in files).encode())
