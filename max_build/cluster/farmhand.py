"""What a Dask worker of a farm does: build one unit for one target, and publish it.

Dask carries the `Task` and the `Answer` as JSON, and this module's name; the scheduler imports it
too. Everything else goes through the shared cache.
"""

from __future__ import annotations

import socket
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from max_build import compilers
from max_build.cluster.snapshot import unpack
from max_build.config import Settings, cache_settings
from max_build.errors import ConfigError, MaxBuildError, ToolchainError
from max_build.outcomes import State
from max_build.pipeline import build
from max_build.record import Blob
from max_build.store import Cache, CacheSettings, open_cache

__all__ = ["Answer", "Task", "check_cache", "compile_one", "describe", "version"]


class Task(msgspec.Struct, frozen=True):
    """Asks a Dask worker for one unit × target.

    `settings` has the one unit, and paths of Python's relative to the root; `sources` is the blob
    to unpack there.
    """

    version: str
    settings: Settings
    sources: Blob


class Answer(msgspec.Struct, frozen=True):
    """What a Dask worker says: how it went, on which host, under which key."""

    state: State
    host: str
    key: str = ""
    reason: str = ""
    seconds: float = 0.0
    error: str = ""
    hint: str = ""
    warnings: tuple[str, ...] = ()


def version() -> str:
    """The version of this max-build."""
    return metadata.version("max-build")


def check_cache(cache: Cache) -> None:
    """See that there is a tier to share with other machines, and that this one may write it.

    Raises
    ------
    ConfigError
        If not, with the setting that is missing.
    """
    settings = cache.settings
    if any(tier.writable for tier in cache.outer):
        return
    if not settings.shared and not settings.remote:
        message = "an executor needs a cache that this machine shares with the farm; there is none"
        hint = (
            "set `shared` (`MAX_BUILD_SHARED`) or `remote` (`MAX_BUILD_REMOTE`) in "
            "[tool.max-build.cache]"
        )
    elif not cache.outer:
        message = "an executor needs a cache that this machine shares with the farm"
        hint = "; ".join(cache.warnings)
    else:
        message = "an executor needs a shared cache that this machine may write; it may only read"
        hint = (
            'set `remote-mode = "read-write"` (`MAX_BUILD_REMOTE_MODE`), or `shared-mode`, in '
            "[tool.max-build.cache], and see that the place allows it"
        )
    raise ConfigError(message, hint=hint)


def describe() -> dict[str, Any]:
    """What the Dask worker that this runs on has: its max-build, and compilers that do not load."""
    missing = {}
    for name in compilers.names():
        try:
            compilers.get(name)
        except ToolchainError as error:
            missing[name] = error.message
    return {"version": version(), "missing": missing}


def compile_one(data: bytes) -> bytes:
    """Build one `Task` here and publish it; the `Answer` says how that went. Both are JSON."""
    host = _host()
    try:
        answer = _compile(msgspec.json.decode(data, type=Task), host)
    except MaxBuildError as error:
        answer = Answer("failed", host, error=error.message, hint=error.hint)
    except Exception as error:  # noqa: BLE001 - an answer is wanted, whatever went wrong
        answer = Answer("failed", host, error=f"unexpected {type(error).__name__}: {error}")
    return msgspec.json.encode(answer)


def _host() -> str:
    """Which machine this is, and which Dask worker on it."""
    try:
        from distributed import get_worker

        return f"{socket.gethostname()} ({get_worker().name})"
    except (ImportError, ValueError):  # no Dask worker called
        return socket.gethostname()


def _compile(task: Task, host: str) -> Answer:
    if task.version != version():
        message = f"has max-build {version()}, was asked by {task.version}"
        raise ConfigError(message)
    with open_cache(_own_cache(task.settings.cache)) as cache, _folder(cache) as root:
        check_cache(cache)
        unpack(cache.path(task.sources), Path(root))
        settings = msgspec.structs.replace(
            task.settings,
            root=root,
            python_path=tuple(str(Path(root, one)) for one in task.settings.python_path),
        )
        (outcome,) = build(settings, cache).outcomes
        if outcome.state == "cached" and outcome.tier == "local":
            cache.offer(outcome.key)  # what only this machine had
        error = outcome.error
        return Answer(
            outcome.state,
            host,
            key=outcome.key,
            reason=outcome.reason,
            seconds=outcome.record.seconds if outcome.record else 0.0,
            error=error.message if error else "",
            hint=error.hint if error else "",
            warnings=tuple(cache.warnings),
        )


def _folder(cache: Cache) -> tempfile.TemporaryDirectory[str]:
    """A folder for the sources, where gc finds it if this process is killed."""
    store = cache.local.store
    place = store.folder("tmp") if store is not None and store.writable else None
    return tempfile.TemporaryDirectory(prefix="farm-", dir=place, ignore_cleanup_errors=True)


def _own_cache(asked: CacheSettings) -> CacheSettings:
    """The tiers of whoever asked, as this machine reaches them: its own settings come first."""
    own = cache_settings()
    return msgspec.structs.replace(
        asked,
        dir=own.dir,
        shared=own.shared or asked.shared,
        remote=own.remote or asked.remote,
        remote_ca=own.remote_ca,
        remote_cert=own.remote_cert,
        remote_key=own.remote_key,
        signing_key=own.signing_key,
        max_size=own.max_size,
    )
