"""Can this machine use each tier, and if not, what would help: findings as data."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from max_build.errors import MaxBuildError, StoreError
from max_build.key import digest
from max_build.store.amounts import show_size
from max_build.store.base import Sink
from max_build.store.cache import Cache
from max_build.store.settings import CacheSettings
from max_build.store.tiers import Tier
from max_build.store.trust import Verifier, read_signer

__all__ = ["Check", "examine"]

Verdict = Literal["ok", "note", "problem"]

_FIXES = {
    "timeout": "is it reachable from here? `request-timeout` says how long to wait",
    "refused": "is the server up, and the address right?",
    "permission": "check rights and credentials: URL, `MAX_BUILD_REMOTE_TOKEN`, netrc, "
    "`remote-cert`, `AWS_*`, `GOOGLE_*`, `AZURE_*`",
    "read-only": 'ask for write access, or set `remote-mode = "read"`',
    "full": "free some space: `max-build gc`",
    "server": "look at the server's log",
}
_LITTLE = 1 << 30


class Check(msgspec.Struct, frozen=True):
    """One thing that was tried: where, what came out, and what to do about it."""

    place: str
    verdict: Verdict
    text: str
    fix: str = ""


def examine(cache: Cache) -> Iterator[Check]:
    """Try every tier of a cache that was just opened, in its own order."""
    for warning in cache.warnings:
        yield Check("settings", "problem", warning)
    yield from _local(cache)
    for tier in cache.outer:
        yield from _tier(tier)
    if not cache.outer:
        yield Check("outer", "note", "no shared directory or remote: nothing is shared")
    yield from _trust(cache.settings)


def _local(cache: Cache) -> Iterator[Check]:
    store = cache.local.store
    if store is None:
        text = "no directory can be used; results last as long as the process"
        yield Check("local", "problem", text, "set `MAX_BUILD_CACHE_DIR` to a directory of yours")
        return
    mode = "read and written" if store.writable else "only read"
    yield Check("local", "ok", f"`{store.root}` can be {mode}")
    free = shutil.disk_usage(store.root).free
    verdict: Verdict = "ok" if free > _LITTLE else "problem"
    yield Check(
        "local", verdict, f"{show_size(free)} free", "" if verdict == "ok" else _FIXES["full"]
    )
    if store.writable:
        cache.memo.set("doctor", "probe", b"1")
        if cache.memo.get("doctor", "probe") != b"1":
            text = "the index does not work: lookups are right, but slower"
            fix = f"remove `{store.root / 'index'}`; sqlite needs a file system with locks"
            yield Check("local", "note", text, fix)


def _tier(tier: Tier) -> Iterator[Check]:
    name = digest(b"max-build doctor")
    started = time.monotonic()
    problem = _try(lambda: tier.entry(name))
    took = (time.monotonic() - started) * 1000
    if problem:
        yield _failed(tier, "cannot be read", problem)
        return
    yield Check(tier.label, "ok", f"answers in {took:.0f} ms")
    if not tier.writable:
        yield Check(tier.label, "ok", "is only read from this machine")
        return
    problem = _try(lambda: _round_trip(tier))
    if problem:
        yield _failed(tier, "cannot be written", problem)
        return
    yield Check(tier.label, "ok", "takes a blob and gives it back")
    if not tier.leases:
        text = "holds no leases: two machines may compile the same key at once"
        yield Check(tier.label, "note", text)
        return
    problem = _try(lambda: _lease(tier, name))
    if problem:
        yield _failed(tier, "cannot hold leases", problem)
    else:
        yield Check(tier.label, "ok", "holds leases: machines wait for each other's compile")


def _round_trip(tier: Tier) -> None:
    data = b"max-build doctor " + os.urandom(16).hex().encode()
    name = digest(data)
    tier.store.put_blob(name, io.BytesIO(data))
    file = io.BytesIO()
    sink = Sink(file, len(data))
    if not tier.store.get_blob(name, sink) or not sink.holds(name):
        message = "a blob that was written does not come back"
        raise StoreError(message, kind="corrupt")
    with contextlib.suppress(StoreError):  # not everybody may; it is small
        tier.store.delete("cas", name)


def _lease(tier: Tier, name: str) -> None:
    with tier.lease(name, expiry=1.0, limit=2.0):
        pass


def _try(action: Callable[[], object]) -> StoreError | None:
    try:
        action()
    except StoreError as error:
        return error
    return None


def _failed(tier: Tier, what: str, error: StoreError) -> Check:
    fix = error.hint or _FIXES.get(error.kind, "")
    return Check(tier.label, "problem", f"{what}: {error.message}", fix)


def _trust(settings: CacheSettings) -> Iterator[Check]:
    demanded = "require" in {settings.shared_trust, settings.remote_trust}
    if not (demanded or settings.signing_key or settings.public_keys):
        if settings.remote:
            text = "whoever may write to the remote may run code here"
            fix = 'sign records: `max-build key new`, then `remote-trust = "require"`'
            yield Check("trust", "note", text, fix)
        return
    if importlib.util.find_spec("cryptography") is None:
        yield Check(
            "trust", "problem", "`cryptography` is not installed", "install `max-build[trust]`"
        )
        return
    if demanded and not settings.public_keys:
        text = "signatures are required, and no `public-keys` are set: everything is a miss"
        yield Check("trust", "problem", text, "add the line that `max-build key new` printed")
    try:
        Verifier(settings.public_keys)
        if settings.signing_key:
            read_signer(Path(os.path.expanduser(settings.signing_key)))
            yield Check("trust", "ok", f"what is published is signed with `{settings.signing_key}`")
    except MaxBuildError as error:
        yield Check("trust", "problem", error.message, error.hint)
