"""Settings → tiers: which directory, which remote, and what to do where one is unusable."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from max_build.errors import ConfigError, StoreError
from max_build.store.base import Store
from max_build.store.cache import Cache
from max_build.store.directory import DirectoryStore
from max_build.store.index import Memo
from max_build.store.journal import Journal
from max_build.store.lanes import GivenUp, Lanes
from max_build.store.local import Local
from max_build.store.settings import CacheSettings, Trust, remote_fault
from max_build.store.tiers import Tier
from max_build.store.trust import Signer, Verifier, read_signer

__all__ = ["default_root", "open_cache"]

_EXAMPLES = "e.g. `s3://team/max-build` or `https://cache.team`"
_TEAMS = stat.S_ISGID | stat.S_IWGRP


def open_cache(settings: CacheSettings) -> Cache:
    """Open the tiers that `settings` name.

    What is unusable is left out, or stood in for, with a line in `warnings` of the result. No
    directory is scanned and no server is asked before the first lookup.

    Raises
    ------
    ConfigError
        If a public key, a path, the remote's URL or its token is not of the right form.
    """
    journal = Journal()
    store = _local_store(settings, journal)
    memo = Memo(store.root / "index" if store is not None else None)
    return Cache(
        settings,
        Local(store, memo, journal.note),
        _outer(settings, journal),
        memo=memo,
        journal=journal,
        verifier=Verifier(settings.public_keys),
        signer=_signer(settings, journal),
    )


def _outer(settings: CacheSettings, journal: Journal) -> Sequence[Tier]:
    found: list[tuple[Store, Trust]] = []
    if settings.shared:
        writable = settings.shared_mode == "read-write"
        store = _team_directory(
            settings.shared, "shared", settings, settings.shared_trust, journal, writable=writable
        )
        if store is not None:
            found.append((store, settings.shared_trust))
    if settings.remote:
        remote = _remote(settings, journal)
        if remote is not None:
            found.append((remote, settings.remote_trust))
    return [
        Tier(
            store,
            trust,
            request_timeout=settings.request_timeout,
            budget=settings.budget,
            note=journal.note,
        )
        for store, trust in found
    ]


def _remote(settings: CacheSettings, journal: Journal) -> Store | None:
    """The store behind `settings.remote`; its library is imported here and nowhere nearer."""
    url = settings.remote
    writable = settings.remote_mode == "read-write"
    if fault := remote_fault(url):
        message = f"remote cache URL {fault}"
        raise ConfigError(message, hint=_EXAMPLES)
    scheme = url.partition("://")[0]
    if scheme == "file":
        path = unquote(urlsplit(url).path)
        return _team_directory(
            path, "remote", settings, settings.remote_trust, journal, writable=writable
        )
    try:
        if scheme in {"http", "https"}:
            from max_build.store.http import HttpStore

            return HttpStore(url, settings, writable=writable)
        from max_build.store.objects import ObjectStore

        return ObjectStore(url, settings, writable=writable)
    except ImportError as error:
        extra = "http" if scheme in {"http", "https"} else "s3"
        journal.warn(
            f"remote cache is left out: `{error.name}` is not installed "
            f"(`pip install 'max-build[{extra}]'`)"
        )
    except ConfigError as error:  # its credentials, and not its form
        journal.warn(f"remote cache is left out: {error.message}")
    return None


def _team_directory(
    name: str,
    label: str,
    settings: CacheSettings,
    trust: Trust,
    journal: Journal,
    *,
    writable: bool,
) -> DirectoryStore | None:
    root = _path(name)

    def look() -> tuple[str, DirectoryStore | None]:
        problem = _foreign(root, trust)
        if problem:
            return problem, None
        allowed = writable and os.access(root, os.W_OK | os.X_OK)
        store = DirectoryStore(root, label, writable=allowed, shared=True)
        store.tag()
        return "", store

    try:
        with contextlib.closing(Lanes()) as lanes:
            problem, store = lanes.call(look, settings.request_timeout)
    except GivenUp:
        problem, store = "its file system does not answer", None
    except StoreError as error:
        problem, store = error.message, None
    except OSError as error:
        problem, store = error.strerror or str(error), None
    if problem:
        journal.warn(f"{label} cache directory `{root}` is left out: {problem}")
    return store


def _path(name: str) -> Path:
    """The path that a setting names.

    Raises
    ------
    ConfigError
        If it begins with the home directory of a user who has none.
    """
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:
        message = f"nobody has the home directory of `{name}`"
        raise ConfigError(message, hint="name the path from its root") from None


def _foreign(root: Path, trust: Trust) -> str:
    """Why a team's directory cannot be trusted, or an empty string.

    Whoever may write to it may make us run what they like, unless signatures are required.
    """
    try:
        info = root.stat()
    except FileNotFoundError:
        return "it does not exist (`install -d -m 2775 -g TEAM` makes it)"
    if not stat.S_ISDIR(info.st_mode):
        return "it is not a directory"
    if trust == "require":
        return ""
    if info.st_mode & stat.S_IWOTH:
        return "everybody may write to it, and its trust is not `require`"
    groups = {os.getegid(), *os.getgroups()}
    if info.st_uid not in {0, os.geteuid()} and info.st_gid not in groups:
        return f"it belongs to user {info.st_uid} and no group of ours; its trust is not `require`"
    return ""


def default_root() -> Path:
    """Where the local cache lies if nobody says: XDG, HOME, or a private folder in /tmp."""
    home = os.environ.get("HOME")
    for base in (os.environ.get("XDG_CACHE_HOME", ""), f"{home}/.cache" if home else ""):
        if os.path.isabs(base):
            return Path(base) / "max-build"
    return _fallback_root()


def _fallback_root() -> Path:
    # By number: a user without an entry in passwd has no name, and needs none.
    return Path(tempfile.gettempdir()) / f"max-build-{os.getuid()}"


def _local_store(settings: CacheSettings, journal: Journal) -> DirectoryStore | None:
    wanted = _path(settings.dir) if settings.dir else default_root()
    fallback = _fallback_root()
    for root in (wanted, fallback) if wanted != fallback else (wanted,):
        try:
            problem = _prepare(root)
            if not problem:
                store = DirectoryStore(root, writable=os.access(root, os.W_OK | os.X_OK))
                if not store.writable:
                    journal.warn(f"cache directory `{root}` is read-only: nothing new is kept")
                elif _TEAMS & ~root.stat().st_mode == 0:
                    journal.warn(
                        f"cache directory `{root}` is made for a team: set it as `shared`, and a "
                        "directory of your own as `dir`"
                    )
                store.tag()
                return store
        except OSError as error:
            problem = error.strerror or str(error)
        journal.warn(f"cache directory `{root}` is not used: {problem}")
    return None


def _prepare(root: Path) -> str:
    """Make `root` if it is not there; why it cannot be used, or an empty string."""
    root.mkdir(0o700, parents=True, exist_ok=True)
    # In /tmp anybody could have made a link, to what is ours too.
    info = root.lstat() if root == _fallback_root() else root.stat()
    if stat.S_ISLNK(info.st_mode):
        return "it is a link"
    linked = root.parent.resolve(strict=True)
    if info.st_uid not in {0, os.geteuid()}:
        return f"it belongs to user {info.st_uid}"
    if info.st_mode & stat.S_IWOTH:
        return "everybody may write to it"
    for parent in (linked, *linked.parents):
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"everybody may replace what is in `{parent}`"
    if not os.access(root, os.R_OK | os.X_OK):
        return "it is not readable"
    return ""


def _signer(settings: CacheSettings, journal: Journal) -> Signer | None:
    if not settings.signing_key:
        return None
    try:
        return read_signer(_path(settings.signing_key))
    except ConfigError as error:
        journal.warn(f"records are not signed: {error.message}")
        return None
