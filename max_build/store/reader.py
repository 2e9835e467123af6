"""Reading from the tiers: what is found is checked, and believed or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from max_build.errors import StoreError
from max_build.record import Blob, Record, decode
from max_build.store.answer import Hit, Miss, NoGoodError
from max_build.store.base import Sink
from max_build.store.entry import Sealed, unseal
from max_build.store.journal import Journal
from max_build.store.local import Local
from max_build.store.tiers import Tier
from max_build.store.trust import Verifier

__all__ = ["Reader"]

_REASONS = {"corrupt": "damaged", "mismatch": "damaged", "missing": "dangling"}


class Reader:
    """Records and blobs of the tiers, verified."""

    def __init__(
        self, local: Local, outer: Sequence[Tier], verifier: Verifier, journal: Journal
    ) -> None:
        self._local = local
        self._outer = tuple(outer)
        self._verifier = verifier
        self._stats = journal.stats
        self._note = journal.note

    def here(self, key: str, *, fetch: bool) -> Hit | None:
        """What the local tier has, with blobs from farther out where it lacks them.

        Raises
        ------
        NoGoodError
            If that cannot be used.
        """
        try:
            data = self._local.get_entry(key)
            if data is None:
                return None
            record = decode(unseal(data).payload, key)
        except (StoreError, ValueError) as error:
            self.damaged_here(key, error)
            raise NoGoodError(Miss("damaged", str(error))) from error
        tier = "local"
        for blob in record.blobs:
            if not fetch:
                if not self._local.holds(blob):
                    raise NoGoodError(Miss("dangling", f"blob {blob.digest[:12]} is gone"))
                continue
            try:
                self._local.verified(blob)
            except StoreError as error:
                if error.kind != "missing":
                    self._note("local", error)
                # The same bytes may lie farther out; whoever has them, the digest decides.
                source = next((t for t in self._outer if not self.fetch(t, blob)), None)
                if source is None:
                    reason = "dangling" if error.kind == "missing" else "damaged"
                    raise NoGoodError(Miss(reason, error.message)) from error
                tier = source.label
        if fetch:
            self._local.touch(key)
        return Hit(record, tier)

    def outer(self, tier: Tier, key: str, *, fetch: bool) -> tuple[Record, bytes] | None:
        """A record of an outer tier and its entry; its blobs are here by then, with `fetch`.

        Raises
        ------
        NoGoodError
            If what it has cannot be used, or it failed.
        """
        if not tier.open:
            return None
        try:
            data = tier.entry(key)
            if data is None:
                return None
            record = self.believe(tier, key, data)
            for blob in record.blobs:
                if fetch:
                    reason = self.fetch(tier, blob)
                else:
                    reason = "" if tier.has_blob(blob.digest) else "dangling"
                if reason:
                    text = f"{tier.label} cache, key {key[:12]}: blob {blob.digest[:12]}: {reason}"
                    if reason != "fault":
                        tier.doubt("ac", key)
                    raise NoGoodError(Miss(reason, text))
        except StoreError as error:
            if error.kind == "corrupt":
                self._damaged_outside(tier, key, error)
            raise NoGoodError(Miss("fault", error.message)) from error
        if fetch:
            tier.touch(key)
        return record, data

    def believe(self, tier: Tier, key: str, data: bytes) -> Record:
        """The record in an entry from outside.

        Raises
        ------
        NoGoodError
            If it is damaged, or not trusted.
        """
        try:
            sealed = unseal(data)
            record = decode(sealed.payload, key)
        except ValueError as error:
            self._damaged_outside(tier, key, error)
        self.check_trust(tier, key, sealed)
        return record

    def check_trust(self, tier: Tier, key: str, sealed: Sealed) -> None:
        """Hold an entry against what the tier's settings ask of signatures.

        Raises
        ------
        NoGoodError
            If they refuse it.
        """
        if tier.trust == "off":
            return
        reason = self._verifier.objection(key, sealed)
        if reason:
            text = f"{tier.label} cache, key {key[:12]}: {reason}"
            if tier.trust == "require":
                raise NoGoodError(Miss(reason, text))
            self._note(tier.label, StoreError(text, kind=reason))

    def vouched(self, key: str, sealed: Sealed) -> bool:
        """Whether a known key signed an entry, whatever the tiers' settings ask."""
        return not self._verifier.objection(key, sealed)

    def _damaged_outside(self, tier: Tier, key: str, error: Exception) -> NoReturn:
        fault = StoreError(f"{tier.label} cache, key {key[:12]}: {error}", kind="corrupt")
        self._note(tier.label, fault)
        tier.spurn("ac", key)
        raise NoGoodError(Miss("damaged", fault.message)) from error

    def fetch(self, tier: Tier, blob: Blob) -> str:
        """Bring a blob into the local tier; the reason if this tier cannot give it."""
        if not tier.open:
            return "fault"
        try:
            self._local.file(blob)
        except StoreError as error:
            if error.kind == "mismatch":  # the record is wrong, not what the tiers hold
                return "damaged"
        else:
            return ""
        sinks: list[Sink] = []

        def pour(sink: Sink) -> None:
            sinks.append(sink)
            tier.pour(blob, sink)

        try:
            self._local.keep(blob, pour)
        except StoreError as error:
            if error.kind == "corrupt":
                text = f"{tier.label} cache, blob {blob.digest[:12]}: {error.message}"
                self._note(tier.label, StoreError(text, kind="corrupt"))
                # What is too long may be sound, and its record wrong: it stays till it is replaced.
                longer = any(sink.count > blob.size for sink in sinks)
                (tier.doubt if longer else tier.spurn)("cas", blob.digest)
            return {"corrupt": "damaged", "mismatch": "damaged", "missing": "dangling"}.get(
                error.kind, "fault"
            )
        self._stats.moved(tier.label, received=blob.size)
        return ""

    def good(self, tier: Tier, key: str) -> bool:
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
            record = self.believe(tier, key, standing)
        except NoGoodError:
            return False
        return all(tier.has_blob(blob.digest) for blob in record.blobs)

    def damaged_here(self, key: str, error: Exception) -> None:
        """Tell of a local entry that cannot be read, and get a damaged one out of the way."""
        kind = error.kind if isinstance(error, StoreError) else "corrupt"
        self._note("local", StoreError(f"local cache, key {key[:12]}: {error}", kind=kind))
        if kind == "corrupt":
            self._local.discard_entry(key)
