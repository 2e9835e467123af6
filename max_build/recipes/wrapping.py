"""The functions that no audit event tells of, wrapped so that a tracer hears of their calls."""

from __future__ import annotations

import _thread
import builtins
import ctypes
import datetime as dt
import gc
import grp
import importlib
import os
import platform
import posix
import pwd
import random
import resource
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import machinery
from types import ModuleType
from typing import TYPE_CHECKING, Any

from max_build.recipes.callers import (
    LOOKS,
    asks_whether,
    callers,
    importer,
    is_library,
    of_python,
    start_with,
    waits,
)
from max_build.recipes.loading import Loading

if TYPE_CHECKING:
    from max_build.recipes.tracing import Tracer

__all__ = ["wrap"]

_CLOCKS = (
    "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time "
    "process_time_ns thread_time thread_time_ns clock_gettime clock_gettime_ns"
).split()
_CALENDARS = {"ctime": 0, "gmtime": 0, "localtime": 0, "strftime": 1, "asctime": 0}
_MACHINE: dict[ModuleType, str] = {
    os: (
        "cpu_count process_cpu_count sched_getaffinity sched_getscheduler sched_getparam "
        "getloadavg getpriority uname getpid getppid getlogin getuid geteuid getgid getegid "
        "getgroups getgrouplist getresuid getresgid getpgrp getpgid getsid sysconf confstr "
        "pathconf fpathconf statvfs fstatvfs ctermid ttyname get_terminal_size"
    ),
    platform: "node release version platform processor uname libc_ver",
    pwd: "getpwall getpwnam getpwuid",
    grp: "getgrall getgrgid getgrnam",
    resource: "getrlimit prlimit getrusage",
    threading: "get_native_id",
    uuid: "getnode",
}
_STARTERS = ("start_new_thread", "start_new", "start_joinable_thread")
"""Of `_thread`, for `threading` knows them under names of its own."""


def wrap(tracer: Tracer) -> None:
    """Wrap them all, for as long as this process lives."""
    _wrap_environment(tracer)
    _wrap_imports(tracer)
    _wrap_looks(tracer)
    _wrap_clocks(tracer)
    _wrap_calendar(tracer)
    _wrap_machine(tracer)
    _wrap_chance(tracer)
    _wrap_threads(tracer)
    _replace_aliases()


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

        def __delitem__(self, key: Any) -> None:
            if tracer.noting():
                tracer.quietly(tracer.variable, key)
            super().__delitem__(key)

        def __len__(self) -> int:
            if tracer.noting():
                tracer.quietly(tracer.all_variables)
            return super().__len__()

        def __repr__(self) -> str:
            return repr(dict(self))

        @property
        def _data(self) -> Any:
            """What the methods of `os` work on; anybody else goes through all of it."""
            if tracer.noting() and not is_library(sys._getframe(1)):
                tracer.quietly(tracer.all_variables)
            return vars(self)["_data"]

    os.environ.__class__ = Observed
    os.environb.__class__ = Observed
    posix.environ = os.environb  # type: ignore[assignment]


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
        if tracer.active and not level and name.partition(".")[0] not in sys.stdlib_module_names:
            file = globals.get("__file__") if globals else None
            if not file or of_python(file):
                file = importer(sys._getframe(1))
            notes.imports[file].add((name, tuple(fromlist or ())))
        return original(name, globals, locals, fromlist, level)

    def import_module(name: str, package: str | None = None) -> Any:
        if tracer.active and not name.startswith("."):
            frame = sys._getframe(1)
            file = frame.f_globals.get("__file__")
            if not file or of_python(file):
                file = importer(frame)
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
            _permit: bool = name == "access",
            **options: Any,
        ) -> Any:
            if tracer.noting() and not isinstance(path, int):
                link = _link or not options.get("follow_symlinks", True)
                sized = _sized and not asks_whether(sys._getframe(1))
                tracer.quietly(tracer.look, path, link, sized, options.get("dir_fd"))
                if _permit:
                    tracer.quietly(tracer.permit, path, (*rest, options.get("mode", os.F_OK))[0])
            return _original(path, *rest, **options)

        setattr(os, name, looking)
        for group in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
            if original in group:
                group.add(looking)


def _wrap_clocks(tracer: Tracer) -> None:
    for name in _CLOCKS:
        _noted(tracer, time, name, "reads the clock")
    for name, needed in _CALENDARS.items():
        _noted(tracer, time, name, "reads the clock", unless=needed)
    _noted(tracer, os, "times", "reads the clock")
    _noted(tracer, uuid, "uuid1", "reads the clock")


def _wrap_calendar(tracer: Tracer) -> None:
    """Wrap `datetime.now` and its like: methods of a type that takes no new ones by `setattr`.

    `date.today` asks `time.time`, which is wrapped.
    """
    methods = gc.get_referents(vars(dt.datetime))[0]

    def noted(original: Any) -> Any:
        def asking(cls: Any, *arguments: Any, **options: Any) -> Any:
            if tracer.noting() and not waits(sys._getframe(1)):
                tracer.quietly(tracer.deed, "reads the clock")
            return original.__get__(None, cls)(*arguments, **options)

        return classmethod(asking)

    for name in ("now", "utcnow"):
        methods[name] = noted(methods[name])
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(dt.datetime))


# What they ask for is asked by functions of theirs, `os.process_cpu_count` for one.
_NOTED_ELSEWHERE = (platform.__file__, os.fsencode.__code__.co_filename)


def _wrap_machine(tracer: Tracer) -> None:
    for module, names in _MACHINE.items():
        for name in names.split():
            if hasattr(module, name):
                what = f"{module.__name__}.{name}"
                _noted(
                    tracer,
                    module,
                    name,
                    f"asks for `{what}`",
                    tracer.question,
                    but=_NOTED_ELSEWHERE,
                )


def _wrap_threads(tracer: Tracer) -> None:
    """Tell each thread who started it."""
    for name in _STARTERS:
        original = getattr(_thread, name, None)
        if original is None:
            continue

        def starting(function: Any, *rest: Any, _original: Any = original, **options: Any) -> Any:
            stack = callers() if tracer.noting() else ()

            def running(*arguments: Any, **keywords: Any) -> Any:
                start_with(stack)
                return function(*arguments, **keywords)

            return _original(running, *rest, **options)

        setattr(_thread, name, starting)
        if hasattr(threading, f"_{name}"):
            setattr(threading, f"_{name}", starting)


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
    unless: int | None = None,
    but: Collection[str] = (),
) -> None:
    """Note calls of a function, less those that only wait: see `callers.waits`.

    `unless` is the number of arguments above which the call is one of mere arithmetic, `but`
    files whose calls are noted elsewhere.
    """
    original = getattr(module, name)
    note = note or tracer.deed

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if tracer.noting() and (unless is None or len(arguments) <= unless):
            frame = sys._getframe(1)
            if frame.f_code.co_filename not in but and not waits(frame):
                tracer.quietly(note, what)
        return original(*arguments, **options)

    wrapped.__name__ = name
    setattr(module, name, wrapped)
    _STANDING[id(original)] = original, wrapped


_STANDING: dict[int, tuple[Any, Any]] = {}
"""`id` of a function → the function, and what stands for it."""


def _replace_aliases() -> None:
    """Wrap the functions for those too that imported them before; `threading` only waits."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module is threading:
            continue
        for alias, value in list(vars(module).items()):
            if (found := _STANDING.get(id(value))) is not None and value is found[0]:
                setattr(module, alias, found[1])
