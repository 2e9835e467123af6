"""Which store a command means by the name of a tier."""

from __future__ import annotations

from max_build.errors import StoreError
from max_build.store import Cache
from max_build.store.base import Store
from max_build.store.directory import DirectoryStore

__all__ = ["directory_of", "store_of"]


def store_of(cache: Cache, tier: str) -> Store:
    """The store of a tier.

    Raises
    ------
    StoreError
        If the project has none, or it is not usable.
    """
    if tier == "local" and cache.local.store is not None:
        return cache.local.store
    for one in cache.outer:
        if one.label == tier:
            return one.store
    message = f"there is no usable {tier} cache"
    raise StoreError(message, hint="`max-build doctor` says why")


def directory_of(cache: Cache, tier: str) -> DirectoryStore:
    """The same, where only a directory will do."""
    store = store_of(cache, tier)
    if not isinstance(store, DirectoryStore):
        message = f"the {tier} cache is not a directory"
        raise StoreError(
            message, hint="let the bucket's or the server's own rules remove old objects"
        )
    return store
