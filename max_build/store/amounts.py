"""Sizes and ages, as people write them."""

from __future__ import annotations

import re

__all__ = ["parse_age", "parse_size", "show_size"]

_SIZES = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_size(text: str) -> int:
    """Bytes of `500M`, `20GB`, `20 GiB`.

    Raises
    ------
    ValueError
        If it is none of that form, or takes more than 63 bits.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    scale = (_SIZES | _BINARY).get(match[2]) if match else None
    size = float(match[1]) * scale if match and scale else float("inf")
    if size >= 1 << 63:
        message = f"a size is a number with K, M, G, T or KiB, MiB, GiB, TiB, got {text!r}"
        raise ValueError(message)
    return int(size)


def parse_age(text: str) -> float:
    """Seconds of `90s`, `15m`, `12h`, `30d`, `8w`.

    Raises
    ------
    ValueError
        If it is none of that form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if match is None:
        message = f"an age is a number with s, m, h, d or w, got {text!r}"
        raise ValueError(message)
    return float(match[1]) * _AGES[match[2]]


def show_size(count: float) -> str:
    """A number of bytes to three digits or so."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
