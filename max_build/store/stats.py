"""What the cache did, in numbers."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import msgspec

from max_build.store.index import Memo

__all__ = ["Stats", "Totals", "load_totals", "prometheus", "save"]

_TRIES = 3  # of a second each, where another process holds the index


class Totals(msgspec.Struct, frozen=True):
    """Counters, summed.

    `hits` by tier, `misses` by reason, `faults` by `tier/kind`, `received` and `sent` in bytes by
    tier; `seconds_saved` is what the hits had cost to compile.
    """

    hits: dict[str, int] = {}
    misses: dict[str, int] = {}
    faults: dict[str, int] = {}
    received: dict[str, int] = {}
    sent: dict[str, int] = {}
    seconds_saved: float = 0.0
    builds: int = 0

    def __add__(self, other: Totals) -> Totals:
        def both(name: str) -> dict[str, int]:
            return dict(Counter(getattr(self, name)) + Counter(getattr(other, name)))

        return Totals(
            hits=both("hits"),
            misses=both("misses"),
            faults=both("faults"),
            received=both("received"),
            sent=both("sent"),
            seconds_saved=self.seconds_saved + other.seconds_saved,
            builds=self.builds + other.builds,
        )


class Stats:
    """The counters of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.faults: Counter[tuple[str, str]] = Counter()
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.seconds_saved = 0.0
        self._lock = threading.Lock()

    def hit(self, tier: str, seconds: float) -> None:
        """Count a hit that took the place of a compile of `seconds`."""
        with self._lock:
            self.hits[tier] += 1
            self.seconds_saved += seconds

    def miss(self, reason: str) -> None:
        """Count a miss."""
        with self._lock:
            self.misses[reason] += 1

    def fault(self, tier: str, kind: str) -> None:
        """Count a fault that was worked around."""
        with self._lock:
            self.faults[tier, kind] += 1

    def moved(self, tier: str, *, received: int = 0, sent: int = 0) -> None:
        """Count raw bytes of blobs that came from a tier or went to it."""
        with self._lock:
            self.received[tier] += received
            self.sent[tier] += sent

    def totals(self) -> Totals:
        """The counters as data."""
        with self._lock:
            return Totals(
                hits=dict(self.hits),
                misses=dict(self.misses),
                faults={f"{tier}/{kind}": n for (tier, kind), n in sorted(self.faults.items())},
                received=dict(+self.received),
                sent=dict(+self.sent),
                seconds_saved=self.seconds_saved,
                builds=1,
            )


def load_totals(memo: Memo, name: str = "ever") -> Totals:
    """The totals kept as `ever` or `last`; empty if there are none."""
    return _decode(memo.get("stats", name))


def save(memo: Memo, stats: Stats) -> None:
    """Add this process's counters to what is kept, if it counted anything."""
    totals = stats.totals()
    looked_up = totals.hits or totals.misses or totals.faults
    if not (looked_up or totals.received or totals.sent):
        return
    for _ in range(_TRIES):
        if memo.update("stats", "ever", lambda old: msgspec.json.encode(_decode(old) + totals)):
            break
    if looked_up:
        memo.set("stats", "last", msgspec.json.encode(totals))


def prometheus(totals: Totals) -> str:
    """The totals in the Prometheus text format."""
    families = (
        ("hits_total", "tier", "Lookups answered, by tier.", totals.hits),
        ("misses_total", "reason", "Lookups not answered, by reason.", totals.misses),
        ("received_bytes_total", "tier", "Raw bytes of blobs read from a tier.", totals.received),
        ("sent_bytes_total", "tier", "Raw bytes of blobs written to a tier.", totals.sent),
    )
    lines: list[str] = []

    def family(name: str, text: str, values: list[tuple[str, Any]]) -> None:
        lines.append(f"# HELP max_build_{name} {text}")
        lines.append(f"# TYPE max_build_{name} counter")
        lines.extend(f"max_build_{name}{labels} {value}" for labels, value in values)

    for name, label, text, values in families:
        family(name, text, [(f'{{{label}="{key}"}}', values[key]) for key in sorted(values)])
    faults = [(key.split("/", 1), count) for key, count in sorted(totals.faults.items())]
    family(
        "faults_total",
        "Faults worked around, by tier and kind.",
        [(f'{{tier="{tier}",kind="{kind}"}}', count) for (tier, kind), count in faults],
    )
    family("saved_seconds_total", "Compile time of what was hit.", [("", totals.seconds_saved)])
    family("builds_total", "Processes that used the cache.", [("", totals.builds)])
    return "\n".join(lines) + "\n"


def _decode(data: bytes | None) -> Totals:
    try:
        return msgspec.json.decode(data or b"{}", type=Totals)
    except msgspec.DecodeError:
        return Totals()
