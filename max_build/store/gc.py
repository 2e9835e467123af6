"""Making room: which entries and blobs of a directory go, and their going.

`survey` looks, `plan` decides on values alone, `collect` does it. All three may run while others
read, write and collect. A reader that loses the race misses; one that has a file mapped keeps it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from max_build.errors import StoreError
from max_build.store import actionresult
from max_build.store.base import Kind
from max_build.store.directory import DirectoryStore, read_small

__all__ = [
    "Found",
    "Plan",
    "Report",
    "Survey",
    "collect",
    "gc",
    "pin",
    "pins",
    "plan",
    "survey",
]

_DAY = 86400.0
_LEFTOVERS = {"tmp": _DAY, "lock": _DAY, "lease": _DAY, "quarantine": 7 * _DAY}


class Found(msgspec.Struct, frozen=True, gc=False):
    """An entry: when it was last used, what it takes, and the blobs it names (raw digests)."""

    key: str
    used: float
    size: int
    blobs: tuple[bytes, ...]


class Survey(msgspec.Struct, frozen=True):
    """What a directory holds. `blobs` is raw digest → (bytes at rest, last written)."""

    entries: tuple[Found, ...]
    blobs: dict[bytes, tuple[int, float]]
    now: float


class Plan(msgspec.Struct, frozen=True):
    """What goes, and what that frees and leaves, in bytes."""

    entries: tuple[Found, ...]
    blobs: dict[bytes, float]
    freed: int
    left: int


class Report(msgspec.Struct, frozen=True):
    """What went. `leftovers` counts files of interrupted writers and the like."""

    entries: int
    blobs: int
    freed: int
    left: int
    leftovers: int


class _Blob(msgspec.Struct):
    digest: str


class _Blobs(msgspec.Struct):
    blobs: list[_Blob] = []


_READ = msgspec.json.Decoder(_Blobs)


def survey(store: DirectoryStore) -> Survey:
    """Look at every name, and into every entry."""
    # Blobs first: one that is published meanwhile is then not seen, rather than seen as unnamed.
    blobs = {bytes.fromhex(i.name): (i.size, i.modified) for i in store.list("cas")}
    top = store.root / "ac"
    entries = [
        Found(item.name, item.modified, item.size, _named(f"{top}/{item.name[:2]}/{item.name}"))
        for item in store.list("ac")
    ]
    return Survey(tuple(entries), blobs, store.now())


def plan(
    seen: Survey,
    *,
    max_size: int | None = None,
    max_age: float | None = None,
    grace: float = 3600.0,
    pinned: Iterable[str] = (),
) -> Plan:
    """Decide what goes.

    Parameters
    ----------
    seen
        From `survey`.
    max_size
        Bytes to stay under: the entries that were used longest ago go until the rest fits.
    max_age
        Seconds without use after which an entry goes in any case.
    grace
        Nothing goes that was written or used in the last `grace` seconds.
    pinned
        Keys that stay whatever happens.
    """
    stay = set(pinned)
    kept: set[bytes] = set()
    total = 0
    gone: list[Found] = []
    order = sorted(seen.entries, key=lambda entry: (entry.key not in stay, -entry.used))
    full = False
    for entry in order:
        new = {blob for blob in entry.blobs if blob in seen.blobs and blob not in kept}
        size = entry.size + sum(seen.blobs[blob][0] for blob in new)
        age = seen.now - entry.used
        # Once something did not fit, nothing older stays: the order of use alone decides.
        full = full or (max_size is not None and total + size > max_size)
        if entry.key not in stay and age > grace and (full or (max_age or age) < age):
            gone.append(entry)
            continue
        kept |= new
        total += size
    blobs: dict[bytes, float] = {}
    freed = sum(entry.size for entry in gone)
    for blob, (size, written) in seen.blobs.items():
        if blob in kept:
            continue
        if seen.now - written > grace:
            blobs[blob] = written
            freed += size
        else:
            total += size
    return Plan(tuple(gone), blobs, freed, total)


def collect(store: DirectoryStore, what: Plan) -> Report:
    """Carry out a plan: entries before blobs, and nothing that was used since."""
    spared: set[bytes] = set()
    entries = blobs = kept = 0
    for entry in what.entries:
        if _remove(store, "ac", entry.key, entry.used):
            entries += 1
        else:
            spared.update(entry.blobs)
    for blob, written in what.blobs.items():
        if blob not in spared and _remove(store, "cas", blob.hex(), written):
            blobs += 1
        else:
            kept += 1
    return Report(entries, blobs, what.freed, what.left, _sweep(store))


def gc(
    store: DirectoryStore,
    *,
    max_size: int | None = None,
    max_age: float | None = None,
    grace: float = 3600.0,
    dry_run: bool = False,
) -> Report:
    """Survey, plan and collect; with `dry_run`, all but the last.

    Raises
    ------
    StoreError
        If the directory cannot be written.
    """
    what = plan(survey(store), max_size=max_size, max_age=max_age, grace=grace, pinned=pins(store))
    if dry_run:
        return Report(len(what.entries), len(what.blobs), what.freed, what.left, 0)
    return collect(store, what)


def pin(store: DirectoryStore, key: str, *, pinned: bool = True) -> None:
    """Keep an entry from gc, or stop keeping it.

    Raises
    ------
    StoreError
        If the directory cannot be written.
    """
    path = store.root / "pin" / key
    try:
        if pinned:
            store.folder("pin")
            path.touch()
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        message = f"`{path}` cannot be changed: {error.strerror}"
        raise StoreError(message) from error


def pins(store: DirectoryStore) -> frozenset[str]:
    """The keys that are pinned."""
    try:
        return frozenset(os.listdir(store.root / "pin"))
    except OSError:
        return frozenset()


def _named(path: str) -> tuple[bytes, ...]:
    """The blobs that an entry names; none if it cannot be read.

    What is altered is for a reader to find: here it is enough to know what is named.
    """
    try:
        data = read_small(path) or b""
        if not data.startswith(b"{"):  # as a Bazel cache server keeps it
            data = actionresult.decode(data)
        found = _READ.decode(data.partition(b"\n")[0])
        return tuple(bytes.fromhex(blob.digest) for blob in found.blobs)
    except (OSError, ValueError, msgspec.DecodeError):
        return ()


def _remove(store: DirectoryStore, kind: Kind, name: str, seen: float) -> bool:
    """Remove a name unless it was written or used after it was seen."""
    try:
        if os.lstat(store.path(kind, name)).st_mtime > seen:
            return False
        store.delete(kind, name)
    except FileNotFoundError:
        return True  # another gc was quicker
    except (OSError, StoreError):
        return False
    return True


def _sweep(store: DirectoryStore, ages: Mapping[str, float] = _LEFTOVERS) -> int:
    """Remove what nobody will come back for."""
    count = 0
    now = store.now()
    old = [(path, _DAY) for path in store.root.glob("new-*")]
    for folder, age in ages.items():
        with contextlib.suppress(OSError):
            old.extend((path, age) for path in (store.root / folder).iterdir())
    for path, age in old:
        with contextlib.suppress(OSError):
            if now - path.lstat().st_mtime > age:
                _drop(path)
                count += 1
    return count


def _drop(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
