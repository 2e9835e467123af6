"""What the code that runs in a worker asks of the machine, noted as it asks.

An audit hook (PEP 578) sees files, directories, processes and the network; the environment,
imports, `os.stat` and its like, clocks and sources of randomness are wrapped, since no audit event
tells of them; so are the openers of native libraries that read weights and tokenizers. inotify
sees what other native code opens below the project, and the process's map what it still holds
mapped from elsewhere. `provenance` makes a recipe of the notes.

Not seen, and so no part of a recipe: what other native code reads outside the project and lets go,
or asks of the system (device counts, the clock); times of files; the number of an object (`id`).
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import importlib
import os
import random
import stat
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib import machinery
from types import CodeType, FrameType, ModuleType
from typing import Any

from max_build import inotify
from max_build.recipe import Kind
from max_build.surroundings import (
    candidates_in,
    kind_of,
    link_of,
    listing_of,
    names_in,
    size_of,
)

__all__ = ["Notes", "Stack", "Tracer"]

Stack = tuple[str, ...]
"""Files of the code that is running, the innermost first; not the interpreter's, not ours."""

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_RECORDER = os.path.join(_OURS, "recorder.py")
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_METADATA = os.path.join("importlib", "metadata")
# Inside them time and chance decide names and log lines, not what is computed.
_UNTOLD = tuple(_LIBRARY + name for name in ("tempfile.py", "logging" + os.sep))

_PROCESSES = {
    "os.exec": "starts a program",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a program",
    "os.spawn": "starts a program",
    "os.system": "starts a program",
    "pty.spawn": "starts a program",
    "subprocess.Popen": "starts a program",
}
_CHANGES = frozenset(
    f"os.{name}"
    for name in "chmod chown link mkdir remove rename rmdir setxattr symlink truncate utime".split()
)
_CLOCKS = (
    "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time "
    "process_time_ns thread_time thread_time_ns clock_gettime clock_gettime_ns"
).split()
_CALENDARS = {"ctime": 0, "gmtime": 0, "localtime": 0, "strftime": 1, "asctime": 0}
_MACHINE = (
    "cpu_count process_cpu_count sched_getaffinity getloadavg uname getpid getppid getlogin".split()
)
_LOOKS = "stat lstat access readlink".split()
# The library's own questions about what is somewhere, to which a file's size is no part of the
# answer.
_WHETHER = frozenset(
    "exists lexists isfile isdir islink ismount is_file is_dir is_symlink is_mount is_fifo "
    "is_socket is_block_device is_char_device realpath _joinrealpath resolve".split()
)
_OPENERS = {
    "max._core": ("safetensors.safe_open",),
    "safetensors._safetensors_rust": ("safe_open",),
    "tokenizers.tokenizers": (
        "Tokenizer.from_file",
        "models.BPE.from_file",
        "models.BPE.read_file",
        "models.WordLevel.from_file",
        "models.WordLevel.read_file",
        "models.WordPiece.from_file",
        "models.WordPiece.read_file",
    ),
}
"""Native module → what in it opens the files that its arguments name."""

_LINKS = 40
"""Links that Linux follows on one path."""

_SETTLED = 2_000_000_000
"""Nanoseconds after which a file's times tell of any further change."""


