"""Damage, done on purpose: bytes and trees of values, altered by the choices of a `Random`.

One source of choices serves three engines: Hypothesis hands in a `Random` that it can shrink,
libFuzzer seeds one for each mutation it asks for, and the plain loop of `run.py` has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from forms import DEEP, Form

__all__ = ["mutated"]

_NUMBERS = (
    *(0, 1, -1, 2, 7, 8, 31, 32, 64, 127, 128, 255, 256, 1000, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64),
    *(10**30, -(2**63)),
)
_TEXTS = (
    *("", " ", "\0", "\n", "a", ".", "..", "/", "../sentinel", "/nowhere", "a/../../b"),
    *("\ud800", "\u202e", "é", "\U0001f600", "x" * 300, "0" * 64, "g" * 64, "0" * 63, "F" * 64),
    *("1", "-1", "1e999", "nan", "true", "null", "%s", "{}", "$(x)", "^(", "[", "*"),
    *("~no-such-user/x", "~", "a\0b"),
    *("http://[", "https://x:y@[::1", "file://[x", "s3://", "http://\0", "http://h:99999/"),
    *("cpu", "sm_90a", "native", "mef", "9" * 400, "9" * 5000),
)
_OTHERS: tuple[Any, ...] = (
    *(None, True, False, 0.5, 1e308, -0.0, float("inf"), float("nan"), (), {}, DEEP),
)


def mutated(
    data: bytes,
    chance: Random,
    forms: Sequence[Form] = (),
    tokens: Sequence[bytes] = (),
    others: Sequence[bytes] = (),
) -> bytes:
    """`data` with a few things changed.

    Parameters
    ----------
    forms
        Ways to see `data` as a tree; half of the changes are made to one, where it has that form.
    tokens
        Pieces of bytes that mean something in it.
    others
        Inputs of the same kind, to take pieces from.
    """
    if forms and chance.random() < 0.6:
        form = chance.choice(forms)
        try:
            tree = form.open(data)
            for _ in range(chance.choice((1, 1, 1, 2, 4))):
                tree = _tree(tree, chance, tree)
            return form.close(tree)
        except Exception:  # noqa: BLE001 - whatever a form's own libraries make of it
            pass  # it has not that form, or cannot be written in it any more
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        data = _bytes(data, chance, tokens, others)
    return data


def _tree(value: Any, chance: Random, whole: Any) -> Any:
    """The value with one thing changed, somewhere in it."""
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        if chance.random() < 0.75:
            return {**value, key: _tree(value[key], chance, whole)}
        kept = {name: one for name, one in value.items() if name != key}
        how = chance.randrange(4)
        if how == 0:
            return kept
        if how == 1:
            return {**kept, chance.choice(_TEXTS): value[key]}
        if how == 2:
            return {**value, key: _somewhere(whole, chance)}
        return {**value, chance.choice((*_TEXTS, *value)): _leaf(chance)}
    if isinstance(value, list) and value:
        at = chance.randrange(len(value))
        if chance.random() < 0.7:
            return [*value[:at], _tree(value[at], chance, whole), *value[at + 1 :]]
        how = chance.randrange(4)
        new = ([], [value[at]] * 2, [_somewhere(whole, chance)], [_leaf(chance), value[at]])[how]
        return [*value[:at], *new, *value[at + 1 :]]
    if isinstance(value, bytes) and chance.random() < 0.9:
        return _bytes(value, chance)
    if isinstance(value, str) and chance.random() < 0.6:
        raw = _bytes(value.encode("utf-8", "surrogatepass"), chance)
        return raw.decode("utf-8", "replace")
    if type(value) is int and chance.random() < 0.5:
        return value + chance.choice((-1, 1, 8, 1 << 32))
    return _leaf(chance)


def _leaf(chance: Random) -> Any:
    return chance.choice(chance.choice((_NUMBERS, _TEXTS, _OTHERS)))


def _somewhere(value: Any, chance: Random) -> Any:
    """Some part of a tree."""
    while isinstance(value, dict | list) and value and chance.random() < 0.7:
        value = chance.choice(list(value.values()) if isinstance(value, dict) else value)
    return value


def _bytes(
    data: bytes, chance: Random, tokens: Sequence[bytes] = (), others: Sequence[bytes] = ()
) -> bytes:
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 1, 2, 4, 8, 16, 64)))
    how = chance.randrange(9)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + data[end:]
    if how == 2:
        return data[:end] + data[at:]
    if how == 3:
        word = _word(chance)
        at -= at % len(word)
        return data[:at] + word + data[at + len(word) :]
    if how == 4 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if how == 5 and tokens:
        return data[:at] + chance.choice(tokens) + data[chance.choice((at, end)) :]
    if how == 6 and others:
        other = chance.choice(others)
        begin = chance.randrange(len(other) + 1)
        return data[:at] + other[begin : begin + chance.choice((8, 64, 1 << 20))] + data[end:]
    if how == 7:
        begin = chance.randrange(len(data) + 1)
        return data[:at] + data[begin : begin + end - at] + data[end:]
    new = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 5)))
    return data[:at] + new + data[chance.choice((at, end)) :]


def _word(chance: Random) -> bytes:
    size = chance.choice((1, 2, 4, 4, 8, 8))
    number = chance.choice(_NUMBERS) % (1 << 8 * size)
    return number.to_bytes(size, chance.choice(("little", "little", "little", "big")))
