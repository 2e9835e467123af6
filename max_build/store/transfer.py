"""Which entries a person means by unit, target, key or lock; and moving them between tiers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Protocol

import msgspec

from max_build.errors import StoreError
from max_build.record import Record, decode
from max_build.store.base import Item, Kind
from max_build.store.cache import NOT_KEPT, Cache, Miss
from max_build.store.entry import unseal, unseal_recipes

__all__ = ["Moved", "Source", "chosen", "of_lock", "pull", "pull_recipes", "push", "recipes_for"]

_AT_ONCE = 8  # requests: a bucket answers each of them slowly
_BATCH = 256


class Source(Protocol):
    """What records are looked for in: a store, or a tier, which keeps to its deadlines."""

    label: str

    def get_entry(self, key: str) -> bytes | None:
        """The entry under `key`."""

    def list(self, kind: Kind) -> Iterator[Item]:
        """Everything of that kind."""


class Moved(msgspec.Struct, frozen=True):
    """Keys that were moved, and why others were not: key → reason."""

    moved: tuple[str, ...]
    failed: dict[str, str]


def chosen(
    store: Source,
    *,
    keys: Collection[str] = (),
    units: Collection[str] = (),
    targets: Collection[str] = (),
) -> Iterator[Record]:
    """The records in a store that fit: all of them, where nothing is asked.

    A key may be given by its beginning.

    Raises
    ------
    StoreError
        If the store has to be listed and cannot.
    """
    whole = [key for key in keys if len(key) == 64]
    names = whole if keys and len(whole) == len(keys) else (i.name for i in store.list("ac"))
    fit = (name for name in names if not keys or name.startswith(tuple(keys)))
    for name, data in _entries(store, fit):
        record = _record(name, data)
        if record is None or (units and record.unit not in units):
            continue
        if not targets or record.components.target in targets:
            yield record


def of_lock(store: Source, lock: Mapping[str, Record]) -> tuple[list[Record], dict[str, str]]:
    """The records of a lock as a store has them; and key → why not, of the others.

    Another compile of the same key is no substitute: a lock names bytes.
    """
    records = (_record(*entry) for entry in _entries(store, lock))
    have = {record.key: record for record in records if record is not None}
    failed: dict[str, str] = {}
    for key, wanted in lock.items():
        if key not in have:
            failed[key] = f"it is not in the {store.label} cache"
        elif {blob.digest for blob in wanted.blobs} - {blob.digest for blob in have[key].blobs}:
            failed[key] = f"the {store.label} cache has another compile of it than the lock names"
    return [record for key, record in have.items() if key not in failed], failed


def recipes_for(store: Source, keys: Collection[str]) -> Iterator[str]:
    """The lookup keys under which some recipe names one of `keys`."""
    wanted = [key.encode() for key in keys]
    for name, data in _entries(store, (item.name for item in store.list("ac"))):
        try:
            texts = unseal_recipes(name, unseal(data).payload)
        except ValueError:
            continue
        if any(key in text for text in texts for key in wanted):
            yield name


def push(cache: Cache, records: Collection[Record]) -> Moved:
    """Give records of the local tier, and recipes that lead to them, to the outer ones.

    Raises
    ------
    StoreError
        If none of those may be written.
    """
    moved: list[str] = []
    failed: dict[str, str] = {}
    if not any(tier.writable for tier in cache.outer):
        if not cache.outer:
            message = "there is no shared cache and no remote to push to"
            raise StoreError(message, hint="set `MAX_BUILD_REMOTE`, or `remote` in the project")
        tiers = " and ".join(tier.label for tier in cache.outer)
        message = f"nothing was pushed: this machine may only read the {tiers} cache"
        hint = "set `MAX_BUILD_REMOTE_MODE=read-write`; `max-build doctor` tries to write"
        raise StoreError(message, kind="read-only", hint=hint)
    for record in records:
        problem = cache.offer(record.key)
        if problem:
            failed[record.key] = problem
        else:
            moved.append(record.key)
    if cache.local.store is not None and moved:
        for lookup in recipes_for(cache.local.store, moved):
            for recipe in reversed(cache.recipes(lookup)):
                cache.add_recipe(lookup, recipe)
    return Moved(tuple(moved), failed)


def pull(cache: Cache, keys: Collection[str], lock: Mapping[str, Record] | None = None) -> Moved:
    """Bring records into the local tier, and the very blobs that a lock names for them."""
    moved: list[str] = []
    failed: dict[str, str] = {}
    for key in keys:
        found = cache.fetch(key)
        if isinstance(found, Miss):
            told = "no tier has it" if found.reason == "absent" else found.reason
            failed[key] = found.detail or told
            continue
        try:
            for blob in lock[key].blobs if lock else ():
                cache.path(blob)
        except StoreError as error:
            failed[key] = (
                f"the tiers have another compile of it than the lock names: {error.message}"
            )
        else:
            if cache.local.keeps(key, lock[key].blobs if lock else found.record.blobs):
                moved.append(key)
            else:
                failed[key] = NOT_KEPT
    return Moved(tuple(moved), failed)


def pull_recipes(cache: Cache, store: Source, keys: Collection[str]) -> None:
    """Bring the recipes of an outer tier that lead to `keys` into the local one.

    Raises
    ------
    StoreError
        If the tier cannot be listed.
    """
    if keys:
        for lookup in recipes_for(store, keys):
            cache.recipes(lookup, everywhere=True)


def _entries(store: Source, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The entries of that name that can be read."""

    def read(name: str) -> bytes | None:
        try:
            return store.get_entry(name)
        except StoreError:
            return None

    names = iter(names)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while batch := list(islice(names, _BATCH)):
            for name, data in zip(batch, pool.map(read, batch), strict=True):
                if data is not None:
                    yield name, data


def _record(key: str, data: bytes) -> Record | None:
    try:
        return decode(unseal(data).payload, key)
    except ValueError:
        return None
