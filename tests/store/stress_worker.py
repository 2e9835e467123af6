"""One of many processes that build the same keys: `stress_worker.py SETTINGS NUMBER KEYS LOG`.

"Compiles" by drawing random bytes, so that two compiles of one key can be told apart, and appends
a line to LOG for each.
"""

from __future__ import annotations

import os
import random
import sys

import msgspec

from max_build.key import digest
from max_build.record import Blob, Record
from max_build.store import CacheSettings, Hit, open_cache
from max_build.testing.store import example


def compile_(name: str, log: int) -> tuple[Record, bytes]:
    marked = example(name, b"placeholder")
    data = marked.key.encode() + os.urandom(random.randrange(200, 8000))
    os.write(log, f"{name}\n".encode())
    blob = Blob(role="mef", digest=digest(data), size=len(data))
    return msgspec.structs.replace(marked, blobs=(blob,)), data


def run(settings: CacheSettings, number: int, keys: int, log_file: str | os.PathLike) -> None:
    log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    names = [f"all{n}" for n in range(keys // 2)] + [f"own{number}-{n}" for n in range(keys // 2)]
    random.shuffle(names)
    with open_cache(settings) as cache:
        for name in names:
            key = example(name, b"").key
            found = cache.lookup(key)
            if not isinstance(found, Hit):
                with cache.single_flight(key) as waited:
                    found = cache.lookup(key) if waited else found
                    if not isinstance(found, Hit):
                        record, data = compile_(name, log)
                        cache.publish(record, {digest(data): data})
                        found = Hit(record, "compiled")
            assert found.record.unit == name
            data = cache.path(found.record.blobs[0]).read_bytes()
            assert data.startswith(key.encode())
        assert not cache.warnings, cache.warnings
        assert not cache.stats.faults, cache.stats.faults


if __name__ == "__main__":
    run(
        msgspec.json.decode(sys.argv[1], type=CacheSettings),
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
    )
