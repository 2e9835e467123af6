"""The recipes in the tiers: a few texts under each lookup key, newest first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from max_build.errors import StoreError
from max_build.store.answer import NoGoodError
from max_build.store.entry import seal, seal_recipes, unseal, unseal_recipes
from max_build.store.local import Local
from max_build.store.reader import Reader
from max_build.store.tiers import Tier
from max_build.store.trust import Signer

__all__ = ["PER_LOOKUP", "Recipes"]

PER_LOOKUP = 8
"""Recipes that are kept under one lookup key."""


class Recipes:
    """Recipes in every tier, as text: what they mean is `max_build.recipe`'s business."""

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
        are kept here too. What is damaged or not trusted counts as none.
        """
        ours = self._ours(lookup)
        found = list(ours)
        if everywhere or not found:
            for tier in self._outer:
                with contextlib.suppress(StoreError, NoGoodError):
                    found.extend(r for r in self._theirs(tier, lookup) if r not in found)
            if len(found) > len(ours):
                self._local.put_entry(lookup, self._sealed(lookup, found[:PER_LOOKUP]))
        return tuple(found)

    def add(self, lookup: str, data: bytes, limit: int = PER_LOOKUP) -> None:
        """Keep a recipe (JSON text) under a lookup key, in front of at most `limit - 1` others."""

        def merged(old: tuple[bytes, ...]) -> bytes:
            recipes = (data, *(text for text in old if text != data))
            return self._sealed(lookup, recipes[:limit])

        old = self._ours(lookup)
        if old[:1] != (data,):
            self._local.put_entry(lookup, merged(old))
        for tier in self._outer:
            if tier.writable:
                with contextlib.suppress(StoreError):
                    try:
                        theirs = self._theirs(tier, lookup)
                    except NoGoodError:
                        theirs = ()
                    if theirs[:1] != (data,):
                        tier.put_entry(lookup, merged(theirs), replace=True)

    def _sealed(self, lookup: str, recipes: Sequence[bytes]) -> bytes:
        payload = seal_recipes(lookup, tuple(recipes))
        return seal(payload, self._signer.sign(lookup, payload) if self._signer else None)

    def _ours(self, lookup: str) -> tuple[bytes, ...]:
        try:
            data = self._local.get_entry(lookup)
            if data is None:
                return ()
            recipes = unseal_recipes(lookup, unseal(data).payload)
        except (StoreError, ValueError) as error:
            self._reader.damaged_here(lookup, error)
            return ()
        self._local.touch(lookup)
        return recipes

    def _theirs(self, tier: Tier, lookup: str) -> tuple[bytes, ...]:
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
        return recipes
