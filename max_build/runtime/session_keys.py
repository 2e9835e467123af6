"""What a compile of a session is keyed by, or why it cannot be keyed.

The key is made as for a declared graph, of the graph's canonical text and the compiler, plus what
the session holds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from max_build import distributions
from max_build.compilers.max_graph import (
    DISTRIBUTIONS,
    MaxCompiler,
    canonical_options,
    foreign_parts,
)
from max_build.compilers.mojo_imports import UnkeyableError, beside
from max_build.compilers.mojo_libraries import (
    Libraries,
    build_library,
    library_digest,
    tree_digest,
)
from max_build.key import Components, digest
from max_build.runtime.host import processor

__all__ = [
    "Held",
    "Pass",
    "Question",
    "asked_for",
    "changed",
    "digests_of",
    "note_environment",
    "noting_sources",
    "paths",
    "sessions",
]

# Settings that make a compile write files, or stop it: they want it to happen.
_EFFECTS = ("ir_output_dir", "pre_jit")


class Pass(Exception):  # noqa: N818 - no error: MAX compiles as it would
    """Why a graph is left to MAX."""


def _pass(reason: str) -> NoReturn:
    raise Pass(reason)


@dataclass(slots=True)
class Held:
    """What a session was given that reaches its compiles."""

    defines: dict[str, Any] = field(default_factory=dict)
    extensions: dict[Path, str] = field(default_factory=dict)
    threads: str = "0"


sessions: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()
"""The sessions that were made since the cache was put under them."""


class _Built(NamedTuple):
    """A library that MAX compiled, to a file that all processes of a user share."""

    source: Path
    sources: str
    file: str


class Question(NamedTuple):
    """A compile: what it is keyed by, the graph's canonical text, the libraries as they were."""

    components: Components
    text: bytes
    libraries: dict[Path, str]


_built: dict[str, _Built] = {}
_lock = threading.Lock()
_imported_with: dict[str, str] = {}


def note_environment() -> None:
    """Note what MAX took from the environment when it was imported."""
    _imported_with.update(MaxCompiler().ambient(os.environ))


def noting_sources(build: Callable[[Path], Path], path: Path) -> Path:
    """Build a Mojo library and note what it was built from, if that stood still meanwhile."""
    try:
        compiled, sources = build_library(build, Path(path))
    except (OSError, UnkeyableError):
        compiled, sources = build(Path(path)), ""
    with _lock:
        if sources:
            _built[str(compiled)] = _Built(Path(path).absolute(), sources, tree_digest(compiled))
        else:
            _built.pop(str(compiled), None)
    return compiled


def digests_of(paths: list[Path]) -> dict[Path, str]:
    """What custom extensions are before MAX loads them; empty for one that cannot be told."""
    found = dict.fromkeys(paths, "")
    for path in paths:
        with contextlib.suppress(OSError, UnkeyableError):
            found[path] = library_digest(path)
    return found


def _library(path: Path, *, loaded: bool = True) -> str:
    """Digest of a library by the path that MAX has of it: of its sources, where it has some.

    If it is loaded, the file that MAX compiled of the sources has to be that of these sources.
    """
    with _lock:
        built = _built.get(str(path))
        made = [one for one, by in _built.items() if by.source == path.absolute()]
    if not path.exists():
        _pass(f"kernel library `{path.name}` cannot be read")
    if built is not None:
        if tree_digest(path) != built.file:
            _pass(f"kernel library `{built.source.name}` was compiled anew meanwhile")
        return built.sources
    try:
        found = library_digest(path)
        alone = path.is_dir() or not beside(path)
    except UnkeyableError as error:
        _pass(str(error))
    if not alone:
        _pass(f"beside kernel library `{path.name}` are others, which MAX's own cache ignores")
    if loaded and path.is_dir() and [_library(Path(one)) for one in made] != [found]:
        _pass(f"kernel library `{path.name}` changed since MAX compiled it")
    return found


def changed(libraries: dict[Path, str]) -> bool:
    """Whether one of a question's libraries is not any more what it was."""
    try:
        return any(_library(path) != found for path, found in libraries.items())
    except Pass:
        return True