class Notes:
    """What was seen so far. Paths are absolute.

    Parameters
    ----------
    files
        File that was read → SHA-256 (hex) as it was then; empty where it could not be read.
    opened
        File that was read → on whose behalf, each time.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.opened: defaultdict[str, set[Stack]] = defaultdict(set)
        self.written: defaultdict[str, set[Stack]] = defaultdict(set)
        self.looked: defaultdict[str, set[Stack]] = defaultdict(set)
        self.entered: defaultdict[str, set[Stack]] = defaultdict(set)
        """Directory that was opened: what is done from there has no place to be noted."""
        self.listed: defaultdict[str, set[Stack]] = defaultdict(set)
        self.kinds: dict[str, Kind] = {}
        """What was there when a place was first looked at."""
        self.links: dict[str, str] = {}
        """Place → where it pointed when it was first asked about as a link; see `link_of`."""
        self.sizes: dict[str, int] = {}
        """File → its size when that was first asked for; -1 for what is no file."""
        self.mapped: dict[str, bool] = {}
        """File that came into memory, by its real path → whether as code."""
        self.listings: dict[str, str] = {}
        """Digest of a directory's names when it was first listed."""
        self.probed: dict[str, dict[str, tuple[str, ...]]] = {}
        """Directory → module that was looked for in it → what there was to choose among."""
        self.located: dict[str, str] = {}
        """Module → its file, or one of its directories."""
        self.asked: defaultdict[str, set[Stack]] = defaultdict(set)
        """Module → who wanted it found."""
        self.imports: defaultdict[str, set[tuple[str, tuple[str, ...]]]] = defaultdict(set)
        """File → what its import statements name: a module, and names from it."""
        self.variables: defaultdict[str, set[Stack]] = defaultdict(set)
        self.enumerated: set[Stack] = set()
        self.deeds: defaultdict[str, set[Stack]] = defaultdict(set)
        """What no recipe can promise, in words → who did it directly."""
        self.questions: defaultdict[str, set[Stack]] = defaultdict(set)
        """What was asked about the machine: libraries do, to choose how they compute."""
        self.talks: defaultdict[str, set[Stack]] = defaultdict(set)
        """The same, whoever it was done through."""
        self.changed: set[str] = set()
        """Files that were not the same at two readings."""


