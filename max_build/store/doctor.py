"""Can this machine use each tier, and if not, what would help: findings as data."""

from __future__ import annotations

import contextlib
import hashlib
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
from max_build.store.directory import DirectoryStore
from max_build.store.settings import CacheSettings
from max_build.store.tiers import Tier
from max_build.store.trust import Verifier, read_signer

__all__ = ["Check", "examine", "specific"]

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
_FRAME = b"\x28\xb5\x2f\xfd"  # how a zstd frame begins
_UNTRUSTED = ("self-signed", "self signed", "local issuer", "UnknownIssuer")
_EXPECTS_TLS = ("gave status 400", "ProtocolError", "RemoteDisconnected")
_METADATA = "169.254.169.254"  # who is asked where nothing says who we are
_CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "~/.aws/credentials"),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "~/.config/gcloud/application_default_credentials.json",
    ),
}


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
        yield from _tier(tier, cache.settings)
    if not (cache.settings.shared or cache.settings.remote):
        yield Check("outer", "note", "no shared directory or remote: nothing is shared")
    yield from _trust(cache)


def _local(cache: Cache) -> Iterator[Check]:
    store = cache.local.store
    if store is None:
        text = "no directory can be used; results last as long as the process"
        yield Check("local", "problem", text, "set `MAX_BUILD_CACHE_DIR` to a directory of yours")
        return
    mode = "read and written" if store.writable else "only read"
    yield Check("local", "ok", f"`{store.root}` can be {mode}")
    if _holds_frames(store):
        text = "holds compressed blobs, as a team's directory does: they are no use here"
        yield Check("local", "problem", text, "set it as `shared`, and another one as `dir`")
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


def _holds_frames(store: DirectoryStore) -> bool:
    """Whether a blob is a zstd frame and not what its name says, by the first that is there."""
    with contextlib.suppress(StoreError, OSError):
        for item in store.list("cas"):
            with store.path("cas", item.name).open("rb") as file:
                if file.read(len(_FRAME)) != _FRAME:
                    return False
                file.seek(0)
                return hashlib.file_digest(file, "sha256").hexdigest() != item.name
    return False


def _tier(tier: Tier, settings: CacheSettings) -> Iterator[Check]:
    name = digest(b"max-build doctor")
    started = time.monotonic()
    problem = _try(lambda: tier.entry(name))
    took = (time.monotonic() - started) * 1000
    if problem:
        yield _failed(tier, "cannot be read", problem, settings)
        return
    yield Check(tier.label, "ok", f"answers in {took:.0f} ms")
    if not tier.writable:
        mode = settings.shared_mode if tier.label == "shared" else settings.remote_mode
        if mode == "read":
            yield Check(tier.label, "ok", "is only read from this machine")
        else:
            text = "is only read: you may not write to it"
            yield Check(tier.label, "note", text, "are you in its group? `id` says")
        return
    problem = _try(lambda: _round_trip(tier))
    if problem:
        yield _failed(tier, "cannot be written", problem, settings)
        return
    yield Check(tier.label, "ok", "takes a blob and gives it back")
    if not tier.leases:
        text = "holds no leases: two machines may compile the same key at once"
        yield Check(tier.label, "note", text)
        return
    problem = _try(lambda: _lease(tier, name))
    if problem:
        yield _failed(tier, "cannot hold leases", problem, settings)
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


def _failed(tier: Tier, what: str, error: StoreError, settings: CacheSettings) -> Check:
    url = settings.remote if tier.label == "remote" else ""
    fix = error.hint or specific(url, error.message) or _FIXES.get(error.kind, "")
    return Check(tier.label, "problem", f"{what}: {error.message}", fix)


def specific(url: str, message: str) -> str:
    """What mends a fault that its words or the settings give away."""
    if any(sign in message for sign in _UNTRUSTED):
        return "set `remote-ca` to the file of the authority that signed the server's certificate"
    if url.startswith("https:") and "WRONG_VERSION_NUMBER" in message:
        return "the server speaks no TLS at that port: another port, or `http://`?"
    if url.startswith("http:") and any(sign in message for sign in _EXPECTS_TLS):
        return "does the server speak TLS at that port? Then the URL begins with `https://`"
    variable, file = _CREDENTIALS.get(url[:2], ("", ""))
    unknown = (
        variable and variable not in os.environ and not os.path.exists(os.path.expanduser(file))
    )
    if unknown and (_METADATA in message or "did not answer" in message):
        return f"no credentials were found: set `{variable}`, or log in with the cloud's own tools"
    return ""


def _trust(cache: Cache) -> Iterator[Check]:
    settings = cache.settings
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
            signer = read_signer(Path(os.path.expanduser(settings.signing_key)))
            if settings.public_keys and signer.public not in settings.public_keys:
                text = f"`{settings.signing_key}` is no key of `public-keys`: all is a miss"
                yield Check("trust", "problem", text, f"add `{signer.public}` to them")
            else:
                text = f"what is published is signed with `{settings.signing_key}`"
                yield Check("trust", "ok", text)
        elif labels := [
            one.label for one in cache.outer if one.store.writable and one.trust == "require"
        ]:
            tiers = " and ".join(labels)
            text = f"nothing is signed here, and what is unsigned in the {tiers} cache is a miss"
            mode = f"MAX_BUILD_{labels[0].upper()}_MODE"
            yield Check("trust", "problem", text, f"set `MAX_BUILD_SIGNING_KEY`, or `{mode}=read`")
    except MaxBuildError as error:
        yield Check("trust", "problem", error.message, error.hint)
