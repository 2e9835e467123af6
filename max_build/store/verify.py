"""Reading a whole store again, to find out what is wrong with it before a build does."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

import msgspec

from max_build.errors import StoreError
from max_build.record import decode
from max_build.store.base import Kind, Sink, Store
from max_build.store.entry import holds_recipes, unseal, unseal_recipes

__all__ = ["Finding", "Verified", "verify"]

_ANY = 1 << 62


class Finding(msgspec.Struct, frozen=True):
    """Something that is not what it should be."""

    kind: Kind
    name: str
    problem: str


class Verified(msgspec.Struct, frozen=True):
    """What was read, and what was wrong."""

    entries: int
    blobs: int
    findings: tuple[Finding, ...]


def verify(store: Store, *, repair: bool = True) -> Verified:
    """Hash every blob and read every entry; get what is wrong out of the way.

    Parameters
    ----------
    store
        One that can list.
    repair
        Whether to discard what is damaged. An entry that names a blob that is gone is damaged;
        what could not be read for a reason that may pass is only told.

    Raises
    ------
    StoreError
        If the store cannot list.
    """
    findings: list[Finding] = []
    damaged: set[str] = set()
    entries = blobs = 0

    def judge(kind: Kind, name: str, look: Callable[[], str]) -> None:
        try:
            problem = look()
        except StoreError as error:
            findings.append(Finding(kind, name, error.message))
        else:
            if problem:
                findings.append(Finding(kind, name, problem))
                damaged.add(name)
                if repair:
                    store.discard(kind, name)

    for item in store.list("cas"):
        blobs += 1
        judge("cas", item.name, partial(_blob, store, item.name))
    for item in store.list("ac"):
        entries += 1
        judge("ac", item.name, partial(_entry, store, item.name, damaged))
    return Verified(entries, blobs, tuple(findings))


def _passes(error: StoreError) -> bool:
    """Whether a fault may be over soon: a server that is slow, too many open files."""
    cause = error.__cause__
    return error.kind != "corrupt" and getattr(cause, "errno", None) != errno.EIO


def _blob(store: Store, name: str) -> str:
    """What is wrong with a blob; StoreError where that cannot be told for now."""
    sink = Sink(_Nowhere(), _ANY)
    try:
        if not store.get_blob(name, sink):
            return ""  # removed while we looked
    except StoreError as error:
        if _passes(error):
            raise
        return error.message
    return "" if sink.digest() == name else "its bytes are not those of its name"


def _entry(store: Store, name: str, damaged: set[str]) -> str:
    try:
        data = store.get_entry(name)
        if data is None:
            return ""
        payload = unseal(data).payload
        if holds_recipes(payload):
            unseal_recipes(name, payload)
            return ""
        gone = [
            blob.digest
            for blob in decode(payload, name).blobs
            if blob.digest in damaged or not store.has_blob(blob.digest)
        ]
    except StoreError as error:
        if _passes(error):
            raise
        return error.message
    except ValueError as error:
        return str(error)
    return f"it names blob {gone[0][:12]}, which is gone or damaged" if gone else ""


class _Nowhere:
    def write(self, _: object) -> None:
        pass
