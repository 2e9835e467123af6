"""The cache as the rest of max-build sees it: look up, publish, and never fail a build."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from max_build.errors import StoreError
from max_build.record import Blob, Record, decode, encode
from max_build.store.amounts import show_size
from max_build.store.answer import Hit, Miss, NoGoodError
from max_build.store.base import CHUNK, LARGEST, Sink, fault_of
from max_build.store.entry import holds_recipes, seal, unseal, unseal_recipes
from max_build.store.index import Memo
from max_build.store.journal import Journal
from max_build.store.local import Local
from max_build.store.reader import Reader
from max_build.store.recipes import PER_LOOKUP, Recipes
from max_build.store.settings import CacheSettings
from max_build.store.stats import save
from max_build.store.tiers import Tier
from max_build.store.trust import Signer, Verifier

__all__ = ["NOT_KEPT", "Cache", "Hit", "Miss"]

_PER_UNIT = 16
_ROOM_EVERY = 3600.0
NOT_KEPT = "the local directory cannot be written, or is full"


class Cache:
    """The tiers of one process, nearest first. Made by `open_cache`.

    Its methods may be called from several threads. A context manager: `close` keeps the counters
    and removes scratch files.
    """

    def __init__(
        self,
        settings: CacheSettings,
        local: Local,
        outer: Sequence[Tier],
        *,
        memo: Memo,
        journal: Journal,
        verifier: Verifier,
        signer: Signer | None,
    ) -> None:
        self.settings = settings
        self.root = local.store.root if local.store is not None else None
        self.memo = memo
        self.stats = journal.stats
        self.warnings = journal.warnings
        self._note = journal.note
        self.local = local
        self.outer = tuple(outer)
        self._verifier = verifier
        self._reader = Reader(local, self.outer, verifier, journal)
        self._recipes = Recipes(local, self.outer, self._reader, signer, journal.note)
        self._signer = signer

    # --- look up

    def lookup(self, key: str, *, fetch: bool = True, count_miss: bool = True) -> Hit | Miss:
        """Find the record of `key` in the nearest tier that has it whole.

        With `fetch`, its blobs are in the local tier and verified when this returns, so that
        `path` gives them; nearer tiers have been given what they lacked. Without, nothing is
        read but the record, written or counted.

        With `count_miss=False` a miss is left out: the caller looks again before it compiles.
        """
        found = self._lookup(key, fetch=fetch)
        if fetch:
            if isinstance(found, Hit):
                self.stats.hit(found.tier, found.record.seconds)
            elif count_miss:
                self.stats.miss(found.reason)
        return found

    def fetch(self, key: str) -> Hit | Miss:
        """As `lookup`, for nobody who would compile: neither a hit nor a miss is counted."""
        return self._lookup(key, fetch=True)

    def path(self, blob: Blob) -> Path:
        """The local file of a blob, verified; brought from an outer tier if it is not here.

        Raises
        ------
        StoreError
            `corrupt` if the file was damaged (it has been moved aside), `missing` if it is gone;
            and no other tier gave it.
        """
        try:
            return self.local.file(blob)
        except StoreError as error:
            self._note("local", error)
            lost = error.kind in {"corrupt", "missing"}  # else it may pass
            if all(self._reader.fetch(tier, blob) for tier in self.outer) and lost:
                raise
        return self.local.file(blob)

    def _lookup(self, key: str, *, fetch: bool) -> Hit | Miss:
        miss = Miss("absent")
        try:
            hit = self._reader.here(key, fetch=fetch)
        except NoGoodError as error:
            miss = error.miss
        else:
            if hit is not None:
                return hit
        for position, tier in enumerate(self.outer):
            try:
                hit = self._from_outer(tier, key, self.outer[:position], fetch=fetch)
            except NoGoodError as error:
                if miss.reason == "absent":
                    miss = error.miss
            else:
                if hit is not None:
                    return hit
        return miss

    def _from_outer(
        self, tier: Tier, key: str, nearer: Sequence[Tier], *, fetch: bool
    ) -> Hit | None:
        found = self._reader.outer(tier, key, fetch=fetch)
        if found is None:
            return None
        record, data = found
        if fetch:
            self.local.put_entry(key, data, record.blobs)
            self._remember(record)
            for other in nearer:
                self._offer(other, record, data)
        return Hit(record, tier.label)

    # --- publish

    def publish(self, record: Record, files: Mapping[str, Path | bytes]) -> None:
        """Store what a compile gave, in every tier that may be written.

        A tier that fails is counted and warned about; `path` gives the blobs either way.

        Parameters
        ----------
        record
            What to store under `record.key`.
        files
            Digest → content of each blob of the record that the cache does not have yet.

        Raises
        ------
        StoreError
            `corrupt` if a content is not that of its digest, `missing` if a blob has none.
        """
        for blob in record.blobs:
            self._take(blob, files.get(blob.digest))
        payload = encode(record)
        data = seal(payload, self._signer.sign(record.key, payload) if self._signer else None)
        if len(data) > LARGEST:
            message = (
                f"record of key {record.key[:12]} (`{record.unit}`) is not kept: it takes "
                f"{show_size(len(data))}, and an entry {show_size(LARGEST)} at most"
            )
            self._note("local", StoreError(message, kind="full"))
            return
        self.local.put_entry(record.key, data, record.blobs)
        self._remember(record)
        for tier in self.outer:
            self._offer(tier, record, data)

    def hold(self, record: Record, files: Mapping[str, Path | bytes]) -> None:
        """Let `path` give the blobs of a record that must not be found again.

        The local tier keeps the blobs alone: without an entry nothing leads to them, and gc
        takes them.

        Raises
        ------
        StoreError
            As `publish`.
        """
        for blob in record.blobs:
            self._take(blob, files.get(blob.digest))

    def _take(self, blob: Blob, content: Path | bytes | None) -> None:
        try:
            self.local.file(blob)
        except StoreError as error:
            if error.kind != "missing":
                self._note("local", error)
        else:
            self.local.refresh(blob.digest)
            return
        if content is None:
            message = f"blob {blob.digest[:12]} ({blob.role}) is published without its content"
            raise StoreError(message, kind="missing")
        self.local.keep(blob, lambda sink: _pour(content, sink))

    def _offer(self, tier: Tier, record: Record, data: bytes) -> str:
        """Give an outer tier what it lacks: blobs, then the entry. The kind of what failed."""
        if not tier.writable:
            return "closed"
        self._warn_of_distrust(tier, record.key, data)
        try:
            for blob in record.blobs:
                sent = tier.send(blob, self.path(blob))
                self.stats.moved(tier.label, sent=sent)
            if not (
                tier.put_entry(record.key, data, replace=False)
                or self._reader.good(tier, record.key)
                or tier.put_entry(record.key, data, replace=True)
            ):
                message = f"{tier.label} cache did not take the entry of key {record.key[:12]}"
                fault = StoreError(message, kind="server")
                self._note(tier.label, fault)
                return fault.kind
        except StoreError as error:
            return error.kind  # noted where it happened
        except OSError as error:  # of the local file
            fault = fault_of(error, f"local cache, key {record.key[:12]}")
            self._note("local", fault)
            return fault.kind
        return ""

    def _warn_of_distrust(self, tier: Tier, key: str, data: bytes) -> None:
        """Tell once that what is given to a tier will be a miss for all who read it."""
        if tier.trust == "require" and self._verifier.objection(key, unseal(data)):
            what = "signed by no key of `public-keys`" if self._signer else "unsigned"
            message = f"{tier.label} cache: key {key[:12]} is {what}: a miss for everybody"
            self._note(tier.label, StoreError(message, kind="unsigned"))

    def adopt(self, key: str, data: bytes) -> str:
        """Take an entry that was carried here, whose blobs the local tier has by now.

        Returns
        -------
        str
            Why it was refused, or nothing.
        """
        try:
            sealed = unseal(data)
            reason = self._verifier.objection(key, sealed)
            if self.settings.remote_trust == "require" and reason:
                return f"key {key[:12]}: {reason}"
            if holds_recipes(sealed.payload):
                unseal_recipes(key, sealed.payload)
                return "" if self.local.put_entry(key, data) else f"key {key[:12]}: {NOT_KEPT}"
            record = decode(sealed.payload, key)
            for blob in record.blobs:
                self.local.file(blob)
        except (StoreError, ValueError) as error:
            return f"key {key[:12]}: {error}"
        if not self.local.put_entry(key, data, record.blobs):
            return f"key {key[:12]}: {NOT_KEPT}"
        self._remember(record)
        return ""

    def offer(self, key: str) -> str:
        """Give a record of the local tier to every outer one that may be written.

        Returns
        -------
        str
            Why that was not possible, or nothing.
        """
        try:
            data = self.local.get_entry(key)
            if data is None:
                return "it is not in the local cache"
            sealed = unseal(data)
            record = decode(sealed.payload, key)
            if self._signer is not None and not self._recipes.may_sign(key, sealed):
                message = (
                    f"key {key[:12]} is pushed without our signature: it was not compiled "
                    "with it, and came without one of a key in `public-keys`"
                )
                self._note("local", StoreError(message, kind="unsigned"))
            elif self._signer is not None:
                signatures = {**sealed.signatures, **self._signer.sign(key, sealed.payload)}
                data = seal(sealed.payload, signatures)
            for blob in record.blobs:
                self.local.file(blob)
        except (StoreError, ValueError) as error:
            return str(error)
        tiers = [tier for tier in self.outer if tier.store.writable]
        refused = [(tier.label, self._offer(tier, record, data)) for tier in tiers]
        return "; ".join(
            f"the {tier} cache did not take it ({why})" for tier, why in refused if why
        )

    # --- one compile at a time

    @contextlib.contextmanager
    def single_flight(self, key: str) -> Iterator[bool]:
        """Be the one that compiles `key`, here and among the machines that share a tier.

        Waits at most `settings.wait` seconds for another. Nothing is wrong if two compile.

        Yields
        ------
        bool
            Whether to look up again before compiling: another was waited for, or has just been.
        """
        from max_build.store.flight import node_lock

        store = self.local.store
        started = time.monotonic()
        limit = self.settings.wait
        with contextlib.ExitStack() as stack:
            waited = False
            if store is not None and store.writable:
                with contextlib.suppress(OSError):
                    path = store.folder("lock") / key
                    waited = stack.enter_context(node_lock(path, limit))
            # Whoever waited here finds the result here; only the first one asks elsewhere.
            tier = next((t for t in self.outer if t.leases), None)
            if tier is not None and not waited:
                left = max(0.0, limit - (time.monotonic() - started))
                waited = stack.enter_context(
                    tier.lease(key, expiry=self.settings.lease, limit=left)
                )
            # Somebody may have finished between the caller's look and our turn.
            yield waited or self._appeared(key, tier)

    def _appeared(self, key: str, tier: Tier | None) -> bool:
        with contextlib.suppress(StoreError):
            if self.local.get_entry(key) is not None:
                return True
            return tier is not None and tier.entry(key) is not None
        return False

    # --- recipes and history

    def recipes(self, lookup: str, *, everywhere: bool = False) -> tuple[bytes, ...]:
        """The recipes kept under a lookup key (SHA-256, hex), newest first.

        The local ones, and those of the outer tiers if there are none or with `everywhere`; these
        are kept here too. What is damaged or not trusted counts as none.
        """
        return self._recipes.get(lookup, everywhere=everywhere)

    def add_recipe(self, lookup: str, data: bytes, limit: int = PER_LOOKUP) -> None:
        """Keep a recipe (JSON text) under a lookup key, in front of at most `limit - 1` others."""
        self._recipes.add(lookup, data, limit)

    def records_of(self, unit: str, limit: int = _PER_UNIT) -> list[Record]:
        """Records that were made or fetched here for a unit of that name, newest first."""
        found = []
        for key in _keys(self.memo.get("unit", unit))[:limit]:
            with contextlib.suppress(StoreError, ValueError):
                data = self.local.get_entry(key)
                if data is not None:
                    found.append(decode(unseal(data).payload, key))
        return found

    def _remember(self, record: Record) -> None:
        def first(old: bytes | None) -> bytes:
            keys = [record.key, *(key for key in _keys(old) if key != record.key)]
            return msgspec.json.encode(keys[:_PER_UNIT])

        self.memo.update("unit", record.unit, first)

    # --- the rest

    def close(self) -> None:
        """Keep the counters, let go of connections, remove scratch files."""
        if self.local.store is not None and self.local.store.writable:
            save(self.memo, self.stats)
        self._make_room()
        for tier in self.outer:
            tier.close()
        self.local.close()
        self.memo.close()

    def _make_room(self) -> None:
        """Hold the local directory to its size, about once an hour, after something was added."""
        store = self.local.store
        if store is None or not store.writable or not self.local.grown:
            return
        stamp = store.root / "collected"
        with contextlib.suppress(OSError, StoreError):
            if stamp.exists() and time.time() - stamp.stat().st_mtime < _ROOM_EVERY:
                return
            from max_build.store.gc import gc

            stamp.touch()
            gc(store, max_size=self.settings.max_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pour(content: Path | bytes, sink: Sink) -> None:
    if isinstance(content, bytes):
        sink.write(content)
        return
    try:
        file: BinaryIO = content.open("rb")
    except OSError as error:
        message = f"`{content}` cannot be read: {error.strerror}"
        raise StoreError(message, kind="missing") from error
    with file:
        shutil.copyfileobj(file, sink, CHUNK)


def _keys(data: bytes | None) -> list[str]:
    try:
        return msgspec.json.decode(data or b"[]", type=list[str])
    except msgspec.DecodeError:
        return []
