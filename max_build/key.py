"""Components → canonical encoding → key: the pure core that decides what a hit is.

A key is the SHA-256 of everything that decides an artifact's bytes, and of nothing else: no
absolute path, user, host name, device ordinal, time or cache location ever enters it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

__all__ = [
    "KEY_SCHEMA",
    "Components",
    "canonical",
    "changes",
    "digest",
    "encodable",
    "key_of",
    "parsed",
]

T = TypeVar("T")

KEY_SCHEMA = 1
"""Raised whenever the meaning of a component changes; it is the first thing hashed."""


class Components(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides an artifact's bytes, by name.

    Every leaf is a string, so that the encoding is typed and injective without further rules:
    `1`, `1.0` and `"1"` cannot meet in a key, since a compiler has to spell what it means.

    Parameters
    ----------
    schema
        `KEY_SCHEMA` of the writer.
    compiler
        Name and full build of each tool: `{"max": "26.7.0", "max-core": "26.7.0+<digest>"}`.
    target
        The exact target, suffix included: `sm_90a`.
    host
        The baseline of the host code in the artifact (`x86-64-v3`), empty where it holds none.
    options
        Canonical options: equal effect, equal text.
    sources
        Label → SHA-256 (hex) of what is compiled: `{"ir": …}`, `{"source": …}`.
    dependencies
        Label → digest of what the sources reach: headers, kernel libraries.
    environment
        The variables the compiler reads, where they are set.
    """

    schema: int = KEY_SCHEMA
    compiler: dict[str, str]
    target: str
    host: str = ""
    options: dict[str, str] = {}
    sources: dict[str, str]
    dependencies: dict[str, str] = {}
    environment: dict[str, str] = {}


def canonical(value: Any) -> bytes:
    """Encode `value` as JSON with sorted keys, no spaces and every field present.

    Deterministic for Structs, mappings with string keys, sequences, strings, integers and
    booleans, which is all that keys, records, recipes and manifests hold.
    """
    return msgspec.json.encode(value, order="sorted")


def parsed(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode JSON that may have come from anywhere.

    Raises
    ------
    ValueError
        Whatever is wrong with it, be it that it nests deeper than the stack.
    """
    try:
        return decoder.decode(data)
    except RecursionError:
        message = "JSON nests too deeply"
        raise ValueError(message) from None


def encodable(text: str) -> bool:
    """Whether text is UTF-8, as what came from the system or out of JSON need not be."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def digest(data: bytes | bytearray | memoryview) -> str:
    """SHA-256 of `data` in lower-case hex: the name of a blob, and of anything that is shared."""
    return hashlib.sha256(data, usedforsecurity=False).hexdigest()


def key_of(components: Components) -> str:
    """The key of `components`: SHA-256 (hex) of their canonical encoding, schema first."""
    prefix = f"max-build key {components.schema}\n".encode()
    return digest(prefix + canonical(components))


def changes(old: Components, new: Components) -> tuple[tuple[str, str, str], ...]:
    """List `(component, before, after)` for each leaf that differs, sorted by name.

    A leaf that one side lacks is the empty string there. Empty when the keys are equal.
    """
    before, after = _leaves(old), _leaves(new)
    return tuple(
        (name, before.get(name, ""), after.get(name, ""))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    )


def _leaves(components: Components) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in components.__struct_fields__:
        value = getattr(components, field)
        if isinstance(value, Mapping):
            found.update((f"{field}.{name}", text) for name, text in value.items())
        else:
            found[field] = str(value)
    return found
