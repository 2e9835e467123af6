"""Which entries a person means by a unit, a target or a key; and moving them between tiers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from max_build.errors import StoreError
from max_build.record import Record, decode
from max_build.store.base import Store
from max_build.store.cache import Cache, Hit
from max_build.store.entry import unseal, unseal_recipes

__all__ = ["Moved", "chosen", "pull", "push", "recipes_for"]


class Moved(msgspec.Struct, frozen=True):
    """Keys that were moved, and why others were not: key → reason."""

    moved: tuple[str, ...]
    failed: dict[str, str]


def chosen(
    store: Store,
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
    for name in names:
        if keys and not any(name.startswith(key) for key in keys):
            continue
        record = _record(store, name)
        if record is None or (units and record.unit not in units):
            continue
        if not targets or record.components.target in targets:
            yield record


def recipes_for(store: Store, keys: Collection[str]) -> Iterator[str]:
    """The lookup keys under which some recipe names one of `keys`."""
    wanted = [key.encode() for key in keys]
    for item in store.list("ac"):
        data = store.get_entry(item.name)
        try:
            texts = unseal_recipes(item.name, unseal(data or b"").payload)
        except ValueError:
            continue
        if any(key in text for text in texts for key in wanted):
            yield item.name


def push(cache: Cache, records: Collection[Record]) -> Moved:
    """Give records of the local tier, and recipes that lead to them, to the outer ones."""
    moved: list[str] = []
    failed: dict[str, str] = {}
    if not any(tier.writable for tier in cache.outer):
        return Moved((), {record.key: "no outer tier may be written" for record in records})
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


def pull(cache: Cache, keys: Collection[str]) -> Moved:
    """Bring records into the local tier."""
    moved: list[str] = []
    failed: dict[str, str] = {}
    for key in keys:
        found = cache.lookup(key)
        if isinstance(found, Hit):
            moved.append(key)
        else:
            failed[key] = found.detail or found.reason
    return Moved(tuple(moved), failed)


def _record(store: Store, key: str) -> Record | None:
    try:
        data = store.get_entry(key)
        return None if data is None else decode(unseal(data).payload, key)
    except (StoreError, ValueError):
        return None
