"""The cache as the rest of max-build sees it: look up, publish, and never fail a build."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, Self

import msgspec

from max_build.errors import StoreError
from max_build.record import Blob, Record, decode, encode
from max_build.store.base import CHUNK, Sink, fault_of
from max_build.store.entry import Sealed, holds_recipes, seal, seal_recipes, unseal, unseal_recipes
from max_build.store.index import Memo
from max_build.store.journal import Journal
from max_build.store.local import Local
from max_build.store.settings import CacheSettings
from max_build.store.stats import save
from max_build.store.tiers import Tier
from max_build.store.trust import Signer, Verifier

__all__ = ["Cache", "Hit", "Miss"]

_PER_UNIT = 16
_PER_LOOKUP = 8
_ROOM_EVERY = 3600.0


class Hit(msgspec.Struct, frozen=True):
    """The record of a key, and the tier it came from."""

    record: Record
    tier: str


class Miss(msgspec.Struct, frozen=True):
    """Why a key is not there.

    `reason` is a word to count: `absent`, `damaged` (an entry or blob that is not what it should
    be), `dangling` (an entry whose blob is gone), `unsigned` or `altered` (see `trust`), `fault`
    (a tier failed). `detail` says it in full.
    """

    reason: str
    detail: str = ""


class _NoGoodError(Exception):
    """What a tier has under a key is of no use."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.detail)
        self.miss = miss


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
        self._signer = signer
        self._published = 0

    # --- look up

    def lookup(self, key: str, *, fetch: bool = True) -> Hit | Miss:
        """Find the record of `key` in the nearest tier that has it whole.

        With `fetch`, its blobs are in the local tier and verified when this returns, so that
        `path` gives them; nearer tiers have been given what they lacked. Without, nothing is
        read but the record, written or counted.
        """
        found = self._lookup(key, fetch=fetch)
        if fetch:
            if isinstance(found, Hit):
                self.stats.hit(found.tier, found.record.seconds)
            else:
                self.stats.miss(found.reason)
        return found

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
            if all(self._fetch(tier, blob) for tier in self.outer):
                raise
        return self.local.file(blob)

    def _lookup(self, key: str, *, fetch: bool) -> Hit | Miss:
        miss = Miss("absent")
        try:
            record = self._from_local(key, fetch=fetch)
        except _NoGoodError as error:
            miss = error.miss
        else:
            if isinstance(record, Hit):
                return record
        for position, tier in enumerate(self.outer):
            try:
                record = self._from_outer(tier, key, self.outer[:position], fetch=fetch)
            except _NoGoodError as error:
                if miss.reason == "absent":
                    miss = error.miss
            else:
                if isinstance(record, Hit):
                    return record
        return miss

    def _from_local(self, key: str, *, fetch: bool) -> Hit | None:
        try:
            data = self.local.get_entry(key)
            if data is None:
                return None
            record = decode(unseal(data).payload, key)
        except (StoreError, ValueError) as error:
            self._damaged_locally(key, error)
            raise _NoGoodError(Miss("damaged", str(error))) from error
        tier = "local"
        for blob in record.blobs:
            if not fetch:
                if not self.local.holds(blob):
                    raise _NoGoodError(Miss("dangling", f"blob {blob.digest[:12]} is gone"))
                continue
            try:
                self.local.file(blob)
            except StoreError as error:
                if error.kind != "missing":
                    self._note("local", error)
                # The same bytes may lie farther out; whoever has them, the digest decides.
                source = next((t for t in self.outer if not self._fetch(t, blob)), None)
                if source is None:
                    reason = "dangling" if error.kind == "missing" else "damaged"
                    raise _NoGoodError(Miss(reason, error.message)) from error
                tier = source.label
        if fetch:
            self.local.touch(key)
        return Hit(record, tier)

    def _from_outer(
        self, tier: Tier, key: str, nearer: Sequence[Tier], *, fetch: bool
    ) -> Hit | None:
        if not tier.open:
            return None
        try:
            data = tier.entry(key)
            if data is None:
                return None
            record = self._believe(tier, key, data)
            for blob in record.blobs:
                if fetch:
                    reason = self._fetch(tier, blob)
                else:
                    reason = "" if tier.has_blob(blob.digest) else "dangling"
                if reason:
                    text = f"{tier.label} cache, key {key[:12]}: blob {blob.digest[:12]}: {reason}"
                    if reason != "fault":
                        tier.doubt("ac", key)
                    raise _NoGoodError(Miss(reason, text))
        except StoreError as error:
            if error.kind == "corrupt":
                self._damaged_outside(tier, key, error)
            raise _NoGoodError(Miss("fault", error.message)) from error
        if fetch:
            self.local.put_entry(key, data)
            self._remember(record)
            for other in nearer:
                self._offer(other, record, data)
        return Hit(record, tier.label)

    def _believe(self, tier: Tier, key: str, data: bytes) -> Record:
        """The record in an entry from outside."""
        try:
            sealed = unseal(data)
            record = decode(sealed.payload, key)
        except ValueError as error:
            self._damaged_outside(tier, key, error)
        self._check_trust(tier, key, sealed)
        return record

    def _check_trust(self, tier: Tier, key: str, sealed: Sealed) -> None:
        if tier.trust == "off":
            return
        reason = self._verifier.objection(key, sealed)
        if reason:
            text = f"{tier.label} cache, key {key[:12]}: {reason}"
            if tier.trust == "require":
                raise _NoGoodError(Miss(reason, text))
            self._note(tier.label, StoreError(text, kind=reason))

    def _damaged_outside(self, tier: Tier, key: str, error: Exception) -> NoReturn:
        fault = StoreError(f"{tier.label} cache, key {key[:12]}: {error}", kind="corrupt")
        self._note(tier.label, fault)
        tier.spurn("ac", key)
        raise _NoGoodError(Miss("damaged", fault.message)) from error

    def _fetch(self, tier: Tier, blob: Blob) -> str:
        """Bring a blob into the local tier; the reason if this tier cannot give it."""
        if not tier.open:
            return "fault"
        with contextlib.suppress(StoreError):
            self.local.file(blob)
            return ""
        try:
            self.local.keep(blob, lambda sink: tier.pour(blob, sink))
        except StoreError as error:
            if error.kind == "corrupt":
                self._note(tier.label, error)
                tier.spurn("cas", blob.digest)
            return {"corrupt": "damaged", "missing": "dangling"}.get(error.kind, "fault")
        self.stats.moved(tier.label, received=blob.size)
        return ""

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
        self.local.put_entry(record.key, data)
        self._published += 1
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

    def _offer(self, tier: Tier, record: Record, data: bytes) -> bool:
        """Give an outer tier what it lacks: blobs, then the entry. False if that failed."""
        if not tier.writable:
            return False
        try:
            for blob in record.blobs:
                sent = tier.send(blob, self.local.file(blob))
                self.stats.moved(tier.label, sent=sent)
            if not tier.put_entry(record.key, data, replace=False) and not self._good(
                tier, record.key
            ):
                tier.put_entry(record.key, data, replace=True)
        except StoreError:
            return False  # noted by the tier
        except OSError as error:  # of the local file
            self._note("local", fault_of(error, f"local cache, key {record.key[:12]}"))
            return False
        return True

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
                self.local.put_entry(key, data)
                return ""
            record = decode(sealed.payload, key)
            for blob in record.blobs:
                self.local.file(blob)
        except (StoreError, ValueError) as error:
            return f"key {key[:12]}: {error}"
        self.local.put_entry(key, data)
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
            if self._signer is not None:
                signatures = {**sealed.signatures, **self._signer.sign(key, sealed.payload)}
                data = seal(sealed.payload, signatures)
            for blob in record.blobs:
                self.local.file(blob)
        except (StoreError, ValueError) as error:
            return str(error)
        given = [self._offer(tier, record, data) for tier in self.outer if tier.writable]
        return "" if all(given) else "a tier did not take it"

    def _good(self, tier: Tier, key: str) -> bool:
        """Whether the entry that an outer tier has would be a hit."""
        try:
            standing = tier.entry(key)
        except StoreError as error:
            if error.kind == "corrupt":
                return False
            raise
        if standing is None:
            return False
        try:
            record = self._believe(tier, key, standing)
        except _NoGoodError:
            return False
        return all(tier.has_blob(blob.digest) for blob in record.blobs)

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
        ours = self._local_recipes(lookup)
        found = list(ours)
        if everywhere or not found:
            for tier in self.outer:
                with contextlib.suppress(StoreError, _NoGoodError):
                    found.extend(r for r in self._outer_recipes(tier, lookup) if r not in found)
            if len(found) > len(ours):
                self.local.put_entry(lookup, self._sealed_recipes(lookup, found[:_PER_LOOKUP]))
        return tuple(found)

    def add_recipe(self, lookup: str, data: bytes, limit: int = _PER_LOOKUP) -> None:
        """Keep a recipe (JSON text) under a lookup key, in front of at most `limit - 1` others."""

        def merged(old: tuple[bytes, ...]) -> bytes:
            recipes = (data, *(text for text in old if text != data))
            return self._sealed_recipes(lookup, recipes[:limit])

        old = self._local_recipes(lookup)
        if old[:1] != (data,):
            self.local.put_entry(lookup, merged(old))
        for tier in self.outer:
            if tier.writable:
                with contextlib.suppress(StoreError):
                    try:
                        theirs = self._outer_recipes(tier, lookup)
                    except _NoGoodError:
                        theirs = ()
                    if theirs[:1] != (data,):
                        tier.put_entry(lookup, merged(theirs), replace=True)

    def records_of(self, unit: str, limit: int = _PER_UNIT) -> list[Record]:
        """Records that were made or fetched here for a unit of that name, newest first."""
        found = []
        for key in _keys(self.memo.get("unit", unit))[:limit]:
            with contextlib.suppress(StoreError, ValueError):
                data = self.local.get_entry(key)
                if data is not None:
                    found.append(decode(unseal(data).payload, key))
        return found

    def _sealed_recipes(self, lookup: str, recipes: Sequence[bytes]) -> bytes:
        payload = seal_recipes(lookup, tuple(recipes))
        return seal(payload, self._signer.sign(lookup, payload) if self._signer else None)

    def _local_recipes(self, lookup: str) -> tuple[bytes, ...]:
        try:
            data = self.local.get_entry(lookup)
            if data is None:
                return ()
            recipes = unseal_recipes(lookup, unseal(data).payload)
        except (StoreError, ValueError) as error:
            self._damaged_locally(lookup, error)
            return ()
        self.local.touch(lookup)
        return recipes

    def _outer_recipes(self, tier: Tier, lookup: str) -> tuple[bytes, ...]:
        if not tier.open:
            return ()
        data = tier.entry(lookup)
        if data is None:
            return ()
        try:
            sealed = unseal(data)
            recipes = unseal_recipes(lookup, sealed.payload)
        except ValueError as error:
            self._note(tier.label, StoreError(str(error), kind="corrupt"))
            return ()
        self._check_trust(tier, lookup, sealed)
        return recipes

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
        if store is None or not store.writable or not self._published:
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

    def _damaged_locally(self, key: str, error: Exception) -> None:
        kind = error.kind if isinstance(error, StoreError) else "corrupt"
        self._note("local", StoreError(f"local cache, key {key[:12]}: {error}", kind=kind))
        if kind == "corrupt":
            self.local.discard_entry(key)


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
        while chunk := file.read(CHUNK):
            sink.write(chunk)


def _keys(data: bytes | None) -> list[str]:
    try:
        return msgspec.json.decode(data or b"[]", type=list[str])
    except msgspec.DecodeError:
        return []
