"""What a compile of a session is keyed by, or why it cannot be keyed.

The key is made as for a declared graph, of the graph's canonical text and the compiler, plus what
the session holds.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from max_build import distributions
from max_build.compilers.max_graph import (
    DISTRIBUTIONS,
    MaxCompiler,
    canonical_options,
    foreign_parts,
)
from max_build.compilers.mojo_libraries import Libraries, build_library, tree_digest
from max_build.key import Components, digest
from max_build.runtime.host import processor

__all__ = [
    "Held",
    "Pass",
    "asked_for",
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
    extensions: list[Path] = field(default_factory=list)
    threads: str = "0"


sessions: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()
"""The sessions that were made since the cache was put under them."""

_built: dict[str, str] = {}
_lock = threading.Lock()
_imported_with: dict[str, str] = {}


def note_environment() -> None:
    """Note what MAX took from the environment when it was imported."""
    _imported_with.update(MaxCompiler().ambient(os.environ))


def noting_sources(build: Callable[[Path], Path], path: Path) -> Path:
    """Build a Mojo library and note what it was built from, if that stood still meanwhile."""
    compiled, sources = build_library(build, Path(path))
    with _lock:
        if sources:
            _built[str(compiled)] = sources
        else:
            _built.pop(str(compiled), None)
    return compiled


def paths(extensions: Any) -> list[Path]:
    """The custom extensions that MAX was given, in whatever form."""
    if extensions is None:
        return []
    if isinstance(extensions, str | os.PathLike):
        return [Path(extensions)]
    return [Path(one) for one in extensions]


def asked_for(session: Any, model: Any, extensions: Any, tiled: bool) -> tuple[Components, bytes]:
    """The components of a compile, and the graph's canonical text.

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
    with _lock:
        libraries = Libraries(seen=dict(_built))
    named = set(libraries.seen)
    text = libraries.without_paths(module.mlir_module.asm()).encode()
    if isinstance(model, api.Graph):
        libraries = _only_named(libraries, model.kernel_libraries_paths, named)
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
            **_extensions("session", held.extensions),
            **_extensions("compile", paths(extensions)),
        },
        environment=environment,
    )
    return components, text


def _only_named(libraries: Libraries, paths: Any, built: set[str]) -> Libraries:
    """The digests of a graph's libraries, and of no other that this process built."""
    seen = {}
    for path in map(str, paths):
        if path not in built and not os.path.isfile(path):
            _pass(f"kernel library `{os.path.basename(path)}` cannot be read")
        seen[path] = libraries.digest_of(path)
    return Libraries(seen=seen)


def _extensions(label: str, paths: list[Path]) -> dict[str, str]:
    found = {}
    for n, path in enumerate(paths, 1):
        if not path.exists():
            _pass(f"custom extension `{path.name}` cannot be read")
        found[f"{label}.extension.{n}"] = tree_digest(path)
    return found


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
