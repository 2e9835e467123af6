"""One compile of a key among machines that share a tier: a saving, never a promise."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from max_build.errors import StoreError
from max_build.store.base import Leases

__all__ = ["shared_lease"]

_FIRST_POLL = 0.1
_LAST_POLL = 1.0


@contextlib.contextmanager
def shared_lease(
    leases: Leases, key: str, *, expiry: float, limit: float, guard: Callable[..., object]
) -> Iterator[bool]:
    """Hold the lease of `key`, waiting up to `limit` seconds for another holder.

    A holder whose lease did not change for `expiry` seconds, by our own clock, is taken for dead.
    Where the tier fails, or the wait is over, the block runs without the lease.

    Parameters
    ----------
    leases
        The store.
    key, expiry, limit
        See above.
    guard
        Makes each call to the store, and raises StoreError where it failed.

    Yields
    ------
    bool
        Whether another holder was waited for.
    """
    # For a person who looks at the file; the random part is what makes it ours.
    owner = f"{socket.gethostname()} {os.getpid()} {os.urandom(8).hex()}".encode()
    waited = False
    held = False
    with contextlib.suppress(StoreError):
        waited, held = _wait(leases, key, owner, expiry, limit, guard)
    if not held:
        yield waited
        return
    over = threading.Event()
    beat = threading.Thread(
        target=_beat,
        args=(leases, key, owner, expiry / 3, over, guard),
        name="max-build-lease",
        daemon=True,
    )
    with contextlib.suppress(RuntimeError):  # no more threads: then others wait less for us
        beat.start()
    try:
        yield waited
    finally:
        over.set()
        if beat.ident is not None:
            beat.join()
        with contextlib.suppress(StoreError):
            guard(lambda: leases.drop_lease(key, owner))


def _wait(
    leases: Leases,
    key: str,
    owner: bytes,
    expiry: float,
    limit: float,
    guard: Callable[..., object],
) -> tuple[bool, bool]:
    """Whether another was waited for, and whether the lease is ours now."""
    if guard(lambda: leases.take_lease(key, owner)):
        return False, True
    start = changed = time.monotonic()
    seen: object = None
    pause = _FIRST_POLL
    while time.monotonic() - start < limit:
        mark = guard(lambda: leases.lease_mark(key))
        now = time.monotonic()
        if mark is None:
            break  # done: its result is there for everybody, none of them needs the lease
        if mark != seen:
            seen, changed = mark, now
        elif now - changed >= expiry:
            guard(lambda: leases.drop_lease(key, None))
            if guard(lambda: leases.take_lease(key, owner)):
                return True, True
        time.sleep(pause)
        pause = min(pause * 1.5, _LAST_POLL, expiry / 3)
    return True, False


def _beat(
    leases: Leases,
    key: str,
    owner: bytes,
    interval: float,
    over: threading.Event,
    guard: Callable[..., object],
) -> None:
    while not over.wait(interval):
        with contextlib.suppress(StoreError):
            guard(lambda: leases.renew_lease(key, owner))
