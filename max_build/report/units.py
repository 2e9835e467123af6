"""Numbers as a reader wants them."""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["clock", "moment", "plural", "seconds"]


def seconds(value: float) -> str:
    """`<1 ms`, `12 ms`, `3.4 s`, `2 min 5 s`, `3 h 20 min`."""
    if value < 0.001:
        return "<1 ms" if value > 0 else "0 s"
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def clock(value: float) -> str:
    """A point of a build's time: `0 s`, `250 ms`, `12.5 s`, `2:05`."""
    if value < 60:
        return f"{1000 * value:.0f} ms" if 0 < value < 1 else f"{round(value, 1):g} s"
    return f"{int(value) // 60}:{int(value) % 60:02}"


def moment(since_1970: float) -> tuple[str, str]:
    """A time for a machine (ISO 8601) and for a reader (UTC)."""
    when = datetime.fromtimestamp(since_1970, UTC)
    return when.isoformat(timespec="seconds"), when.strftime("%Y-%m-%d %H:%M UTC")


def plural(count: int, word: str) -> str:
    """`1 unit`, `1,200 units`, `2 misses`."""
    ending = "es" if word.endswith("s") else "s"
    return f"{count:,} {word}{ending * (count != 1)}"
