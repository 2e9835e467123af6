"""One of many processes that build the same keys: `stress_worker.py SETTINGS NUMBER KEYS LOG`.

"Compiles" by drawing random bytes, so that two compiles of one key can be told apart, and appends
a line to LOG for each.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable

import msgspec

from max_build.key import digest
from max_build.record import Blob, Record
from max_build.store import Cache, CacheSettings, Hit, open_cache
from max_build.testing.store import example

Files = dict[str, bytes]


def drawn(name: str, size: int, common: bytes = b"") -> tuple[Record, Files]:
    """A compile's result, no two alike: the key and `size` random bytes, and what others share."""
    marked = example(name, b"placeholder")
    blobs = [marked.key.encode() + os.urandom(size), *([common] if common else [])]
    named = tuple(
        Blob(role=role, digest=digest(data), size=len(data))
        for role, data in zip(("mef", "ir"), blobs, strict=False)
    )
    files = {blob.digest: data for blob, data in zip(named, blobs, strict=True)}
    return msgspec.structs.replace(marked, blobs=named), files


def obtain(cache: Cache, name: str, compile_: Callable[[], tuple[Record, Files]]) -> Hit:
    """Look up, and compile what misses, as a build does; counted as one lookup."""
    key = example(name, b"").key
    found = cache.lookup(key, count_miss=False)
    if isinstance(found, Hit):
        return found
    with cache.single_flight(key) as waited:
        if waited:
            found = cache.lookup(key)
            if isinstance(found, Hit):
                return found
        else:
            cache.stats.miss(found.reason)
        record, files = compile_()
        cache.publish(record, files)
    return Hit(record, "compiled")


def run(settings: CacheSettings, number: int, keys: int, log_file: str | os.PathLike) -> None:
    log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    names = [f"all{n}" for n in range(keys // 2)] + [f"own{number}-{n}" for n in range(keys // 2)]
    random.shuffle(names)

    def compile_(name: str) -> tuple[Record, Files]:
        os.write(log, f"{name}\n".encode())
        return drawn(name, random.randrange(200, 8000))

    with open_cache(settings) as cache:
        for name in names:
            found = obtain(cache, name, lambda name=name: compile_(name))
            assert found.record.unit == name
            data = cache.path(found.record.blobs[0]).read_bytes()
            assert data.startswith(found.record.key.encode())
        assert cache.stats.hits.total() + cache.stats.misses.total() == len(names)
        assert not cache.warnings, cache.warnings
        assert not cache.stats.faults, cache.stats.faults


if __name__ == "__main__":
    run(
        msgspec.json.decode(sys.argv[1], type=CacheSettings),
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
    )
