"""The cache under `max.engine.InferenceSession`: look up before a compile, publish after one.

What cannot be keyed (see `session_keys`) goes on to MAX as if we were not there, and so does
everything once anything of ours fails.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from max_build.compilers.max_graph import signature
from max_build.key import digest, key_of
from max_build.record import Blob, Record
from max_build.runtime.session_keys import (
    Held,
    Pass,
    Question,
    asked_for,
    changed,
    digests_of,
    note_environment,
    noting_sources,
    paths,
    sessions,
)
from max_build.runtime.transparent import HOST, PROJECT, VERBOSE

__all__ = ["counts", "patch"]

counts: Counter[str] = Counter()
"""What this process did: `cached`, `compiled`, and `passed: <why>` for what was left to MAX."""

_IR_LIMIT = 4 << 20


@dataclass(slots=True)
class _Asked:
    """A compile that was looked up, and what its record will say."""

    question: Question
    name: str = ""
    started: float = 0.0
    signature: dict[str, Any] = field(default_factory=dict)


_lock = threading.RLock()


def patch() -> None:
    """Put the cache under the sessions of this process, unless this MAX is not one we know."""
    from max import driver, engine
    from max.engine import api
    from max.graph import graph as graphs

    problem = _unknown(api, graphs)
    if problem:
        print(
            f"max-build: MAX {engine.__version__} is not known to `max-build run` ({problem}); "
            "its graphs are not cached",
            file=sys.stderr,
        )
        return
    if host := os.environ.get(HOST):
        driver.set_virtual_cpu_target(host)
    note_environment()
    for module in (graphs, api):
        build = module._build_mojo_source_package
        module._build_mojo_source_package = functools.partial(noting_sources, build)
    session = api.InferenceSession
    session.__init__ = _holding(session.__init__)
    session._set_mojo_define = _defining(session._set_mojo_define)
    session.compile_async = _cached(session.compile_async)
    session.compile = _publishing(session.compile)
    session.init_all = _publishing_late(session.init_all)
    if os.environ.get(VERBOSE):
        atexit.register(_tell)


def _unknown(api: Any, graphs: Any) -> str:
    """What of MAX is not as it was when this was written; empty if all is."""
    try:
        session, compiled = api.InferenceSession, api.CompiledModel
        for function, names in (
            (session.compile_async, ["self", "model", "custom_extensions", "tile_based_fusion"]),
            (session.compile, ["self", "model", "custom_extensions", "tile_based_fusion"]),
            (session.init_all, ["self", "compiled", "weights_registry"]),
            (session._set_mojo_define, ["self", "key", "value"]),
            (compiled.__init__, ["self", "compiled", "expected_weights"]),
            (compiled.export_mef, ["self", "path"]),
        ):
            if list(inspect.signature(function).parameters) != names:
                return f"`{function.__qualname__}` takes other arguments"
        _ = api._InferenceSession._wrap_compiled, api._read, api.Graph, api.Module
        _ = session.debug, graphs._build_mojo_source_package, api._build_mojo_source_package
    except AttributeError as error:
        return str(error)
    return ""


# --- what a session holds


def _holding(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        bound = inspect.signature(original).bind(self, *arguments, **options).arguments
        sessions[self] = Held(
            extensions=digests_of(paths(bound.get("custom_extensions"))),
            threads=str(bound.get("num_threads") or 0),
        )
        original(self, *arguments, **options)

    return init


def _defining(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_define(self: Any, key: str, value: Any) -> None:
        original(self, key, value)
        if self in sessions:
            sessions[self].defines[key] = value

    return set_define


# --- around a compile


def _cached(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_async(
        self: Any, model: Any, *, custom_extensions: Any = None, tile_based_fusion: bool = False
    ) -> Any:
        options = {
            "custom_extensions": custom_extensions,
            "tile_based_fusion": tile_based_fusion,
        }
        asked: _Asked | None = None
        try:
            asked = _Asked(asked_for(self, model, custom_extensions, tile_based_fusion))
            if (found := _hit(self, model, asked)) is not None:
                counts["cached"] += 1
                return found
            _describe(asked, model)
        except Pass as reason:
            counts[f"passed: {reason}"] += 1
        except Exception as error:  # noqa: BLE001 - see the module
            counts[f"passed: {type(error).__name__}: {error}"] += 1
            asked = None
        if isinstance(model, str | os.PathLike):
            return original(self, model, **options)
        _mark(model)
        compiled = original(self, model, **options)
        if asked is not None:
            counts["compiled"] += 1
            compiled._max_build_asked = asked
        return compiled

    return compile_async


def _publishing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_(self: Any, model: Any, **options: Any) -> Any:
        compiled = original(self, model, **options)
        _publish(compiled)
        return compiled

    return compile_


def _publishing_late(original: Callable[..., Any]) -> Callable[..., Any]:
    """A compile that nobody waited for is published when somebody needs it."""

    @functools.wraps(original)
    def init_all(self: Any, compiled: Any, **options: Any) -> Any:
        _publish(compiled)
        return original(self, compiled, **options)

    return init_all


def _mark(model: Any) -> None:
    with contextlib.suppress(AttributeError, TypeError):
        model._max_build_compiled = True


def _describe(asked: _Asked, model: Any) -> None:
    """Note what a record says of a graph, before the compile changes it."""
    from max.engine import api

    module = model.module if isinstance(model, api.Graph) else model
    asked.name = "+".join(module.top_level_graph_names())
    asked.started = time.monotonic()
    if isinstance(model, api.Graph):
        with contextlib.suppress(Exception):  # MAX has values that a record knows no words for
            asked.signature = signature(model)._asdict()


def _hit(session: Any, model: Any, asked: _Asked) -> Any:
    """A compiled model as `compile_async` returns it, from the cache; None where it is not."""
    from max.engine import api

    from max_build.store import Hit

    found = _cache().lookup(key_of(asked.question.components))
    if not isinstance(found, Hit):
        return None
    blob = found.record.blob("mef")
    if blob is None:
        return None
    artifact = api._read(str(_cache().path(blob)))
    weights = getattr(model, "_weights", None)
    expected = None
    if isinstance(model, api.Graph) and weights is not None:
        expected = {name: weight.value.device for name, weight in weights.items()}
    compiled = api.CompiledModel(
        compiled=session._impl._wrap_compiled(artifact), expected_weights=expected
    )
    module = model.module if isinstance(model, api.Graph) else model
    compiled._graph_names = tuple(module.top_level_graph_names())
    return compiled


def _publish(compiled: Any) -> None:
    """Export and store what was compiled for a question that the cache had no answer to."""
    asked = compiled.__dict__.pop("_max_build_asked", None)
    if asked is None:
        return
    try:
        with tempfile.TemporaryDirectory(prefix="max-build-") as folder:
            path = Path(folder) / "graph.mef"
            compiled.export_mef(path)
            if changed(asked.question.libraries):
                counts["not published: a kernel library changed while it was compiled"] += 1
                return
            data = path.read_bytes()
            blobs = [Blob(role="mef", digest=digest(data), size=len(data))]
            files: dict[str, Path | bytes] = {blobs[0].digest: path}
            if len(text := asked.question.text) <= _IR_LIMIT:
                blobs.append(Blob(role="ir", digest=digest(text), size=len(text)))
                files[blobs[1].digest] = text
            record = Record(
                key=key_of(asked.question.components),
                unit=f"run/{asked.name}",
                components=asked.question.components,
                blobs=tuple(blobs),
                seconds=round(time.monotonic() - asked.started, 3),
                **asked.signature,
            )
            _cache().publish(record, files)
    except Exception as error:  # noqa: BLE001 - see the module
        counts[f"not published: {type(error).__name__}: {error}"] += 1


_opened: dict[int, Any] = {}


def _cache() -> Any:
    """The cache of this process: a fork opens its own."""
    with _lock:
        if os.getpid() not in _opened:
            from max_build.config import cache_settings, load_settings
            from max_build.store import open_cache

            project = os.environ.get(PROJECT)
            settings = load_settings(Path(project)).cache if project else cache_settings()
            _opened[os.getpid()] = cache = open_cache(settings)
            atexit.register(_close, cache, os.getpid())
        return _opened[os.getpid()]


def _close(cache: Any, pid: int) -> None:
    if os.getpid() == pid:
        cache.close()


def _tell() -> None:
    said = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"max-build: {said or 'no graph was compiled'}", file=sys.stderr)
