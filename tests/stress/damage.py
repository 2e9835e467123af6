"""Damage done on purpose, of the kinds that disks and people do, and told of in the log."""

from __future__ import annotations

import contextlib
import io
import os
from random import Random

from actor import FAMILIES, common, names
from events import Damaged, Log, now
from ground import OUTER, Ground

from max_build.errors import StoreError
from max_build.key import digest
from max_build.store.base import Kind
from max_build.store.directory import DirectoryStore

COMMON = frozenset(digest(common(name)) for name in names(FAMILIES))


def damage(ground: Ground, chance: Random, log: Log) -> None:
    """Damage something somewhere, if there is anything."""
    machine = chance.randrange(len(ground.machines))
    store = ground.place(machine)
    kind: Kind = chance.choice(["ac", "cas", "cas"])
    items = sorted(item.name for item in store.list(kind))
    if not items:
        return
    name = chance.choice(items)
    if ground.outer and kind == "cas" and name not in COMMON and chance.random() < 0.3:
        _outside(ground, name, chance, log)
        return
    how = chance.choice([_flip, _flip, _cut, _remove])
    since = now()
    # A gc was quicker, or another file took the place.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        how(store, kind, name, chance)
    log.tell(Damaged(now(), since, str(machine), name, how is _remove))


def _outside(ground: Ground, name: str, chance: Random, log: Log) -> None:
    """Let other bytes stand under a blob's name in the outer tier, as a broken writer would.

    Never under the name of a shared blob: with one gone bad, nobody could say whose compile was
    for want of it.
    """
    since = now()
    ground.outside().put_blob(name, io.BytesIO(chance.randbytes(chance.randrange(5000))))
    log.tell(Damaged(now(), since, OUTER, name, gone=False))


def _flip(store: DirectoryStore, kind: Kind, name: str, chance: Random) -> None:
    """Change a byte in place."""
    path = store.path(kind, name)
    path.chmod(0o644)
    with path.open("r+b", buffering=0) as file:
        at = chance.randrange(os.fstat(file.fileno()).st_size or 1)
        old = file.read()[at : at + 1] or b"a"  # it may have been cut to nothing before
        os.pwrite(file.fileno(), bytes([ord(old) ^ 1 << chance.randrange(8)]), at)
        os.fchmod(file.fileno(), 0o444)


def _cut(store: DirectoryStore, kind: Kind, name: str, chance: Random) -> None:
    """Let a shorter file take the place: cut where it lies, it would take its readers along."""
    path = store.path(kind, name)
    data = path.read_bytes()
    short = store.root.with_name(f"{store.root.name}-cut")
    short.write_bytes(data[: chance.randrange(len(data) or 1)])
    short.replace(path)


def _remove(store: DirectoryStore, kind: Kind, name: str, _: Random) -> None:
    with contextlib.suppress(StoreError):
        store.delete(kind, name)
