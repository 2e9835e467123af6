"""From a tracer's notes to a recipe, or to the reason why there can be none.

Everything noted is either the project's, the interpreter's, a distribution's or nobody's. What the
project and the distributions that it imports did counts; what the compiler does of its own accord
is the compiler's, whose adapter says what it takes from the machine (`Direct.ambient`).
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from max_build import distributions
from max_build.compilers import Derivation, Direct, Job
from max_build.key import Components, key_of
from max_build.recipes import inotify
from max_build.recipes.belonging import Belonging, UnsuitableError, refuse
from max_build.recipes.callers import OURS, Stack
from max_build.recipes.owners import Owners, brings
from max_build.recipes.places import below, within
from max_build.recipes.recipe import Distribution, Recipe, broken
from max_build.recipes.surroundings import Here, listing_of
from max_build.recipes.tracing import Tracer

__all__ = ["recipe_of"]

# Read by Python, which is traced, by a compiler, whose adapter tells, or not at all.
_SOURCES = (
    ".py",
    ".pyi",
    ".pyc",
    ".mojo",
    ".cu",
    ".cuh",
    ".h",
    ".hpp",
    ".ptx",
    ".toml",
    ".md",
)
# Not PYTHONPATH, which every build frontend sets: what its directories could give is looked at.
_ALWAYS = ("PYTHONOPTIMIZE",)
_SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/", "/usr/share/locale/")


def recipe_of(
    tracer: Tracer, job: Job, adapter: Direct, derivation: Derivation
) -> tuple[Recipe | None, str]:
    """The recipe of a derivation that was just traced, or None and why the unit always derives."""
    here = Here(str(job.root), job.python_path, tracer.environ, tracer.content, {})
    try:
        recipe = _Maker(tracer, job, adapter).recipe(derivation, here)
    except UnsuitableError as error:
        return None, str(error)
    if changed := broken(recipe, here):
        return None, f"{changed} while it was derived"
    return recipe, ""


class _Maker:
    def __init__(self, tracer: Tracer, job: Job, adapter: Direct) -> None:
        self._tracer = tracer
        self._notes = tracer.notes
        self._scratch = str(job.scratch)
        self._places = Belonging(str(job.root), job.python_path, self._scratch)
        self._owners = Owners(adapter.distributions)
        self._adapter = getattr(sys.modules[type(adapter).__module__], "__file__", None) or ""
        self._reached: dict[str, str] = {}

    def recipe(self, derivation: Derivation, here: Here) -> Recipe:
        """Make it, or raise `UnsuitableError`."""
        notes, components = self._notes, derivation.components
        self._reach()
        self._refuse_deeds()
        if notes.changed:
            place = min(notes.changed)
            refuse(f"`{self._places.inside(place) or place}` changed while it was derived")
        self._refuse_strangers()
        self._refuse_mapped()
        files = self._files()
        listings = {
            inside: found
            for place, found in notes.listings.items()
            if (inside := self._places.inside(place)) is not None
        }
        for tree in derivation.reads:
            self._add_tree(tree, files, listings)
        self._add_native(files)
        looked = {
            inside: kind
            for place, kind in notes.kinds.items()
            if (inside := self._places.inside(place)) is not None and inside not in (".", *files)
        }
        links = {
            inside: target
            for place, target in notes.links.items()
            if (inside := self._places.inside(place)) is not None and inside != "."
        }
        sizes = {
            inside: size
            for place, size in notes.sizes.items()
            if size >= 0
            and (inside := self._places.inside(place)) is not None
            and inside not in files
        }
        return Recipe(
            key=key_of(components),
            components=components,
            python=here.python,
            files=dict(sorted(files.items())),
            looked=dict(sorted(looked.items())),
            links=dict(sorted(links.items())),
            sizes=dict(sorted(sizes.items())),
            listings=dict(sorted(listings.items())),
            modules=self._modules(),
            imported=tuple(sorted(self._imported)),
            lacking=tuple(sorted(self._lacking())),
            variables={name: here.variable(name) for name in sorted(self._variables())},
            distributions=self._distributions(components),
        )

    # --- who counts

    def _reach(self) -> None:
        """Find the distributions that the project imports, and those that these import.

        The compiler's are not followed: what it imports for itself is a part of it.
        """
        notes = self._notes
        self._imported: set[str] = set()
        todo = [file for file in notes.imports if self._places.inside(file)]
        done: set[str] = set()
        while todo:
            file = todo.pop()
            if file in done:
                continue
            done.add(file)
            for module in self._named(notes.imports.get(file, set())):
                place = self._place_of(module)
                if place is None or self._places.inside(place) or self._places.of_python(place):
                    continue
                owner = self._owners.of(place)
                if owner is None:
                    continue  # told by `_refuse_strangers`, which sees the file that was read
                self._imported.add(module.partition(".")[0])
                if owner not in self._reached:
                    self._reached[owner] = module
                    if owner not in self._owners.compiler:
                        todo += [one for one in notes.imports if self._owners.of(one) == owner]

    def _named(self, imports: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
        for module, names in imports:
            yield module
            for name in names:
                if self._place_of(f"{module}.{name}"):
                    yield f"{module}.{name}"

    def _place_of(self, module: str) -> str | None:
        """The file of a module, or one of its directories; None where it has neither."""
        if module in self._notes.located:
            return self._notes.located[module]
        found = sys.modules.get(module)
        place = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), None)
        return place if isinstance(place, str) else None

    def _counts(self, file: str) -> bool:
        if file == "*" or self._places.inside(file):
            return True
        if file == self._adapter or self._places.of_python(file):
            return False
        owner = self._owners.of(file)
        return owner not in self._owners.compiler and (owner is None or owner in self._reached)

    def _involved(self, stacks: Iterable[Stack]) -> str:
        """A file that counts, among all that asked; empty where none does."""
        return next((file for stack in stacks for file in stack if self._counts(file)), "")

    def _directly(self, stacks: Iterable[Stack]) -> str:
        """The same, less what the compiler did on its own when it was called."""
        return self._involved(
            stack
            for stack in stacks
            if stack and (stack[0] == "*" or not self._is_compiler(stack[0]))
        )

    def _is_compiler(self, file: str) -> bool:
        return file == self._adapter or self._owners.of(file) in self._owners.compiler

    # --- what cannot be promised

    def _refuse_deeds(self) -> None:
        notes = self._notes
        for what, stacks in notes.deeds.items():
            if file := self._directly(stacks):
                refuse(f"{self._told(file)} {what}")
        for what, stacks in notes.questions.items():
            if file := next((one[0] for one in stacks if one and self._places.inside(one[0])), ""):
                refuse(f"{self._told(file)} {what}")
        for what, stacks in notes.talks.items():
            if file := self._involved(stacks):
                refuse(f"{self._told(file)} {what}")
        if file := self._directly(notes.enumerated):
            refuse(f"{self._told(file)} reads the whole environment")
        for place, stacks in notes.written.items():
            if (file := self._directly(stacks)) and not self._places.is_scrap(place):
                refuse(f"{self._told(file)} changes `{self._places.inside(place) or place}`")
        for place, stacks in notes.entered.items():
            if (file := self._directly(stacks)) and not self._places.is_scrap(place):
                refuse(f"{self._told(file)} opens a directory by its descriptor")
        if self._tracer.blind:
            refuse(self._tracer.blind)
        for module in ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver"):
            if module in sys.modules:
                refuse("starts processes by `multiprocessing`")

    def _is_made(self, place: str) -> bool:
        """Whether a temporary file came about here: alone, or in a directory that did."""
        if below(place, self._scratch):
            return True
        return self._places.is_scrap(place) and any(
            within(place, one) for one in self._notes.written
        )

    def _refuse_strangers(self) -> None:
        """Refuse files that belong neither to the project nor to anything that has a version."""
        notes = self._notes
        for place, stacks in notes.opened.items():
            if self._places.inside(place) or self._places.of_python(place) or place == os.devnull:
                continue
            if place in notes.written and self._places.is_scrap(place):
                continue
            file = self._involved(stacks)
            if not file or (self._is_made(place) and not self._directly(stacks)):
                continue
            owner = self._owners.of(_source(place))
            if owner is None:
                refuse(
                    f"{self._told(file)} reads `{place}`, which belongs neither to the project nor "
                    "to an installed distribution"
                )
            self._reached.setdefault(owner, "")
        for place, stacks in (*notes.listed.items(), *notes.looked.items()):
            if (
                self._places.inside(place)
                or self._places.of_python(place)
                or self._places.is_scrap(place)
            ):
                continue
            if any(within(one, place) for one in self._places.own):
                continue
            if self._owners.of(_source(place)) or self._places.in_site(place):
                continue
            if file := self._directly(stacks):
                refuse(f"{self._told(file)} looks at `{place}`, outside the project")

    def _refuse_mapped(self) -> None:
        """Refuse files that native code holds mapped and that have no version.

        Libraries that the loader finds by itself are the system's, as they are for the compiler.
        """
        for real, code in sorted(self._notes.mapped.items()):
            place = self._places.known_as(real)
            if (
                self._places.inside(place)
                or self._places.of_python(place)
                or not os.path.isfile(real)
            ):
                continue
            if owner := self._owners.of(place):
                if not code:
                    self._reached.setdefault(owner, "")
                continue
            if not self._places.in_site(place) and (
                place.startswith(_SYSTEM) or (code and os.path.dirname(place) in self._loaders)
            ):
                continue
            if self._is_made(place) or (code and self._places.is_scrap(place)):
                continue
            refuse(
                f"`{place}` was mapped into memory, which belongs neither to the project nor to an "
                "installed distribution"
            )

    @functools.cached_property
    def _loaders(self) -> set[str]:
        """The directories in which ld.so(8) looks for libraries."""
        found = {one for one in self._tracer.environ.get("LD_LIBRARY_PATH", "").split(":") if one}
        try:
            cache = Path("/etc/ld.so.cache").read_bytes()
        except OSError:
            cache = b""
        found |= {os.path.dirname(os.fsdecode(one)) for one in re.findall(rb"/[^\0]+", cache)}
        return {os.path.realpath(one) for one in found}

    # --- what is the project's

    def _files(self) -> dict[str, str]:
        files: dict[str, str] = {}
        for place, found in self._notes.files.items():
            path = self._places.inside(place)
            if path is None:
                continue
            if _source(place) != place:
                refuse(f"`{path}` was read in place of its source")
            if not found:
                refuse(f"`{path}` cannot be read, or is no file")
            files[path] = found
        return files

    def _add_tree(self, tree: Path, files: dict[str, str], listings: dict[str, str]) -> None:
        place = os.path.abspath(tree)
        if self._places.inside(place) is None:
            owner = self._owners.of_tree(place)
            if owner is None:
                refuse(f"`{place}` belongs neither to the project nor to a distribution")
            self._reached.setdefault(owner, "")
            return
        todo = [place]
        while todo:
            one = todo.pop()
            path = self._places.relative(one)
            if os.path.isdir(one):
                listings[path] = listing_of(one)
                todo += [
                    os.path.join(one, name) for name in os.listdir(one) if name != "__pycache__"
                ]
            elif found := self._tracer.content(one):
                files.setdefault(path, found)
            else:
                refuse(f"`{path}` cannot be read, or is no file")

    def _add_native(self, files: dict[str, str]) -> None:
        """What native code opened; also what other processes did, which does no harm."""
        try:
            opened = self._tracer.natively_opened()
        except inotify.Overflow:
            message = "too many files of the project were opened to follow"
            refuse(message)
        opened |= {self._places.known_as(one) for one in self._notes.mapped}
        for place in opened - self._notes.files.keys() - self._notes.written.keys():
            path = self._places.inside(place)
            if path and not place.endswith(_SOURCES) and (found := self._tracer.content(place)):
                files.setdefault(path, found)

    def _modules(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {
            directory: dict(sorted(modules.items()))
            for place, modules in sorted(self._notes.probed.items())
            if (directory := self._places.inside(place)) is not None
        }

    # --- what is not

    def _lacking(self) -> Iterator[str]:
        for module, stacks in self._notes.asked.items():
            if module in self._notes.located or module in sys.modules:
                continue
            if module.partition(".")[0] in sys.stdlib_module_names or not self._involved(stacks):
                continue
            parent = module.rpartition(".")[0]
            place = self._place_of(parent) if parent else None
            if place and not self._places.inside(place) and self._owners.of(place):
                continue  # the parent's distribution decides
            yield module

    def _variables(self) -> Iterator[str]:
        yield from _ALWAYS
        for name, stacks in self._notes.variables.items():
            # who goes through all of them was judged for that
            if name not in _ALWAYS and self._involved(stacks - self._notes.enumerated):
                yield name

    def _distributions(self, components: Components) -> dict[str, Distribution]:
        for name, identity in components.compiler.items():
            if name not in self._owners.compiler or distributions.identity(name) != identity:
                refuse(f"what `{name}` is can only be told by a derivation")
        used: dict[str, Distribution] = {}
        mine = self._owners.of(self._adapter)
        if mine is None and not self._adapter.startswith(OURS):
            refuse(f"the adapter `{self._adapter}` belongs to no installed distribution")
        for name in sorted({*self._reached, *self._owners.compiler, *([mine] if mine else [])}):
            identity = distributions.identity(name) or ""
            if identity.endswith("+unrecorded"):
                refuse(f"distribution `{name}` has no record of its files")
            used[name] = Distribution(identity=identity, brings=brings(name) if identity else ())
        return used

    def _told(self, file: str) -> str:
        if file == "*":
            return "the derivation"
        inside = self._places.inside(file)
        if inside:
            return f"`{inside}`"
        owner = self._owners.of(file)
        return f"`{owner}`" if owner else f"`{file}`"


def _source(place: str) -> str:
    """The source file of a bytecode file; any other file is its own."""
    folder, name = os.path.split(place)
    if os.path.basename(folder) == "__pycache__" and ".pyc" in name:
        return os.path.join(os.path.dirname(folder), name.partition(".")[0] + ".py")
    return place
