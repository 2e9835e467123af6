"""Settings → tiers: which directory, which remote, and what to do where one is unusable."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from max_build.errors import ConfigError
from max_build.store.cache import Cache
from max_build.store.directory import DirectoryStore
from max_build.store.index import Memo
from max_build.store.journal import Journal
from max_build.store.local import Local
from max_build.store.settings import CacheSettings
from max_build.store.tiers import Tier
from max_build.store.trust import Signer, Verifier, read_signer

__all__ = ["default_root", "open_cache"]


def open_cache(settings: CacheSettings) -> Cache:
    """Open the tiers that `settings` name.

    What is unusable is left out, or stood in for, with a line in `warnings` of the result. No
    directory is scanned and no server is asked before the first lookup.

    Raises
    ------
    ConfigError
        If a public key or the remote's URL is not of the right form.
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
    return ()


def default_root(environ: dict[str, str] | os._Environ[str] = os.environ) -> Path:
    """Where the local cache lies if nobody says: XDG, HOME, or a private folder in /tmp."""
    for base in (environ.get("XDG_CACHE_HOME", ""), _below(environ.get("HOME", ""), ".cache")):
        if os.path.isabs(base):
            return Path(base) / "max-build"
    return _fallback_root()


def _below(home: str, name: str) -> str:
    return f"{home}/{name}" if home else ""


def _fallback_root() -> Path:
    # By number: a user without an entry in passwd has no name, and needs none.
    return Path(tempfile.gettempdir()) / f"max-build-{os.getuid()}"


def _local_store(settings: CacheSettings, journal: Journal) -> DirectoryStore | None:
    wanted = Path(settings.dir).expanduser().absolute() if settings.dir else default_root()
    fallback = _fallback_root()
    for root in (wanted, fallback) if wanted != fallback else (wanted,):
        problem = _prepare(root)
        if not problem:
            store = DirectoryStore(root, writable=os.access(root, os.W_OK | os.X_OK))
            if not store.writable:
                journal.warn(f"cache directory `{root}` is read-only: nothing new is kept")
            store.tag()
            return store
        journal.warn(f"cache directory `{root}` is not used: {problem}")
    return None


def _prepare(root: Path) -> str:
    """Make `root` if it is not there; why it cannot be used, or an empty string."""
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
        info = root.stat()
        linked = root.parent.resolve(strict=True)
    except OSError as error:
        return error.strerror or str(error)
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
        return read_signer(Path(settings.signing_key).expanduser())
    except ConfigError as error:
        journal.warn(f"records are not signed: {error.message}")
        return None
