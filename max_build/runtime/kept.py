"""Caches that outlive their use, since files that were given out lie in their scratch space."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from max_build.store import Cache, CacheSettings

__all__ = ["opened"]

_kept: dict[CacheSettings, Cache] = {}


@contextlib.contextmanager
def opened(settings: CacheSettings) -> Iterator[Cache]:
    """The cache for the length of the block; `path` of it gives files that stay.

    Where the local directory takes nothing, they are in scratch space, which closing removes. The
    cache is then used again for the same settings, and closed when the process ends.
    """
    from max_build.store import open_cache

    cache = _kept.get(settings)
    if cache is not None:
        yield cache
        return
    cache = open_cache(settings)
    try:
        yield cache
    finally:
        if cache.local.uses_scratch:
            _kept[settings] = cache
            atexit.register(cache.close)  # and another thread's, which is not found again
        else:
            cache.close()
