"""The cache: tiers that hold what was compiled, and the one object the rest of max-build uses."""

from __future__ import annotations

from max_build.store.cache import Cache, Hit, Miss
from max_build.store.opening import open_cache
from max_build.store.settings import CacheSettings

__all__ = ["Cache", "CacheSettings", "Hit", "Miss", "open_cache"]
