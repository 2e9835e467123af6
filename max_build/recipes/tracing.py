"""What the code that runs in a worker asks of the machine, noted as it asks.

An audit hook (PEP 578) sees files, directories, processes and the network; the environment,
imports, `os.stat` and its like, clocks and sources of randomness are wrapped (see `wrapping`),
since no audit event tells of them; so are the openers of native libraries that read weights and
tokenizers. inotify sees what other native code opens below the project, and the process's map what
it still holds mapped from elsewhere. `provenance` makes a recipe of the notes.

Not seen, and so no part of a recipe: what other native code reads outside the project and lets go,
or asks of the system (device counts, the clock), and what it finds absent; times of files; the
number of an object (`id`).
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from max_build.recipes import inotify, openers, wrapping
from max_build.recipes.callers import Stack, asked_by, callers, is_library
from max_build.recipes.notes import Notes
from max_build.recipes.places import absolute, mapped, passed, within
from max_build.recipes.surroundings import (
    candidates_in,
    kind_of,
    link_of,
    listing_of,
    names_in,
    size_of,
)
from max_build.stamp import Stamp, read_digest, stamp_of

__all__ = ["Tracer"]

_COARSE = 5
"""CLOCK_REALTIME_COARSE of <linux/time.h>, by which the kernel dates files."""
_METADATA = os.path.join("importlib", "metadata")

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
        self.began = time.clock_gettime_ns(_COARSE)
        """Nothing is dated later, in ns, that did not change while this traced."""
        self._roots = roots
        self._inside = threading.local()
        self._digests: dict[str, tuple[Stamp, str]] = {}
        self._watch: inotify.Watch | None = None
        self.blind = ""
        """Why native code cannot be watched; empty when it is."""
        try:
            self._watch = inotify.Watch(roots, inotify.OPENED)
        except (OSError, inotify.Overflow) as error:
            self.blind = f"the project's directories cannot be watched: {error}"
        wrapping.wrap(self)
        openers.follow(self._opened, self._blinded)
        self._mapped = self._map()
        sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def tracing(self, scratch: str) -> Iterator[None]:
        """Take notes for the length of the block, with the shared generators at their start.

        `scratch` is a directory that was made for it, empty.
        """
        self.notes.made.add(scratch)
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
            if known is not None and known[0] == stamp_of(before):
                return known[1]
            found, read = read_digest(path)
        except OSError:
            return ""
        if read is not None:
            self._digests[path] = read, found
        return found

    def _map(self) -> dict[str, bool]:
        try:
            return mapped()
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

    def noting(self) -> bool:
        """Whether what this thread does now is to be noted."""
        return self.active and not getattr(self._inside, "busy", False)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.noting():
            return
        if event == "open":
            self.quietly(self._open, *arguments)
        elif event in ("os.listdir", "os.scandir"):
            self.quietly(self._list, event, *arguments)
        elif event in _PROCESSES:
            self.quietly(self.deed, _PROCESSES[event])
        elif event in _CHANGES:
            self.quietly(self._change, event, *arguments)
        elif event.startswith("socket.") and event != "socket.__new__":
            self.quietly(self._talk, "uses the network")
        elif event == "exec":
            self.quietly(self._execute, *arguments)
        elif event == "os.putenv":
            self.quietly(self._set, *arguments)
        elif event == "ctypes.dlopen":
            self.quietly(self._load, *arguments)
        elif event == "sqlite3.connect":
            self.quietly(self._connect, *arguments)

    def quietly(self, note: Callable[..., None], *arguments: Any) -> None:
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
            return  # of a descriptor, which was noted when it was opened; or made here
        stack = callers()
        flags = flags if isinstance(flags, int) else 0
        exists = os.path.exists(place)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.notes.written[place].add(stack)
            if flags & os.O_EXCL:  # it tells whether there is anything
                self._find(place, stack)
            if not exists and flags & os.O_CREAT and not os.path.lexists(place):
                self._make(place)
                return
            if flags & os.O_TRUNC:
                return
        if not exists:
            self.notes.looked[place].add(stack)
            self.notes.kinds.setdefault(place, "absent")
        elif os.path.isdir(place):
            self.notes.entered[place].add(stack)
        else:
            self._read(place, stack)

    def _find(self, place: str, stack: Stack) -> None:
        self.notes.looked[place].add(stack)
        self.notes.kinds.setdefault(place, kind_of(place))

    def _make(self, place: str) -> None:
        if not self._is_own(place):
            self.notes.made.add(place)

    def _not_made(self, place: str) -> str | None:
        """None if a place outside the project came about here, alone or with what it lies in.

        Where a link that did leads elsewhere: that place.
        """
        made = self.notes.made
        if not any(one in made for one in _upward(place)):
            return place
        real, bases = os.path.realpath(place), {os.path.realpath(one) for one in made}
        return None if any(one in bases for one in _upward(real)) else real

    def _read(self, place: str, stack: Stack) -> None:
        self.notes.opened[place].add(stack)
        if not self._is_own(place):
            return
        found = self.content(place)
        if self.notes.files.setdefault(place, found) != found:
            self.notes.changed.add(place)

    def _is_own(self, place: str) -> bool:
        return any(within(place, root) for root in self._roots)

    def _place(self, path: Any, directory: int | None = None) -> str | None:
        """See `places.absolute`; notes the links that decide where a `..` leads.

        None also for what came about here: see `_not_made`.
        """
        place = absolute(path, directory)
        if place is not None and not isinstance(path, int):
            text = os.fsdecode(path)
            if os.pardir in text.split(os.sep):
                self._way(os.path.join(os.getcwd(), text))
        return None if place is None else self._not_made(place)

    def _way(self, path: str) -> None:
        """Note all that decides where an absolute path leads in the end."""
        for one in passed(path):
            self.notes.links.setdefault(one, link_of(one))

    def _list(self, event: str, path: Any) -> None:
        frame = sys._getframe(3)
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return  # the finder's own cache: what it is asked for is noted there
        place = self._place("." if path is None else path)
        if place is None:
            return
        if place in map(os.path.abspath, sys.path) and asked_by(_METADATA, frame):
            return  # what it finds there is a distribution's
        self.notes.listed[place].add(callers())
        self.notes.listings.setdefault(place, listing_of(place))
        if event == "os.scandir" and not is_library(frame) and self._is_own(place):
            # what it asks of the entries cannot be seen
            for name in names_in(place):
                one = os.path.join(place, name)
                self.notes.sizes.setdefault(one, size_of(one))
                self.notes.links.setdefault(one, link_of(one))
                self.notes.kinds.setdefault(one, kind_of(one))
                self.notes.modes.add(one)

    def _change(self, event: str, *arguments: Any) -> None:
        stack = callers()
        # Paths come first, and last the descriptors of the directories they are relative to.
        if event in ("os.setxattr", "os.truncate"):
            arguments = (arguments[0],)
        paths = [one for one in arguments[:2] if isinstance(one, str | bytes | os.PathLike)]
        for one, base in zip(paths, arguments[-len(paths) :], strict=False):
            inside = base if isinstance(base, int) and base >= 0 else None
            place = self._place(one, inside)
            if place is None:
                continue
            self.notes.written[place].add(stack)
            if self._is_own(place):
                continue
            if event in ("os.rename", "os.link") and one is paths[0] and os.path.isfile(place):
                self._read(place, stack)
            else:  # whether it can be done depends on what is there
                self._find(place, stack)
            if event == "os.mkdir" and not os.path.lexists(place):
                self._make(place)

    def _set(self, name: bytes, value: bytes) -> None:
        self.notes.settings[os.fsdecode(name), os.fsdecode(value)].add(callers())

    def _load(self, path: Any, *_: Any) -> None:
        text = "" if path is None else os.fsdecode(path)
        if text and not (os.sep in text and self._read_whole(text)):
            self.notes.deeds[f"loads `{text}`"].add(callers())

    def _connect(self, path: Any, *_: Any) -> None:
        if path == ":memory:":
            return
        text = os.fsdecode(path)
        if not self._read_whole(text):
            self.notes.deeds[f"loads `{text}`"].add(callers())
            return
        for one in (f"{text}-wal", f"{text}-journal"):  # what is not in the file yet
            if os.path.exists(one):
                self.notes.deeds[f"loads `{one}`"].add(callers())
            self.look(one, link=False, sized=False)

    def _read_whole(self, path: str) -> bool:
        place = self._place(path)
        if place is None or not os.path.isfile(place):
            return False
        self._read(place, callers())
        return True

    def _execute(self, code: Any) -> None:
        if not isinstance(code, CodeType):
            return
        file = code.co_filename
        told = file.startswith("<")
        if told or self._is_own(os.path.abspath(file)):
            names = set(_names(code))
            if "datetime64" in names and names & {"now", "today"}:  # native code, not to be wrapped
                stack = callers() if told else (os.path.abspath(file),)
                self.notes.deeds["reads the clock"].add(stack)

    def deed(self, what: str) -> None:
        """Note what no recipe can promise."""
        self.notes.deeds[what].add(callers())

    def draw(self, what: str) -> None:
        """Note that random bytes are drawn, unless it is to seed a generator: see `seeding`."""
        if not getattr(self._inside, "seeding", False):
            self.deed(what)

    def question(self, what: str) -> None:
        """Note a question about the machine."""
        self.notes.questions[what].add(callers())

    def _talk(self, what: str) -> None:
        self.notes.talks[what].add(callers())

    # --- what no audit event tells of

    def variable(self, name: Any) -> None:
        """Note that a variable of the environment is read."""
        text = os.fsdecode(name)
        data = os.environ._data  # type: ignore[attr-defined]
        raw = data.get(os.fsencode(text))
        now = None if raw is None else os.fsdecode(raw)
        if now == self.environ.get(text):  # else it is what this process made of it
            self.notes.variables[text].add(callers())

    def all_variables(self) -> None:
        """Note that the environment is gone through."""
        self.notes.enumerated.add(callers())

    def asked(self, fullname: str) -> None:
        """Note that a module is wanted."""
        self.notes.asked[fullname].add(callers())

    def locate(self, fullname: str, place: str) -> None:
        """Note where a module was found."""
        self.notes.located.setdefault(fullname, place)
        if os.path.isfile(place):  # an extension module is read where no audit event tells
            self._read(place, ())

    def probe(self, directory: str, module: str) -> None:
        """Note what an import chooses among in one of the project's directories."""
        if not self._is_own(directory):
            return
        modules = self.notes.probed.setdefault(directory, {})
        if module in modules:
            return
        modules[module] = candidates_in(names_in(directory), module)
        if module in modules[module]:  # a package only if it has an `__init__`
            self.probe(os.path.join(directory, module), "__init__")

    def look(self, path: Any, link: bool, sized: bool, directory: int | None = None) -> None:
        """Note what is at a place; also as a link, and its size, if that may be of account."""
        place = self._place(path, directory)
        if place is None:
            return
        if place in map(os.path.abspath, sys.path) and asked_by(_METADATA, sys._getframe(3)):
            return
        self._find(place, callers())
        if link:
            self.notes.links.setdefault(place, link_of(place))
        if sized:  # it may also be asked whether it is the same as another
            self._way(place)
            self.notes.sizes.setdefault(place, size_of(place))
            self.notes.modes.add(place)

    def permit(self, path: Any, mode: int) -> None:
        """Note that somebody asks what may be done with a place: whether it may be run is kept."""
        if mode & (os.R_OK | os.W_OK):
            self.question("asks for `os.access`")
        if mode & os.X_OK and (place := self._place(path)) is not None:
            self.notes.modes.add(place)

    def _opened(self, *arguments: Any) -> None:
        if self.noting():
            self.quietly(self._read_natively, *arguments)

    def _blinded(self, why: str) -> None:
        self.blind = why

    def _read_natively(self, *arguments: Any) -> None:
        for number, one in enumerate(arguments):
            place = self._place(one) if isinstance(one, str | os.PathLike) else None
            if place is None:
                continue
            if os.path.isfile(place):
                self._read(place, callers())
            elif not number:
                self.look(one, link=False, sized=False)


def _names(code: CodeType) -> Iterator[str]:
    """What a module's code names, and its texts."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)
        elif isinstance(one, str):
            yield one


def _upward(place: str) -> Iterator[str]:
    """A place and the directories that it lies in."""
    yield place
    while place != (place := os.path.dirname(place)):
        yield place
