"""The cache as the rest of max-build sees it: look up, publish, and never fail a build."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from max_build.errors import StoreError
from max_build.record import Blob, Record, decode, encode
from max_build.store.base import CHUNK, Sink
from max_build.store.entry import Sealed, seal, seal_recipes, unseal, unseal_recipes
from max_build.store.index import Memo
from max_build.store.journal import Journal
from max_build.store.local import Local
from max_build.store.settings import CacheSettings
from max_build.store.stats import save
from max_build.store.tiers import Tier
from max_build.store.trust import Signer, Verifier

__all__ = ["Cache", "Hit", "Miss"]

_PER_UNIT = 16


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

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.miss = Miss(reason, detail)


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
        self._local = local
        self._outer = tuple(outer)
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
        """The local file of a blob that was looked up or published here, verified.

        Raises
        ------
        StoreError
            `corrupt` if the file was damaged (it has been moved aside), `missing` if it is gone.
            A new lookup says whether another tier has it.
        """
        try:
            return self._local.file(blob)
        except StoreError as error:
            self._note("local", error)
            raise

    def _lookup(self, key: str, *, fetch: bool) -> Hit | Miss:
        miss = Miss("absent")
        try:
            record = self._from_local(key, fetch=fetch)
        except _NoGoodError as error:
            miss = error.miss
        else:
            if isinstance(record, Hit):
                return record
        for position, tier in enumerate(self._outer):
            try:
                record = self._from_outer(tier, key, self._outer[:position], fetch=fetch)
            except _NoGoodError as error:
                if miss.reason == "absent":
                    miss = error.miss
            else:
                if isinstance(record, Hit):
                    return record
        return miss

    def _from_local(self, key: str, *, fetch: bool) -> Hit | None:
        try:
            data = self._local.get_entry(key)
            if data is None:
                return None
            record = decode(unseal(data).payload, key)
        except (StoreError, ValueError) as error:
            self._damaged_locally(key, error)
            raise _NoGoodError("damaged", str(error)) from error
        tier = "local"
        for blob in record.blobs:
            if not fetch:
                if not self._local.holds(blob):
                    raise _NoGoodError("dangling", f"blob {blob.digest[:12]} is gone")
                continue
            try:
                self._local.file(blob)
            except StoreError as error:
                if error.kind != "missing":
                    self._note("local", error)
                # The same bytes may lie farther out; whoever has them, the digest decides.
                source = next((t for t in self._outer if self._fetch(t, blob)), None)
                if source is None:
                    reason = "dangling" if error.kind == "missing" else "damaged"
                    raise _NoGoodError(reason, error.message) from error
                tier = source.label
        if fetch:
            self._local.touch(key)
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
                there = self._fetch(tier, blob) if fetch else tier.has_blob(blob.digest)
                if not there:
                    if tier.open:
                        tier.spurn("ac", key) if fetch else None
                    raise _NoGoodError("dangling", f"{tier.label}: no blob {blob.digest[:12]}")
        except StoreError as error:
            raise _NoGoodError("fault", error.message) from error
        if fetch:
            self._local.put_entry(key, data)
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
            fault = StoreError(f"{tier.label} cache, key {key[:12]}: {error}", kind="corrupt")
            self._note(tier.label, fault)
            tier.spurn("ac", key)
            raise _NoGoodError("damaged", fault.message) from error
        self._check_trust(tier, key, sealed)
        return record

    def _check_trust(self, tier: Tier, key: str, sealed: Sealed) -> None:
        if tier.trust == "off":
            return
        reason = self._verifier.objection(key, sealed)
        if reason:
            text = f"{tier.label} cache, key {key[:12]}: {reason}"
            if tier.trust == "require":
                raise _NoGoodError(reason, text)
            self._note(tier.label, StoreError(text, kind=reason))

    def _fetch(self, tier: Tier, blob: Blob) -> bool:
        """Bring a blob into the local tier; False if this tier cannot give it."""
        if not tier.open:
            return False
        with contextlib.suppress(StoreError):
            self._local.file(blob)
            return True
        try:
            self._local.keep(blob, lambda sink: tier.pour(blob, sink))
        except StoreError as error:
            if error.kind == "corrupt":
                self._note(tier.label, error)
                tier.spurn("cas", blob.digest)
            return False
        self.stats.moved(tier.label, received=blob.size)
        return True

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
        self._local.put_entry(record.key, data)
        self._published += 1
        self._remember(record)
        for tier in self._outer:
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
            self._local.file(blob)
        except StoreError as error:
            if error.kind != "missing":
                self._note("local", error)
        else:
            self._local.refresh(blob.digest)
            return
        if content is None:
            message = f"blob {blob.digest[:12]} ({blob.role}) is published without its content"
            raise StoreError(message, kind="missing")
        self._local.keep(blob, lambda sink: _pour(content, sink))

    def _offer(self, tier: Tier, record: Record, data: bytes) -> None:
        """Give an outer tier what it lacks: blobs, then the entry."""
        if not tier.writable:
            return
        with contextlib.suppress(StoreError):  # noted by the tier
            for blob in record.blobs:
                sent = tier.send(blob, self._local.file(blob))
                self.stats.moved(tier.label, sent=sent)
            if not tier.put_entry(record.key, data, replace=False) and not self._good(
                tier, record.key
            ):
                tier.put_entry(record.key, data, replace=True)

    def _good(self, tier: Tier, key: str) -> bool:
        """Whether the entry that an outer tier has would be a hit."""
        standing = tier.entry(key)
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
            Whether another was waited for: look up again before compiling.
        """
        from max_build.store.flight import node_lock

        if self._local.store is None or not self._local.store.writable:
            yield False
            return
        try:
            path = self._local.store.folder("lock") / key
        except OSError:
            yield False
            return
        with node_lock(path, self.settings.wait) as waited:
            yield waited

    # --- recipes and history

    def recipes(self, lookup: str, *, everywhere: bool = False) -> tuple[bytes, ...]:
        """The recipes kept under a lookup key (SHA-256, hex), newest first.

        The local ones, and those of the outer tiers if there are none or with `everywhere`.
        What is damaged or not trusted counts as none.
        """
        found = list(self._local_recipes(lookup))
        if everywhere or not found:
            for tier in self._outer:
                with contextlib.suppress(StoreError, _NoGoodError):
                    found.extend(r for r in self._outer_recipes(tier, lookup) if r not in found)
        return tuple(found)

    def add_recipe(self, lookup: str, data: bytes, limit: int = 8) -> None:
        """Keep a recipe (JSON text) under a lookup key, in front of at most `limit - 1` others."""

        def merged(old: tuple[bytes, ...]) -> bytes:
            recipes = (data, *(text for text in old if text != data))[:limit]
            payload = seal_recipes(lookup, recipes)
            return seal(payload, self._signer.sign(lookup, payload) if self._signer else None)

        old = self._local_recipes(lookup)
        if old[:1] != (data,):
            self._local.put_entry(lookup, merged(old))
        for tier in self._outer:
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
                data = self._local.get_entry(key)
                if data is not None:
                    found.append(decode(unseal(data).payload, key))
        return found

    def _local_recipes(self, lookup: str) -> tuple[bytes, ...]:
        try:
            data = self._local.get_entry(lookup)
            return () if data is None else unseal_recipes(lookup, unseal(data).payload)
        except (StoreError, ValueError) as error:
            self._damaged_locally(lookup, error)
            return ()

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
        if self._local.store is not None and self._local.store.writable:
            save(self.memo, self.stats)
        for tier in self._outer:
            tier.close()
        self._local.close()
        self.memo.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _damaged_locally(self, key: str, error: Exception) -> None:
        kind = error.kind if isinstance(error, StoreError) else "corrupt"
        self._note("local", StoreError(f"local cache, key {key[:12]}: {error}", kind=kind))
        self._local.discard_entry(key)


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