class Tracer:
    """Traces this process from the moment it is made; an audit hook cannot be removed.

    Parameters
    ----------
    roots
        Directories of the project, absolute.
    """

    def __init__(self, roots: tuple[str, ...]) -> None:
        self.notes = Notes()
        self.environ = dict(os.environ)
        self.active = False
        self._roots = roots
        self._inside = threading.local()
        self._digests: dict[str, tuple[tuple[int, ...], str]] = {}
        self._watch: inotify.Watch | None = None
        self.blind = ""
        """Why native code cannot be watched; empty when it is."""
        try:
            self._watch = inotify.Watch(roots, inotify.OPENED)
        except (OSError, inotify.Overflow) as error:
            self.blind = f"the project's directories cannot be watched: {error}"
        self._wrap_environment()
        self._wrap_imports()
        self._wrap_looks()
        self._wrap_clocks()
        self._wrap_chance()
        self._wrap_openers()
        self._mapped = self._map()
        sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Take notes for the length of the block, with the shared generators at their start."""
        random.seed(0)
        if "numpy.random.mtrand" in sys.modules:
            sys.modules["numpy.random.mtrand"].seed(0)
        self.active = True
        try:
            yield
        finally:
            self.active = False
            for place, code in self._map().items():
                if place not in self._mapped:
                    self.notes.mapped[place] = code or self.notes.mapped.get(place, False)

    def content(self, path: str) -> str:
        """SHA-256 (hex); empty for what is no file, or cannot be read.

        A file is read again only if it changed, or may have without its times telling.
        """
        try:
            before = os.stat(path)
            if not stat.S_ISREG(before.st_mode):
                return ""
            known = self._digests.get(path)
            if known is not None and known[0] == _stamp(before):
                return known[1]
            began = time.time_ns()
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                after = os.fstat(file.fileno())
        except OSError:
            return ""
        settled = began - max(after.st_mtime_ns, after.st_ctime_ns) > _SETTLED
        if settled and _stamp(before) == _stamp(after):
            self._digests[path] = _stamp(after), found
        return found

    def _map(self) -> dict[str, bool]:
        try:
            return _mapped()
        except OSError as error:
            self.blind = f"what is mapped into memory cannot be seen: {error}"
            return {}

    @contextlib.contextmanager
    def seeding(self) -> Iterator[None]:
        """Within the block this thread may draw random bytes: nothing comes of them."""
        self._inside.seeding = True
        try:
            yield
        finally:
            self._inside.seeding = False

    def natively_opened(self) -> set[str]:
        """Files below the project that any process has opened, Python sources aside.

        Raises
        ------
        inotify.Overflow
            If there were too many.
        """
        return self._watch.read() if self._watch is not None else set()

    # --- the audit hook

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or getattr(self._inside, "busy", False):
            return
        if event == "open":
            self._quietly(self._open, *arguments)
        elif event in ("os.listdir", "os.scandir"):
            self._quietly(self._list, event, *arguments)
        elif event in _PROCESSES:
            self._quietly(self._deed, _PROCESSES[event])
        elif event in _CHANGES:
            self._quietly(self._change, event, *arguments)
        elif event.startswith("socket.") and event != "socket.__new__":
            self._quietly(self._talk, "uses the network")
        elif event == "exec":
            self._quietly(self._execute, *arguments)
        elif event in ("ctypes.dlopen", "sqlite3.connect"):
            self._quietly(self._native, *arguments)

    def _quietly(self, note: Callable[..., None], *arguments: Any) -> None:
        """Note something; what that takes is not noted, and no fault of it reaches the code."""
        self._inside.busy = True
        try:
            note(*arguments)
        except Exception as error:  # a hole in the notes must not look like a recipe
            self.notes.talks[f"could not be followed ({type(error).__name__}: {error})"].add(("*",))
        finally:
            self._inside.busy = False

    def _open(self, path: Any, _mode: Any, flags: Any) -> None:
        place = None if isinstance(path, int) else self._place(path)
        if place is None:
            return  # of a descriptor, which was noted when it was opened
        stack = _stack()
        flags = flags if isinstance(flags, int) else 0
        exists = os.path.exists(place)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.notes.written[place].add(stack)
            if flags & os.O_TRUNC or not exists:
                return
        if not exists:
            self.notes.looked[place].add(stack)
            self.notes.kinds.setdefault(place, "absent")
        elif os.path.isdir(place):
            self.notes.entered[place].add(stack)
        else:
            self._read(place, stack)

    def _read(self, place: str, stack: Stack) -> None:
        self.notes.opened[place].add(stack)
        if not self._is_own(place):
            return
        found = self.content(place)
        if self.notes.files.setdefault(place, found) != found:
            self.notes.changed.add(place)

    def _is_own(self, place: str) -> bool:
        return any(place.startswith(root + os.sep) for root in self._roots)

    def _place(self, path: Any, directory: int | None = None) -> str | None:
        """See `_absolute`; notes the links that decide where a `..` leads."""
        place = _absolute(path, directory)
        if place is not None and not isinstance(path, int):
            text = os.fsdecode(path)
            if os.pardir in text.split(os.sep):
                self._way(os.path.join(os.getcwd(), text))
        return place

    def _way(self, path: str) -> None:
        """Note all that decides where an absolute path leads in the end."""
        for one in _passed(path):
            self.notes.links.setdefault(one, link_of(one))

    def _list(self, event: str, path: Any) -> None:
        frame = sys._getframe(3)
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return  # the finder's own cache: what it is asked for is noted there
        place = self._place("." if path is None else path)
        if place is None or _by(_METADATA, frame):
            return
        self.notes.listed[place].add(_stack())
        self.notes.listings.setdefault(place, listing_of(place))
        if event == "os.scandir" and not _is_library(frame) and self._is_own(place + os.sep):
            # what it asks of the entries cannot be seen
            for name in names_in(place):
                one = os.path.join(place, name)
                self.notes.sizes.setdefault(one, size_of(one))
                self.notes.links.setdefault(one, link_of(one))

    def _change(self, event: str, *arguments: Any) -> None:
        stack = _stack()
        # Paths come first, and last the descriptors of the directories they are relative to.
        if event in ("os.setxattr", "os.truncate"):
            arguments = (arguments[0],)
        paths = [one for one in arguments[:2] if isinstance(one, str | bytes | os.PathLike)]
        for one, base in zip(paths, arguments[-len(paths) :], strict=False):
            inside = base if isinstance(base, int) and base >= 0 else None
            if (place := self._place(one, inside)) is not None:
                self.notes.written[place].add(stack)

    def _native(self, path: Any, *_: Any) -> None:
        if path is None or path == ":memory:":
            return
        stack = _stack()
        text = os.fsdecode(path)
        if os.sep in text and (place := self._place(text)) and os.path.isfile(place):
            self._read(place, stack)
        else:
            self.notes.deeds[f"loads `{text}`"].add(stack)

    def _execute(self, code: Any) -> None:
        if isinstance(code, CodeType) and self._is_own(code.co_filename) and reads_clock(code):
            self.notes.deeds["reads the clock"].add((code.co_filename,))

    def _deed(self, what: str) -> None:
        self.notes.deeds[what].add(_stack())

    def _draw(self, what: str) -> None:
        if not getattr(self._inside, "seeding", False):
            self._deed(what)

    def _question(self, what: str) -> None:
        self.notes.questions[what].add(_stack())

    def _talk(self, what: str) -> None:
        self.notes.talks[what].add(_stack())

    # --- what no audit event tells of

    def _wrap_environment(self) -> None:
        tracer = self

        class Observed(os._Environ):  # type: ignore[type-arg]
            """`os.environ`, whose readers are noted. Every other way to read ends in these."""

            def __getitem__(self, key: Any) -> Any:
                if tracer._noting():
                    tracer._quietly(tracer._variable, key)
                return super().__getitem__(key)

            def __iter__(self) -> Iterator[Any]:
                if tracer._noting():
                    tracer._quietly(tracer._all_variables)
                return super().__iter__()

        os.environ.__class__ = Observed
        os.environb.__class__ = Observed

    def _variable(self, name: Any) -> None:
        text = os.fsdecode(name)
        data = os.environ._data  # type: ignore[attr-defined]
        raw = data.get(os.fsencode(text))
        now = None if raw is None else os.fsdecode(raw)
        if now == self.environ.get(text):  # else it is what this process made of it
            self.notes.variables[text].add(_stack())

    def _all_variables(self) -> None:
        self.notes.enumerated.add(_stack())

    def _wrap_imports(self) -> None:
        original, find, by_name = (
            builtins.__import__,
            machinery.FileFinder.find_spec,
            importlib.import_module,
        )
        notes = self.notes

        def importing(
            name: str,
            globals: Mapping[str, Any] | None = None,  # noqa: A002 - the interpreter's names
            locals: Mapping[str, Any] | None = None,  # noqa: A002
            fromlist: Any = (),
            level: int = 0,
        ) -> Any:
            if self.active and globals and not level:
                file = globals.get("__file__")
                if file:
                    notes.imports[file].add((name, tuple(fromlist or ())))
            return original(name, globals, locals, fromlist, level)

        def import_module(name: str, package: str | None = None) -> Any:
            if self.active and not name.startswith("."):
                file = sys._getframe(1).f_globals.get("__file__")
                if file:
                    notes.imports[file].add((name, ()))
            return by_name(name, package)

        def find_spec(finder: Any, fullname: str, target: Any = None) -> Any:
            spec = find(finder, fullname, target)
            if self.active:
                self._quietly(self._probe, finder.path, fullname.rpartition(".")[2])
                places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
                if place := next(filter(None, places), None):
                    self._quietly(self._locate, fullname, place)
            return spec

        class Asked:
            """Finds nothing; first in line, it hears what everybody looks for."""

            @staticmethod
            def find_spec(fullname: str, path: Any = None, target: Any = None) -> None:  # noqa: ARG004
                if self._noting():
                    self._quietly(self._asked, fullname)

        builtins.__import__ = importing
        importlib.import_module = import_module
        machinery.FileFinder.find_spec = find_spec  # type: ignore[method-assign, assignment]
        sys.meta_path.insert(0, Asked)
        sys.path_importer_cache.clear()

    def _asked(self, fullname: str) -> None:
        self.notes.asked[fullname].add(_stack())

    def _locate(self, fullname: str, place: str) -> None:
        self.notes.located.setdefault(fullname, place)
        if os.path.isfile(place):  # an extension module is read where no audit event tells
            self._read(place, ())

    def _probe(self, directory: str, module: str) -> None:
        if directory not in self._roots and not self._is_own(directory):
            return
        modules = self.notes.probed.setdefault(directory, {})
        if module in modules:
            return
        modules[module] = candidates_in(names_in(directory), module)
        if module in modules[module]:  # a package only if it has an `__init__`
            self._probe(os.path.join(directory, module), "__init__")

    def _wrap_looks(self) -> None:
        for name in _LOOKS:
            original = getattr(os, name)

            def looking(
                path: Any,
                *rest: Any,
                _original: Any = original,
                _link: bool = name in ("lstat", "readlink"),
                _sized: bool = name in ("stat", "lstat"),
                **options: Any,
            ) -> Any:
                if self._noting() and not isinstance(path, int):
                    link = _link or not options.get("follow_symlinks", True)
                    sized = _sized and not _asks_whether(sys._getframe(1))
                    self._quietly(self._look, path, link, sized)
                return _original(path, *rest, **options)

            setattr(os, name, looking)
            for group in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
                if original in group:
                    group.add(looking)

    def _look(self, path: Any, link: bool, sized: bool) -> None:
        place = self._place(path)
        if place is None:
            return
        self.notes.looked[place].add(_stack())
        self.notes.kinds.setdefault(place, kind_of(place))
        if link:
            self.notes.links.setdefault(place, link_of(place))
        if sized:  # it may also be asked whether it is the same as another
            self._way(place)
            self.notes.sizes.setdefault(place, size_of(place))

    def _wrap_openers(self) -> None:
        for module, names in _OPENERS.items():
            if module in sys.modules:
                self._wrap_opener(sys.modules[module], names)

        def loading(execute: Callable[[Any], None], module: Any) -> None:
            execute(module)
            self._wrap_opener(module, _OPENERS[module.__name__])

        sys.meta_path.insert(0, _Loading(dict.fromkeys(_OPENERS, loading)))

    def _wrap_opener(self, module: Any, names: tuple[str, ...]) -> None:
        for name in names:
            *parents, last = name.split(".")
            owner = module
            for one in parents:
                owner = getattr(owner, one, None)
            original = getattr(owner, last, None)
            if original is None:
                continue  # of another version
            wrapped = self._opener(original)
            try:
                setattr(owner, last, staticmethod(wrapped) if isinstance(owner, type) else wrapped)
            except (AttributeError, TypeError) as error:
                self.blind = f"`{module.__name__}.{name}` cannot be followed: {error}"
            for other in list(sys.modules.values()):  # those that imported it before
                if isinstance(other, ModuleType) and vars(other).get(last) is original:
                    setattr(other, last, wrapped)

    def _opener(self, original: Any) -> Any:
        """What stands for a function, or for a class that opens a file when it is called."""

        def opening(*arguments: Any, **options: Any) -> Any:
            if self._noting():
                self._quietly(self._read_natively, *arguments, *options.values())
            return original(*arguments, **options)

        if not isinstance(original, type):
            return opening

        class Standing(type):
            def __call__(cls, *arguments: Any, **options: Any) -> Any:
                return opening(*arguments, **options)

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, original)

        return Standing(original.__name__, (), {"__doc__": original.__doc__})

    def _read_natively(self, *arguments: Any) -> None:
        for number, one in enumerate(arguments):
            place = self._place(one) if isinstance(one, str | os.PathLike) else None
            if place is None:
                continue
            if os.path.isfile(place):
                self._read(place, _stack())
            elif not number:
                self._look(one, link=False, sized=False)

    def _wrap_clocks(self) -> None:
        for name in _CLOCKS:
            self._wrap(time, name, "reads the clock", directly=True)
        for name, needed in _CALENDARS.items():
            self._wrap(time, name, "reads the clock", directly=True, unless=needed)
        for name in _MACHINE:
            if hasattr(os, name):
                self._wrap(os, name, f"asks for `os.{name}`", self._question)

    def _wrap_chance(self) -> None:
        """Note what draws on the system; the shared generators are started by us."""
        for name in ("urandom", "getrandom"):
            self._wrap(os, name, "draws random bytes", self._draw)
        random._urandom = os.urandom  # type: ignore[attr-defined]
        seed = random.Random.seed
        tracer = self

        def seeding(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None and tracer._noting():
                tracer._quietly(tracer._deed, "uses a random generator without a seed")
            seed(generator, a, version)

        random.Random.seed = seeding  # type: ignore[method-assign, assignment]
        random.seed = random._inst.seed

        def loading(execute: Callable[[Any], None], module: Any) -> None:
            """Give numpy's shared generator its canonical state as soon as there is one."""
            with self.seeding():
                execute(module)
                module.seed(0)

        sys.meta_path.insert(0, _Loading({"numpy.random.mtrand": loading}))

    def _wrap(
        self,
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
        note = note or self._deed

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if self._noting() and (unless is None or len(arguments) <= unless):
                file = sys._getframe(1).f_code.co_filename
                if not directly or not (_of_python(file) or file.startswith("<frozen")):
                    self._quietly(note, what)
            return original(*arguments, **options)

        wrapped.__name__ = name
        setattr(module, name, wrapped)

    def _noting(self) -> bool:
        return self.active and not getattr(self._inside, "busy", False)


class _Loading:
    """Finds some modules, with a loader of our own around theirs.

    Parameters
    ----------
    loaders
        Module → what is called, in place of its loader, with the loader and the module.
    """

    def __init__(self, loaders: Mapping[str, Callable[[Callable[[Any], None], Any], None]]) -> None:
        self._loaders = loaders

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find one of the modules; None for any other."""
        if fullname not in self._loaders:
            return None
        spec = machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            load = self._loaders[fullname]
            spec.loader.exec_module = lambda module: load(execute, module)  # type: ignore[method-assign]
        return spec


def reads_clock(code: CodeType) -> bool:
    """Whether a module's code names `datetime.now` and its like, which cannot be wrapped."""
    names = set(code.co_names)
    if names & {"now", "utcnow", "today"} and names & {"datetime", "date"}:
        return True
    return any(reads_clock(one) for one in code.co_consts if isinstance(one, CodeType))


def _of_python(file: str) -> bool:
    return file.startswith(_LIBRARY) and "-packages" + os.sep not in file


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return _of_python(file) or file.startswith("<frozen")


def _asks_whether(frame: FrameType | None) -> bool:
    """Whether a look by the library is for what is there, and not for its size."""
    if frame is not None and frame.f_code.co_name in _LOOKS and _is_library(frame):
        frame = frame.f_back  # `Path.stat`
    return frame is not None and frame.f_code.co_name in _WHETHER and _is_library(frame)


def _stack() -> Stack:
    """Who is asking: empty where only the interpreter's library is, or time is of no account."""
    found: dict[str, None] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _RECORDER:
            break  # what called us is not what is derived
        if not file.startswith("<") and not file.startswith(_OURS) and not _of_python(file):
            found[file] = None
        elif not found and file.startswith(_UNTOLD):
            return ()
        frame = frame.f_back
    return tuple(found)


def _by(part: str, frame: FrameType | None) -> bool:
    """Whether a part of the interpreter's library is asking."""
    while frame is not None and (
        _of_python(frame.f_code.co_filename) or frame.f_code.co_filename.startswith("<")
    ):
        if part in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _absolute(path: Any, directory: int | None = None) -> str | None:
    """A path as it is used here and now, a descriptor's too; None where that cannot be told."""
    try:
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}")
        base = os.getcwd() if directory is None else os.readlink(f"/proc/self/fd/{directory}")
    except OSError:
        return None
    place = os.path.join(base, os.fsdecode(path))
    if os.pardir in place.split(os.sep):
        return os.path.join(os.path.realpath(os.path.dirname(place)), os.path.basename(place))
    return os.path.normpath(place)


def _passed(path: str) -> Iterator[str]:
    """The places on an absolute path, and on what the links among them name: path_resolution(7)."""
    todo = path.split(os.sep)[::-1]
    place = os.sep
    links = 0
    while todo:
        part = todo.pop()
        if part in ("", os.curdir):
            continue
        if part == os.pardir:
            place = os.path.dirname(place)
            continue
        yield (one := os.path.join(place, part))
        if not os.path.islink(one):
            place = one
            continue
        links += 1
        if links > _LINKS:
            return
        todo += os.path.join(place, os.readlink(one)).split(os.sep)[::-1]
        place = os.sep


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _mapped() -> dict[str, bool]:
    """Files that are mapped into this process → whether as code: see proc_pid_maps(5)."""
    found: dict[str, bool] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(os.sep):
                found[fields[5]] = found.get(fields[5], False) or "x" in fields[1]
    return found
