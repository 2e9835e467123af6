"""From a tracer's notes to a recipe, or to the reason why there can be none.

Everything noted is either the project's, the interpreter's, a distribution's or nobody's. What the
project and the distributions that it imports did counts; what the compiler does of its own accord
is the compiler's, whose adapter says what it takes from the machine (`Direct.ambient`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from max_build import distributions
from max_build.compilers import Derivation, Direct, Job
from max_build.errors import MaxBuildError
from max_build.key import Components, canonical, key_of
from max_build.recipes import inotify
from max_build.recipes.belonging import Belonging, UnsuitableError, refuse
from max_build.recipes.callers import OURS, Stack
from max_build.recipes.owners import Owners, brings
from max_build.recipes.places import within
from max_build.recipes.recipe import Distribution, Recipe, broken, digest_of_value
from max_build.recipes.surroundings import Here, link_of, listing_of
from max_build.recipes.tracing import Tracer

__all__ = ["recipe_of"]

# Opened by the workers of other units, and by whatever builds the project.
_SOURCES = (".py", ".pyi", ".pyc", "/pyproject.toml")
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
        self._root = str(job.root)
        self._unit = job.unit
        self._places = Belonging(self._root, job.python_path, str(job.scratch))
        self._ambient = adapter.ambient
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
        self._refuse_settings()
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
        links = {
            inside: target
            for place, target in notes.links.items()
            if (inside := self._places.inside(place)) is not None and inside != "."
        }
        self._add_native(files, links)
        looked = {
            inside: kind
            for place, kind in notes.kinds.items()
            if (inside := self._places.inside(place)) is not None
            and inside != "."
            and (inside not in files or place in notes.modes)
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
            root=digest_of_value(self._root) if self._shows_root(derivation) else "",
            folder=self._shown_folder(derivation.ir),
        )

    def _shows_root(self, derivation: Derivation) -> bool:
        root = os.fsencode(self._root)
        return root in (derivation.ir or b"") or root in canonical(derivation.components)

    def _shown_folder(self, ir: bytes | None) -> str:
        """The name of the project's directory, digested, if the code can have asked for it."""
        name = os.path.basename(self._root)
        entry = str(self._unit.declared.get("entry", ""))
        if name in (self._unit.name, *re.split(r"[.:]", entry)):
            return ""  # a repo that is called as what is in it says so wherever it lies
        return digest_of_value(name) if _shows(name, ir) else ""

    # --- who counts

    def _reach(self) -> None:
        """Find the distributions that the project imports, and those that these import.

        The compiler's are not followed: what it imports for itself is a part of it.
        """
        notes = self._notes
        self._imported: set[str] = set()
        todo = [file for file in notes.imports if file == "*" or self._places.inside(file)]
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
        found = [file for stack in stacks for file in stack if self._counts(file)]
        return next((file for file in found if file != "*"), found[0] if found else "")

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
            if file := next((one[0] for one in stacks if one and self._is_project(one[0])), ""):
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
            if place != os.devnull and (file := self._directly(stacks)):
                refuse(f"{self._told(file)} opens a directory by its descriptor")
        if self._tracer.blind:
            refuse(self._tracer.blind)
        for module in ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver"):
            if module in sys.modules:
                refuse("starts processes by `multiprocessing`")

    def _is_project(self, file: str) -> bool:
        return file == "*" or self._places.inside(file) is not None

    def _refuse_settings(self) -> None:
        """Refuse what the code told the compiler to find elsewhere: nobody saw what is there."""
        before = self._tracer.environ
        for (name, value), stacks in sorted(self._notes.settings.items()):
            if value == before.get(name) or not (file := self._directly(stacks)):
                continue
            if any(map(self._is_elsewhere, _paths(value))) and self._is_known(name, value):
                refuse(f"{self._told(file)} sets `{name}` to a place outside the project")

    def _is_known(self, name: str, value: str) -> bool:
        """Whether a variable is of account to the compiler, by its adapter."""
        before = self._tracer.environ
        now = _Asked({**before, name: value})
        try:
            return self._ambient(before) != self._ambient(now) or name in now.asked
        except MaxBuildError:
            return True

    def _is_elsewhere(self, text: str) -> bool:
        place = os.path.normpath(os.path.join(self._root, text))
        return not (
            place == os.devnull
            or self._places.inside(place)
            or self._is_made(place)
            or self._decides(place)
        )

    def _is_made(self, place: str) -> bool:
        """Whether a place came about here: alone, or with a directory that it lies in."""
        return any(
            within(place, one) or within(place, os.path.realpath(one)) for one in self._notes.made
        )

    def _decides(self, place: str) -> str | None:
        """The distribution that alone decides what is at a place: it has it, or the package."""
        source = _source(place)
        if os.path.isfile(source):
            return self._owners.of(source)
        while self._places.in_site(place):
            for name in ("__init__.py", "METADATA"):
                if os.path.isfile(file := os.path.join(place, name)):
                    return self._owners.of(file)
            place = os.path.dirname(place)
        return None

    def _refuse_strangers(self) -> None:
        """Refuse files that belong neither to the project nor to anything that has a version."""
        notes = self._notes
        for place, stacks in notes.opened.items():
            if self._places.inside(place) or self._places.of_python(place) or place == os.devnull:
                continue
            file = self._involved(stacks)
            if not file:
                continue
            owner = self._owners.of(_source(place))
            if owner is None:
                refuse(
                    f"{self._told(file)} reads `{place}`, which belongs neither to the project nor "
                    "to an installed distribution"
                )
            self._reached.setdefault(owner, "")
        around = {place for place in notes.looked if self._is_around(place)}
        for place, stacks in (
            *notes.listed.items(),
            *((one, stacks) for one, stacks in notes.looked.items() if one not in around),
        ):
            if self._places.inside(place) or self._places.of_python(place) or place == os.devnull:
                continue
            if not (file := self._directly(stacks)):
                continue
            owner = self._decides(place)
            if owner is None:
                refuse(f"{self._told(file)} looks at `{place}`, outside the project")
            self._reached.setdefault(owner, "")

    def _is_around(self, place: str) -> bool:
        """Whether the project lies in a directory, which is then there wherever the project is."""
        return any(within(one, place) for one in self._places.own)

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
            if self._is_made(real) or (code and self._is_new(real)):
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

    def _is_new(self, place: str) -> bool:
        """Whether a place was changed since the tracing began; where none is, it is gone."""
        try:
            info = os.lstat(place)
        except OSError:
            return True
        return max(info.st_mtime_ns, info.st_ctime_ns) >= self._tracer.began

    def _add_native(self, files: dict[str, str], links: dict[str, str]) -> None:
        """What native code opened; also what other processes did, which does no harm."""
        try:
            opened = self._tracer.natively_opened()
        except inotify.Overflow:
            message = "too many files of the project were opened to follow"
            refuse(message)
        opened |= {self._places.known_as(one) for one in self._notes.mapped}
        natively = set()
        for place in opened - self._notes.files.keys() - self._notes.written.keys():
            path = self._places.inside(place)
            if path and not place.endswith(_SOURCES) and (found := self._tracer.content(place)):
                if self._is_new(place):
                    refuse(f"`{path}` changed while it was derived")
                files.setdefault(path, found)
                natively.add(place)
        # It may have been reached by a link, which inotify does not tell.
        for link, real in self._links() if natively else ():
            if any(within(place, real) for place in natively):
                path = self._places.relative(link)
                if self._is_new(link):
                    refuse(f"`{path}` changed while it was derived")
                links[path] = link_of(link)

    def _links(self) -> Iterator[tuple[str, str]]:
        """The project's links, and where each leads to."""
        for root in self._places.own:
            for directory in inotify.directories(root, all=True):
                with contextlib.suppress(OSError), os.scandir(directory) as entries:
                    for one in entries:
                        if one.is_symlink():
                            yield one.path, self._places.known_as(os.path.realpath(one.path))

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
            if place and os.path.isfile(place) and self._is_compiler(place):
                continue  # a part of the compiler that is lacking
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


def _shows(name: str, ir: bytes | None) -> bool:
    """Whether a directory's name is in the text that was derived, on its own."""
    pattern = rb"(?<![A-Za-z0-9])" + re.escape(os.fsencode(name)) + rb"(?![A-Za-z0-9])"
    return bool(name) and re.search(pattern, ir or b"") is not None


def _paths(value: str) -> Iterator[str]:
    """What may be paths in a variable's value, alone, in a list, or after an option."""
    for one in re.split(r"[\s:;,=\"']+", value):
        if os.sep in one or one == os.pardir:
            yield one
            if one.startswith("-"):
                yield one[one.index(os.sep) :]


class _Asked(UserDict[str, str]):
    """An environment that knows which variables it was asked for by name."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


def _source(place: str) -> str:
    """The source file of a bytecode file; any other file is its own."""
    folder, name = os.path.split(place)
    if os.path.basename(folder) == "__pycache__" and ".pyc" in name:
        return os.path.join(os.path.dirname(folder), name.partition(".")[0] + ".py")
    return place
