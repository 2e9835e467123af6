"""Import what `entry = "package.module:name"` names, and forget the project's modules again.

A worker that serves many jobs has to see each module as a new process would. Bytecode of the
project's modules is neither written (the tree is not ours) nor read: Python takes a `.pyc` for
current if size and time in whole seconds agree, which an edit of one digit can leave unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from importlib import machinery
from types import ModuleType
from typing import TYPE_CHECKING, Any

from max_build.errors import CompileError

if TYPE_CHECKING:
    from max_build.compilers import Job

__all__ = ["imported", "located", "told"]


@contextlib.contextmanager
def imported(job: Job) -> Iterator[Any]:
    """The object that the unit's `entry` names, for the length of the block.

    Raises
    ------
    CompileError
        If the module cannot be imported or has no such object.
    """
    entry: str = job.unit.declared["entry"]
    module_name, _, path = entry.partition(":")
    with _fresh(job):
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            message = (
                f"`{job.unit.where}.entry`: module `{module_name}` cannot be imported: "
                f"{told(job, error)}"
            )
            hint = ""
            if isinstance(error, ModuleNotFoundError):
                looked = ", ".join(f"`{os.path.relpath(one, job.root)}`" for one in job.python_path)
                hint = f"looked in {looked} of the project and in the build environment"
            raise CompileError(message, hint=hint) from error
        except SystemExit as error:
            message = f"`{module_name}` ended the process with status {error.code}"
            raise CompileError(message) from error
        try:
            found: Any = functools.reduce(getattr, path.split("."), module)
        except AttributeError as error:
            message = f"`{job.unit.where}.entry`: `{module_name}` has no `{path}`"
            raise CompileError(message) from error
        yield found


def told(job: Job, error: BaseException) -> str:
    """An error of the project's own code: its type, text, where it arose, and on which way there.

    What lies in libraries below the project's innermost frame is left out.
    """
    import traceback  # only where something went wrong

    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f"`{_inside(job, frame.filename)}`, line {frame.lineno}"
        for frame in frames
        if _is_ours(job, frame.filename)
    ]
    if isinstance(error, SyntaxError) and error.filename and _is_ours(job, error.filename):
        places.append(f"`{_inside(job, error.filename)}`, line {error.lineno}")
    if not places:
        others = [
            frame
            for frame in frames
            if os.sep + "max_build" + os.sep not in frame.filename
            and "importlib" not in frame.filename
        ]
        places = [
            f"`{one.filename.rpartition('site-packages' + os.sep)[2]}`, line {one.lineno}"
            for one in others[-1:]
        ]
    where = f" ({places[-1]})" if places else ""
    calls = "".join(f"\n  called from {place}" for place in places[-2::-1])
    return f"{type(error).__name__}: {error}{where}{calls}"


def located(job: Job, source: str, line: int) -> str:
    """Where a line (from 1) of a function's source stands in the project, if that is known."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and _is_ours(job, path):
            text = "".join(linecache.getlines(path))
            before, found, _ = text.partition(source.rstrip())
            if found:
                return f"`{_inside(job, path)}`, line {before.count(chr(10)) + line}"
    return ""


def _inside(job: Job, path: str) -> str:
    """A path of the project as the project says it."""
    return os.path.relpath(path, job.root)


class _Loader(machinery.SourceFileLoader):
    """Compiles a module from its source, whatever bytecode lies beside it."""

    def path_stats(self, path: str) -> Any:
        """Say that nothing is known about the source file, which rules its bytecode out."""
        message = f"bytecode of `{path}` is not used"
        raise OSError(message)


@contextlib.contextmanager
def _fresh(job: Job) -> Iterator[None]:
    """Import from the project alone and first; leave the process as it was."""
    finder = machinery.FileFinder.path_hook(
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (_Loader, machinery.SOURCE_SUFFIXES),
    )
    ours = functools.partial(_is_ours, job)

    def hook(path: str) -> Any:
        if not ours(path):
            message = f"`{path}` is not the project's"
            raise ImportError(message)
        return finder(path)

    before, search, writes = set(sys.modules), sys.path[:], sys.dont_write_bytecode
    sys.path[:0] = job.python_path
    sys.path_hooks.insert(0, hook)
    sys.dont_write_bytecode = True
    _forget(ours, before)
    try:
        yield
    finally:
        _forget(ours, before)
        sys.path_hooks.remove(hook)
        sys.path[:] = search
        sys.dont_write_bytecode = writes


def _forget(ours: Callable[[str], bool], before: set[str]) -> None:
    for name in sys.modules.keys() - before:
        if any(ours(place) for place in _places(sys.modules[name])):
            del sys.modules[name]
    for path in [path for path in sys.path_importer_cache if ours(path)]:
        del sys.path_importer_cache[path]
    linecache.clearcache()


def _places(module: ModuleType) -> Iterator[str]:
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        yield from (spec.origin,) if spec.has_location and spec.origin else ()
        yield from spec.submodule_search_locations or ()


def _is_ours(job: Job, path: str) -> bool:
    """Whether a path belongs to the project, and not to an environment inside its tree."""
    if "site-packages" in path or path.startswith(sys.prefix + os.sep):
        return False
    return any(path == root or path.startswith(root + os.sep) for root in job.python_path)
