"""Making room: which entries and blobs of a directory go, and their going.

`survey` looks, `plan` decides on what it saw alone, `collect` does it. All three may run while
others read, write and collect. A reader that loses the race misses; one that has a file mapped
keeps it. What was seen lies in a temporary database: memory does not grow with the directory.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from max_build.errors import StoreError
from max_build.store.base import Kind, fault_of
from max_build.store.directory import DirectoryStore
from max_build.store.names import LEFTOVERS
from max_build.store.survey import (
    GOING,
    Blobs,
    Entries,
    Found,
    Survey,
    ordered,
    sizes,
    survey,
    unkept,
)

__all__ = ["Plan", "Report", "collect", "gc", "pin", "pins", "plan"]


class Plan(msgspec.Struct, frozen=True):
    """What goes, and what that frees and leaves, in bytes. Good as long as the survey is."""

    entries: Collection[Found]
    blobs: Mapping[bytes, float]
    freed: int
    left: int


class Report(msgspec.Struct, frozen=True):
    """What went. `leftovers` counts files of interrupted writers and the like."""

    entries: int
    blobs: int
    freed: int
    left: int
    leftovers: int


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
        Nothing goes that was written or used in the last `grace` seconds; that it was used is
        noted every ten minutes.
    pinned
        Keys that stay whatever happens.
    """
    stay = set(pinned)
    db = seen.db
    db.create_function("stays", 1, stay.__contains__)
    db.executescript(
        "UPDATE blob SET kept = 0; DROP TABLE IF EXISTS ordered;"
        "CREATE TABLE ordered AS SELECT * FROM entry ORDER BY stays(key) DESC, used DESC;"
        "BEGIN"
    )
    total = staying = 0
    full = False
    oldest = math.inf if max_age is None else max_age
    for entry in ordered(seen):
        new = {blob: size for blob in entry.blobs if (size := unkept(db, blob)) is not None}
        size = entry.size + sum(new.values())
        age = seen.now - entry.used
        # Once something did not fit, nothing older stays: the order of use alone decides.
        full = full or (max_size is not None and total + size > max_size)
        if entry.key not in stay and age > grace and (full or age > oldest):
            break  # and all that follow: they are older
        db.executemany("UPDATE blob SET kept = 1 WHERE digest = ?", ((blob,) for blob in new))
        total += size
        staying += 1
    going = {"now": seen.now, "grace": grace}
    entries = Entries(seen, staying)
    blobs = Blobs(seen, going)
    freed = sizes(db, "FROM ordered WHERE rowid > :staying", {"staying": staying})
    freed += sizes(db, GOING, going)
    spared = sizes(db, "FROM blob WHERE NOT kept AND :now - written <= :grace", going)
    return Plan(entries, blobs, freed, total + spared)


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
        If the directory cannot be read to the end: what an unseen entry names would go; if it
        cannot be written, or there is no room for a temporary file.
    """
    try:
        what = plan(
            survey(store), max_size=max_size, max_age=max_age, grace=grace, pinned=pins(store)
        )
        if dry_run:
            left = sum(1 for _ in _leftovers(store))
            return Report(len(what.entries), len(what.blobs), what.freed, what.left, left)
        return collect(store, what)
    except StoreError:
        raise
    except OSError as error:
        raise fault_of(error, f"gc of `{store.root}` cannot read all of it") from error
    except sqlite3.Error as error:
        message = f"gc of `{store.root}` needs room for a temporary file: {error}"
        raise StoreError(message, kind="full") from error


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
    """The keys that are pinned.

    Raises
    ------
    StoreError
        If that cannot be told.
    """
    try:
        return frozenset(os.listdir(store.root / "pin"))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise fault_of(error, f"`{store.root / 'pin'}` cannot be read") from error


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


def _sweep(store: DirectoryStore) -> int:
    """Remove what nobody will come back for."""
    count = 0
    for path in _leftovers(store):
        with contextlib.suppress(OSError):
            _drop(path)
            count += 1
    return count


def _leftovers(store: DirectoryStore) -> Iterator[Path]:
    """What is old and has a name that a store makes; other files there are somebody's own."""
    now = store.now()
    for folder, (ours, age) in LEFTOVERS.items():
        with contextlib.suppress(OSError):
            for path in [*(store.root / folder).iterdir()]:
                with contextlib.suppress(OSError):
                    if ours.fullmatch(path.name) and now - path.lstat().st_mtime > age:
                        yield path


def _drop(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
