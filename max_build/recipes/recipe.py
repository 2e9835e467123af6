"""Recipes: what a unit's components were derived from, and whether that still holds.

A recipe that holds takes the place of running the project's code and importing its compiler. So
it may be false without need, which costs a derivation, and must never be true by mistake.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from max_build.key import Components, canonical, digest, key_of, parsed

if TYPE_CHECKING:
    from max_build.config import Unit
    from max_build.target import Target

__all__ = [
    "RECIPE_SCHEMA",
    "Distribution",
    "Kind",
    "Recipe",
    "Surroundings",
    "broken",
    "decode",
    "digest_of_value",
    "encode",
    "lookup_key",
]

RECIPE_SCHEMA = 3
"""Raised whenever what a recipe records, or what it means, changes."""

Kind = Literal["absent", "file", "executable", "directory", "dangling link"]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """An installed distribution that the derivation used.

    Parameters
    ----------
    identity
        As `max_build.distributions.identity` gives it; empty where none was installed.
    brings
        The distributions, each in one exact version, that this one requires.
    """

    identity: str
    brings: tuple[str, ...] = ()


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a derivation read, by name. Paths are relative to the project's root, with `/`.

    Parameters
    ----------
    key, components
        What was derived.
    python
        The interpreter and machine, as `Surroundings.python`.
    files
        File → SHA-256 (hex) of what was read.
    looked
        Path → what was there when the code asked; of what was read, where it asked for permissions.
    links
        Path that was asked about as a symbolic link → `digest_of_value` of where it points; empty
        where it is none.
    sizes
        File that was not read → its bytes, where the code may have asked for them.
    listings
        Directory → digest of its names.
    modules
        Directory → module → the entries in it that an import of that module chooses among.
    imported, lacking
        Modules that came from outside the project, and those that came from nowhere.
    variables
        Environment variable → `digest_of_value`; empty where it was not set.
    distributions
        Normalised name → what was installed.
    root, folder
        `digest_of_value` of the project's directory, and of that one's name, where these show in
        what was derived; else empty.
    """

    schema: int = RECIPE_SCHEMA
    key: str
    components: Components
    python: str
    files: dict[str, str] = {}
    looked: dict[str, Kind] = {}
    links: dict[str, str] = {}
    sizes: dict[str, int] = {}
    listings: dict[str, str] = {}
    modules: dict[str, dict[str, tuple[str, ...]]] = {}
    imported: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    distributions: dict[str, Distribution] = {}
    root: str = ""
    folder: str = ""


class Surroundings(Protocol):
    """What recipes are held against: one project on one machine at one time."""

    @property
    def python(self) -> str:
        """Implementation, version, operating system and processor."""
        ...

    @property
    def root(self) -> str:
        """The project's directory, absolute."""
        ...

    def file(self, path: str) -> str | None:
        """SHA-256 (hex) of a file's bytes; None where it cannot be read."""
        ...

    def kind(self, path: str) -> Kind:
        """What is there."""
        ...

    def link(self, path: str) -> str:
        """`digest_of_value` of where a symbolic link points; empty where there is none."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a regular file; -1 where there is none."""
        ...

    def listing(self, path: str) -> str:
        """Digest of a directory's names; empty where it cannot be listed."""
        ...

    def candidates(self, directory: str, module: str) -> tuple[str, ...]:
        """The entries of a directory that an import of that module chooses among."""
        ...

    def found(self, module: str, *, installed: bool) -> str:
        """A directory outside the project in which that module is; empty where there is none.

        Without `installed`, only directories that belong to no installer are looked at.
        """
        ...

    def variable(self, name: str) -> str:
        """`digest_of_value` of an environment variable; empty where it is not set."""
        ...

    def identity(self, distribution: str) -> str:
        """What is installed under that name; empty where nothing is."""
        ...

    def pin(self, distribution: str) -> str:
        """The version that the project vouches for; empty where it does not."""
        ...


_DECODER = msgspec.json.Decoder(Recipe)


def encode(recipe: Recipe) -> bytes:
    """The recipe as canonical JSON."""
    return canonical(recipe)


def decode(data: bytes) -> Recipe | None:
    """Read a recipe back; None if it is not one, of another schema, or not of its own key."""
    try:
        recipe = parsed(data, _DECODER)
    except ValueError:
        return None
    if recipe.schema != RECIPE_SCHEMA or recipe.key != key_of(recipe.components):
        return None
    return recipe


def digest_of_value(value: str) -> str:
    """What stands for a variable's value: never empty, and no secret."""
    return digest(value.encode(errors="surrogateescape"))[:32]


