"""Publish in a child process that is killed at its Nth system call, for N = 1, 2, …

Run as a program: `killed_publish.py FOLDER own|shared STEP`. Prints the number of system calls that
a publish makes. Follows ptrace(2) on x86-64 and aarch64: both only need stops, not registers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from max_build.errors import StoreError
from max_build.key import digest
from max_build.record import encode
from max_build.store import CacheSettings, Hit, Miss, open_cache
from max_build.store.base import Sink
from max_build.store.directory import DirectoryStore
from max_build.store.entry import seal
from max_build.testing.store import example

TRACEME, SYSCALL = 0, 24
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def killed_at(stop: int, action) -> bool:
    """Run `action` in a fork and kill it at its stop-th entry to or return from a system call."""
    child = os.fork()
    if child == 0:
        libc.ptrace(TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            action()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    for _ in range(stop):
        libc.ptrace(SYSCALL, child, None, None)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            return False
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def own(folder: Path, number: int, stop: int) -> bool:
    """One round in the developer's own directory; False if the publish was over by then."""
    data = b"%d " % number * 5000
    record = example(f"u{number}", data)
    cache = open_cache(CacheSettings(dir=str(folder)))
    killed = killed_at(stop, lambda: cache.publish(record, {digest(data): data}))
    cache.close()
    with open_cache(CacheSettings(dir=str(folder))) as after:
        found = after.lookup(record.key)
        assert isinstance(found, Hit) or found == Miss("absent"), found
        if isinstance(found, Miss):
            after.publish(record, {digest(data): data})
        assert isinstance(after.lookup(record.key), Hit)
        assert after.path(record.blobs[0]).read_bytes() == data
        assert after.warnings == [], after.warnings
    return killed


def shared(folder: Path, number: int, stop: int) -> bool:
    """The same in a team's directory, which is read by its bytes."""
    data = b"%d " % number * 5000
    record = example(f"u{number}", data)
    store = DirectoryStore(folder, "shared", shared=True)

    def publish() -> None:
        with open(__file__, "rb"):
            pass
        put(store, record, data)

    killed = killed_at(stop, publish)
    entry = store.get_entry(record.key)
    if entry is None:
        put(store, record, data)
    assert store.get_entry(record.key) == seal(encode(record))
    check(store, data)
    return killed


def put(store: DirectoryStore, record, data: bytes) -> None:
    import io

    store.put_blob(digest(data), io.BytesIO(data))
    store.put_entry(record.key, seal(encode(record)))


def check(store: DirectoryStore, data: bytes) -> None:
    import io

    file = io.BytesIO()
    try:
        assert store.get_blob(digest(data), Sink(file, len(data)))
    except StoreError as error:
        raise AssertionError(error.message) from error
    assert file.getvalue() == data


if __name__ == "__main__":
    round_ = {"own": own, "shared": shared}[sys.argv[2]]
    count = 1
    while round_(Path(sys.argv[1]), count, count):
        count += int(sys.argv[3])
    print(count)
