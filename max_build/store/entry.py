"""The envelope of everything under `ac/`: one line of payload, one line that vouches for it.

    {"blobs": …, "key": …}                                  the payload, canonical JSON
    {"schema":1,"sha256":"…","signatures":{"ci":"…"}}       of exactly the first line

A record names its blobs by digest; this is what protects the rest of it (shapes, entry points)
from a flipped bit, and tells a cut file from a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from max_build.key import canonical, digest, parsed

__all__ = [
    "ENTRY_SCHEMA",
    "Named",
    "Sealed",
    "holds_recipes",
    "named_blobs",
    "seal",
    "seal_recipes",
    "signed_text",
    "unseal",
    "unseal_recipes",
]

ENTRY_SCHEMA = 1


class Sealed(msgspec.Struct, frozen=True):
    """A payload as it was sealed, and the signatures that came with it: name → base64."""

    payload: bytes
    signatures: dict[str, str]


class Named(msgspec.Struct, frozen=True, gc=False):
    """A blob as a payload names it, unchecked."""

    digest: str
    role: str = ""
    size: int = 0


class _Trailer(msgspec.Struct, frozen=True):
    schema: int
    sha256: str
    signatures: dict[str, str] = {}


class _Recipes(msgspec.Struct, frozen=True):
    lookup: str
    recipes: tuple[str, ...]


class _Blobs(msgspec.Struct, frozen=True):
    blobs: tuple[Named, ...] = ()


_TRAILER = msgspec.json.Decoder(_Trailer)
_RECIPES = msgspec.json.Decoder(_Recipes)
_BLOBS = msgspec.json.Decoder(_Blobs)


def signed_text(key: str, payload: bytes) -> bytes:
    """What a signature is over: the kind of thing, the name it stands under, the payload."""
    return b"max-build entry %d\n%s\n%s" % (ENTRY_SCHEMA, key.encode(), payload)


def seal(payload: bytes, signatures: Mapping[str, str] | None = None) -> bytes:
    """The bytes of an entry. `payload` is JSON without line breaks."""
    trailer = _Trailer(ENTRY_SCHEMA, digest(payload), dict(signatures or {}))
    return b"%s\n%s\n" % (payload, canonical(trailer))


def unseal(data: bytes) -> Sealed:
    """Open an entry.

    Raises
    ------
    ValueError
        If it is cut, altered, or of another schema.
    """
    parts = data.split(b"\n")
    if len(parts) != 3 or parts[2]:
        message = "entry is not two lines"
        raise ValueError(message)
    try:
        trailer = parsed(parts[1], _TRAILER)
    except ValueError as error:
        message = f"entry has no readable second line: {error}"
        raise ValueError(message) from error
    if trailer.schema != ENTRY_SCHEMA:
        message = f"entry has schema {trailer.schema}, this max-build reads {ENTRY_SCHEMA}"
        raise ValueError(message)
    if digest(parts[0]) != trailer.sha256:
        message = "entry does not match its own digest"
        raise ValueError(message)
    return Sealed(parts[0], trailer.signatures)


def named_blobs(payload: bytes) -> tuple[Named, ...]:
    """The blobs that a payload names, whether or not all of it is a record; recipes name none.

    Raises
    ------
    ValueError
        If it is not JSON, or names something else than blobs.
    """
    return parsed(payload, _BLOBS).blobs


def holds_recipes(payload: bytes) -> bool:
    """Whether a payload is of recipes, rather than a record."""
    return payload.startswith(b'{"lookup":')


def seal_recipes(lookup: str, recipes: tuple[bytes, ...]) -> bytes:
    """The payload that holds `recipes`, UTF-8 text each, under a lookup key."""
    return canonical(_Recipes(lookup, tuple(text.decode() for text in recipes)))


def unseal_recipes(lookup: str, payload: bytes) -> tuple[bytes, ...]:
    """The recipes in a payload.

    Raises
    ------
    ValueError
        If it holds none, or those of another lookup key.
    """
    try:
        found = parsed(payload, _RECIPES)
    except ValueError as error:
        message = f"recipes are not readable: {error}"
        raise ValueError(message) from error
    if found.lookup != lookup:
        message = f"recipes belong to {found.lookup[:12]}, not to {lookup[:12]}"
        raise ValueError(message)
    return tuple(text.encode() for text in found.recipes)