def lookup_key(
    unit: Unit,
    target: Target,
    *,
    root: str,
    python_path: tuple[str, ...],
    ambient: Mapping[str, str],
    version: str,
) -> str:
    """The key (SHA-256, hex) that a unit's recipes stand under.

    Parameters
    ----------
    unit, target
        As declared. The targets beside `target` do not matter.
    root, python_path
        Absolute; the second enters relative to the first.
    ambient
        What the compiler itself takes from the machine: see `Direct.ambient`.
    version
        Of max-build's own code, which decides what components are.
    """
    declared = {
        "ambient": dict(ambient),
        "compiler": unit.compiler,
        "declared": unit.declared,
        "host": unit.host,
        "kind": unit.kind,
        "name": unit.name,
        "python-path": _relative(python_path, root),
        "target": str(target),
        "version": version,
    }
    return digest(f"max-build recipes {RECIPE_SCHEMA}\n".encode() + canonical(declared))


@functools.cache
def _relative(paths: tuple[str, ...], root: str) -> list[str]:
    return [os.path.relpath(one, root) for one in paths]


def broken(recipe: Recipe, now: Surroundings) -> str:
    """Why a recipe does not hold any more, naming the first thing that changed; empty if it does.

    What is cheap to look at, and likely to have changed, comes first. A recipe can come from
    anywhere, so what cannot even be looked at, such as a path with a null byte, does not hold.
    """
    try:
        return _broken(recipe, now)
    except (ValueError, OSError) as error:
        return f"its recipe cannot be checked ({error})"


def _broken(recipe: Recipe, now: Surroundings) -> str:
    if recipe.python != now.python:
        return f"Python: {recipe.python} → {now.python}"
    if (recipe.root and recipe.root != digest_of_value(now.root)) or (
        recipe.folder and recipe.folder != digest_of_value(os.path.basename(now.root))
    ):
        return "the project lies in another directory, whose name showed in what was derived"
    for path, kind in recipe.looked.items():
        if now.kind(path) != kind:
            return f"`{path}` {_became(kind, now.kind(path))}"
    for path, target in recipe.links.items():
        if (found := now.link(path)) != target:
            how = "is no link" if not found else "points elsewhere" if target else "is a link"
            return f"`{path}` {how} now"
    for path, size in recipe.sizes.items():
        if now.size(path) != size:
            return f"`{path}` changed in size"
    for directory, modules in recipe.modules.items():
        for module, entries in modules.items():
            present = now.candidates(directory, module)
            if present != entries:
                return _shadowed(directory, entries, present)
    for path, listing in recipe.listings.items():
        if now.listing(path) != listing:
            return f"files were added to or removed from `{path}`"
    for path, content in recipe.files.items():
        if now.file(path) != content:
            return f"`{path}` {'changed' if now.file(path) is not None else 'was removed'}"
    for name, value in recipe.variables.items():
        if now.variable(name) != value:
            how = "set" if not value else "changed" if now.variable(name) else "unset"
            return f"environment `{name}` {how}"
    for module in recipe.imported:
        if place := now.found(module, installed=False):
            return f"`{place}` has a module `{module}` now"
    for module in recipe.lacking:
        if now.found(module, installed=True):
            return f"module `{module}` can be imported now"
    return _changed_distribution(recipe, now)


def _became(before: Kind, after: Kind) -> str:
    if before == "absent":
        return "was added"
    if {before, after} == {"file", "executable"}:
        return "may be executed now" if after == "executable" else "may not be executed now"
    return "was removed" if after == "absent" else f"became a {after}"


def _shadowed(directory: str, before: tuple[str, ...], after: tuple[str, ...]) -> str:
    new = sorted(set(after) - set(before))
    what = new[0] if new else min(set(before) - set(after))
    path = what if directory == "." else f"{directory}/{what}"
    return f"`{path}` was {'added' if new else 'removed'}"


def _changed_distribution(recipe: Recipe, now: Surroundings) -> str:
    for name, used in recipe.distributions.items():
        found = now.identity(name)
        if found == used.identity or (not found and name in _given(recipe, now)):
            continue
        before, after = version_of(used.identity), version_of(found)
        if not used.identity:
            return f"`{name}` {after} was installed"
        if found:
            same = " (another build)" if before == after else ""
            return f"`{name}` {before} → {after}{same}"
        pin = now.pin(name)
        if pin:
            return f"`{name}` {before} is not installed, and `toolchain` pins {pin}"
        setting = f'toolchain = {{ {name} = "{before}" }}'
        return f"`{name}` is not installed; `{setting}` would take it as given"
    return ""


def _given(recipe: Recipe, now: Surroundings) -> set[str]:
    """Distributions that the project vouches for, and those that come with them."""
    todo = [
        name
        for name, used in recipe.distributions.items()
        if used.identity and now.pin(name) == version_of(used.identity)
    ]
    given: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in given and name in recipe.distributions:
            given.add(name)
            todo += recipe.distributions[name].brings
    return given


def version_of(identity: str) -> str:
    """The version in a distribution's identity."""
    return identity.rpartition("+")[0]
