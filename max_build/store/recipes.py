"""The recipes in the tiers: a few texts under each lookup key, newest first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from max_build.errors import StoreError
from max_build.store.amounts import show_size
from max_build.store.answer import NoGoodError
from max_build.store.base import LARGEST
from max_build.store.entry import Sealed, seal, seal_recipes, unseal, unseal_recipes
from max_build.store.local import Local
from max_build.store.reader import Reader
from max_build.store.tiers import Tier
from max_build.store.trust import Signer

__all__ = ["PER_LOOKUP", "Recipes"]

PER_LOOKUP = 8
"""Recipes that are kept under one lookup key."""


class Recipes:
    """Recipes in every tier, as text: what they mean is `max_build.recipes.recipe`'s business.

    One signature is over all that stands under a lookup key. A machine that signs therefore puts
    its own recipe in front of such others alone that a known key vouches for.
    """

    def __init__(
        self,
        local: Local,
        outer: Sequence[Tier],
        reader: Reader,
        signer: Signer | None,
        note: Callable[[str, StoreError], None],
    ) -> None:
        self._local = local
        self._outer = outer
        self._reader = reader
        self._signer = signer
        self._note = note

    def get(self, lookup: str, *, everywhere: bool = False) -> tuple[bytes, ...]:
        """The recipes kept under a lookup key (SHA-256, hex), newest first.

        The local ones, and those of the outer tiers if there are none or with `everywhere`; these
        are kept here too, unsigned. What is damaged or not trusted counts as none.
        """
        ours = self._ours(lookup)
        found = list(ours)
        if everywhere or not found:
            for tier in self._outer:
                with contextlib.suppress(StoreError, NoGoodError):
                    found.extend(r for r in self._theirs(tier, lookup) if r not in found)
            kept = tuple(found[:PER_LOOKUP])
            if len(found) > len(ours) and (data := self._sealed(lookup, kept, None)):
                self._local.put_entry(lookup, data)
        return tuple(found)

    def add(self, lookup: str, data: bytes, limit: int = PER_LOOKUP) -> None:
        """Keep a recipe (JSON text) under a lookup key, in front of at most `limit - 1` others."""

        def merged(old: tuple[bytes, ...]) -> bytes | None:
            recipes = (data, *(text for text in old if text != data))
            return self._sealed(lookup, recipes[:limit], self._signer)

        old = self._ours(lookup, to_sign=True)
        if old[:1] != (data,):
            entry = merged(old)
            if entry is None:
                message = (
                    f"a recipe is not kept: it takes {show_size(len(data))}, "
                    f"and an entry {show_size(LARGEST)} at most"
                )
                self._note("local", StoreError(message, kind="unsupported"))
                return
            self._local.put_entry(lookup, entry)
        for tier in self._outer:
            if tier.writable:
                with contextlib.suppress(StoreError):
                    try:
                        theirs = self._theirs(tier, lookup, to_sign=True)
                    except NoGoodError:
                        theirs = ()
                    if theirs[:1] != (data,) and (entry := merged(theirs)):
                        tier.put_entry(lookup, entry, replace=True)

    def _sealed(
        self, lookup: str, recipes: tuple[bytes, ...], signer: Signer | None
    ) -> bytes | None:
        """The entry of as many recipes, from the first, as it can hold; None if not even one."""
        for count in range(len(recipes), 0, -1):
            payload = seal_recipes(lookup, recipes[:count])
            if len(payload) <= LARGEST:
                return seal(payload, signer.sign(lookup, payload) if signer else None)
        return None

    def may_sign(self, lookup: str, sealed: Sealed) -> bool:
        """Whether our signature, if we have one, may stand under what was read."""
        if self._signer is None or self._reader.vouched(lookup, sealed):
            return True
        # Our own key counts where the project does not list it. Ed25519 signs the same twice.
        own = self._signer.sign(lookup, sealed.payload)
        return own.items() <= sealed.signatures.items()

    def _ours(self, lookup: str, *, to_sign: bool = False) -> tuple[bytes, ...]:
        try:
            data = self._local.get_entry(lookup)
            if data is None:
                return ()
            sealed = unseal(data)
            recipes = unseal_recipes(lookup, sealed.payload)
        except (StoreError, ValueError) as error:
            self._reader.damaged_here(lookup, error)
            return ()
        self._local.touch(lookup)
        return recipes if not to_sign or self.may_sign(lookup, sealed) else ()

    def _theirs(self, tier: Tier, lookup: str, *, to_sign: bool = False) -> tuple[bytes, ...]:
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
        self._reader.check_trust(tier, lookup, sealed)
        return recipes if not to_sign or self.may_sign(lookup, sealed) else ()
