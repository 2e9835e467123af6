"""The functions that no audit event tells of, wrapped so that a tracer hears of their calls."""

from __future__ import annotations

import builtins
import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import machinery
from typing import TYPE_CHECKING, Any

from max_build.recipes.callers import LOOKS, asks_whether, is_library
from max_build.recipes.loading import Loading

if TYPE_CHECKING:
    from max_build.recipes.tracing import Tracer

__all__ = ["wrap"]

_CLOCKS = (
    "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time "
    "process_time_ns thread_time thread_time_ns clock_gettime clock_gettime_ns"
).split()
_CALENDARS = {"ctime": 0, "gmtime": 0, "localtime": 0, "strftime": 1, "asctime": 0}
_MACHINE = (
    "cpu_count process_cpu_count sched_getaffinity getloadavg uname getpid getppid getlogin".split()
)


def wrap(tracer: Tracer) -> None:
    """Wrap them all, for as long as this process lives."""
    _wrap_environment(tracer)
    _wrap_imports(tracer)
    _wrap_looks(tracer)
    _wrap_clocks(tracer)
    _wrap_chance(tracer)


def _wrap_environment(tracer: Tracer) -> None:
    class Observed(os._Environ):  # type: ignore[type-arg]
        """`os.environ`, whose readers are noted. Every other way to read ends in these."""

        def __getitem__(self, key: Any) -> Any:
            if tracer.noting():
                tracer.quietly(tracer.variable, key)
            return super().__getitem__(key)

        def __iter__(self) -> Iterator[Any]:
            if tracer.noting():
                tracer.quietly(tracer.all_variables)
            return super().__iter__()

    os.environ.__class__ = Observed
    os.environb.__class__ = Observed


def _wrap_imports(tracer: Tracer) -> None:
    original, find, by_name = (
        builtins.__import__,
        machinery.FileFinder.find_spec,
        importlib.import_module,
    )
    notes = tracer.notes

    def importing(
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002 - the interpreter's names
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if tracer.active and globals and not level:
            file = globals.get("__file__")
            if file:
                notes.imports[file].add((name, tuple(fromlist or ())))
        return original(name, globals, locals, fromlist, level)

    def import_module(name: str, package: str | None = None) -> Any:
        if tracer.active and not name.startswith("."):
            file = sys._getframe(1).f_globals.get("__file__")
            if file:
                notes.imports[file].add((name, ()))
        return by_name(name, package)

    def find_spec(finder: Any, fullname: str, target: Any = None) -> Any:
        spec = find(finder, fullname, target)
        if tracer.active:
            tracer.quietly(tracer.probe, finder.path, fullname.rpartition(".")[2])
            places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
            if place := next(filter(None, places), None):
                tracer.quietly(tracer.locate, fullname, place)
        return spec

    class Asked:
        """Finds nothing; first in line, it hears what everybody looks for."""

        @staticmethod
        def find_spec(fullname: str, path: Any = None, target: Any = None) -> None:  # noqa: ARG004
            if tracer.noting():
                tracer.quietly(tracer.asked, fullname)

    builtins.__import__ = importing
    importlib.import_module = import_module
    machinery.FileFinder.find_spec = find_spec  # type: ignore[method-assign, assignment]
    sys.meta_path.insert(0, Asked)
    sys.path_importer_cache.clear()


def _wrap_looks(tracer: Tracer) -> None:
    for name in LOOKS:
        original = getattr(os, name)

        def looking(
            path: Any,
            *rest: Any,
            _original: Any = original,
            _link: bool = name in ("lstat", "readlink"),
            _sized: bool = name in ("stat", "lstat"),
            **options: Any,
        ) -> Any:
            if tracer.noting() and not isinstance(path, int):
                link = _link or not options.get("follow_symlinks", True)
                sized = _sized and not asks_whether(sys._getframe(1))
                tracer.quietly(tracer.look, path, link, sized)
            return _original(path, *rest, **options)

        setattr(os, name, looking)
        for group in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
            if original in group:
                group.add(looking)


def _wrap_clocks(tracer: Tracer) -> None:
    for name in _CLOCKS:
        _noted(tracer, time, name, "reads the clock", directly=True)
    for name, needed in _CALENDARS.items():
        _noted(tracer, time, name, "reads the clock", directly=True, unless=needed)
    for name in _MACHINE:
        if hasattr(os, name):
            _noted(tracer, os, name, f"asks for `os.{name}`", tracer.question)


def _wrap_chance(tracer: Tracer) -> None:
    """Note what draws on the system; the shared generators are started by us."""
    for name in ("urandom", "getrandom"):
        _noted(tracer, os, name, "draws random bytes", tracer.draw)
    random._urandom = os.urandom  # type: ignore[attr-defined]
    seed = random.Random.seed

    def seeding(generator: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None and tracer.noting():
            tracer.quietly(tracer.deed, "uses a random generator without a seed")
        seed(generator, a, version)

    random.Random.seed = seeding  # type: ignore[method-assign, assignment]
    random.seed = random._inst.seed

    def loading(execute: Callable[[Any], None], module: Any) -> None:
        """Give numpy's shared generator its canonical state as soon as there is one."""
        with tracer.seeding():
            execute(module)
            module.seed(0)

    sys.meta_path.insert(0, Loading({"numpy.random.mtrand": loading}))


def _noted(
    tracer: Tracer,
    module: Any,
    name: str,
    what: str,
    note: Callable[[str], None] | None = None,
    *,
    directly: bool = False,
    unless: int | None = None,
) -> None:
    """Note calls of a function.

    `directly` leaves out the interpreter's own library, whose threads and logs read clocks;
    `unless` is the number of arguments above which the call is one of mere arithmetic.
    """
    original = getattr(module, name)
    note = note or tracer.deed

    def wrapped(*arguments: Any, **options: Any) -> Any:
        counts = unless is None or len(arguments) <= unless
        if tracer.noting() and counts and not (directly and is_library(sys._getframe(1))):
            tracer.quietly(note, what)
        return original(*arguments, **options)

    wrapped.__name__ = name
    setattr(module, name, wrapped)