def paths(extensions: Any) -> list[Path]:
    """The custom extensions that MAX was given, in whatever form."""
    if extensions is None:
        return []
    if isinstance(extensions, str | os.PathLike):
        return [Path(extensions)]
    return [Path(one) for one in extensions]


def asked_for(session: Any, model: Any, extensions: Any, tiled: bool) -> Question:
    """What decides a compile.

    Raises
    ------
    Pass
        If it cannot be keyed.
    """
    from max.engine import api

    if isinstance(model, str | os.PathLike):
        _pass("it is compiled already")
    if not isinstance(model, api.Graph | api.Module):
        _pass("it is no graph")
    if session not in sessions:
        _pass("its session was made before `max-build run` could see it")
    if getattr(model, "_max_build_compiled", False):
        _pass("MAX has compiled this object before, which changes it")
    _refuse_effects(session)
    held = sessions[session]
    module = model.module if isinstance(model, api.Graph) else model
    libraries = _Libraries()
    text = libraries.without_paths(module.mlir_module.asm()).encode()
    if isinstance(model, api.Graph):
        for path in model.kernel_libraries_paths:
            libraries.digest_of(str(path))
    given = {path: _library(path, loaded=False) for path in paths(extensions)}
    if held.extensions != (now := {path: _library(path) for path in held.extensions}):
        one = next(path for path in now if held.extensions[path] != now[path])
        _pass(f"custom extension `{one.name}` changed since the session was made")
    environment = MaxCompiler().ambient(os.environ)
    if foreign := foreign_parts(os.environ):
        _pass(foreign)
    options = {
        "threads": held.threads,
        "devices": _devices(session),
        **canonical_options(session.debug, held.defines, tile_based_fusion=tiled),
    }
    if environment != _imported_with:
        options["imported-with"] = digest(repr(sorted(_imported_with.items())).encode())
    target, host, virtual = _machine(session)
    components = Components(
        compiler=distributions.identities(DISTRIBUTIONS),
        target=target,
        host=host,
        options={**options, **virtual},
        sources={"ir": digest(text)},
        dependencies={
            **libraries.digests(),
            **_labelled("session", held.extensions),
            **_labelled("compile", given),
        },
        environment=environment,
    )
    named = {Path(path): found for path, found in libraries.seen.items()}
    return Question(components, text, named | held.extensions | given)


class _Libraries(Libraries):
    """The libraries of a graph, whoever built it."""

    def digest_of(self, path: str) -> str:
        if path not in self.seen:
            self.seen[path] = _library(Path(path))
        return self.seen[path]


def _labelled(label: str, extensions: dict[Path, str]) -> dict[str, str]:
    return {f"{label}.extension.{n}": found for n, found in enumerate(extensions.values(), 1)}


def _refuse_effects(session: Any) -> None:
    for name in _EFFECTS:
        if getattr(session.debug, name, None):
            _pass(f"`InferenceSession.debug.{name}` is set")
    if any("DUMP" in name for name in sessions[session].defines):
        _pass("a dump of the code was asked for")


def _devices(session: Any) -> str:
    return ",".join(sorted(_device(one) for one in session.devices))


def _device(device: Any) -> str:
    if device.label == "cpu":
        return "cpu"
    return f"{device.label} {device.api} {device.architecture_name}"


def _machine(session: Any) -> tuple[str, str, dict[str, str]]:
    """Target, host baseline, and the virtual devices that stand in for real ones."""
    from max import driver

    host = driver.get_virtual_cpu_target()
    if not host:
        cpu = processor()
        if not cpu:
            _pass("what CPU this is cannot be told")
        host = f"this {cpu}"
    virtual: dict[str, str] = {}
    target = "cpu"
    if driver.is_virtual_device_mode():
        target = driver.get_virtual_device_target_arch() or "cpu"
        virtual["virtual"] = (
            f"{driver.get_virtual_device_api()} {driver.get_virtual_device_count()}"
        )
    else:
        for device in session.devices:
            if device.label != "cpu":
                target = device.architecture_name
    return target, host, virtual
