"""What must hold of the events of a stress, whatever its chance was.

Each thing that went wrong needs a cause among those that the stress itself set: a gc, a damage, a
kill. What has none is a fault of max-build's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
from events import (
    AnyEvent,
    Bad,
    Closed,
    Closing,
    Collected,
    Compiled,
    Damaged,
    Found,
    Killed,
    Lost,
    Planned,
    Published,
    Verified,
)
from ground import OUTER, Ground

from max_build.store.stats import Totals

DRIVER = -1
_LATE = 60.0  # seconds that a process may stand still between a look and a deed


class Verdict(msgspec.Struct, frozen=True):
    """What was counted, and what nobody can explain."""

    counts: Mapping[str, int]
    problems: Sequence[str]


class _Loss(msgspec.Struct, frozen=True):
    """Names that may have gone from a place, or gone bad there, between two times."""

    begin: float
    end: float
    place: str
    names: frozenset[str]
    damage: Damaged | None = None


def judge(ground: Ground, logs: Mapping[int, Sequence[AnyEvent]]) -> Verdict:
    """Judge the logs of all actors, by number, and the driver's, which is `DRIVER`."""
    events = [event for log in logs.values() for event in log]
    losses = _losses(logs)
    problems = [
        *_reading(events, losses),
        *_verifying(events, losses),
        *_compiling(ground, logs, losses),
        *_counting(events, losses),
    ]
    return Verdict(_counts(events), problems)


def closed(log: Sequence[AnyEvent]) -> tuple[list[Closing], list[Closing]]:
    """The caches of an actor whose counters are kept, and those of which nobody can say.

    These are one that it may have died in closing, and those with an index that another process
    held for seconds.
    """
    sure: list[Closing] = []
    unsure: list[Closing] = []
    for event in log:
        if isinstance(event, Closing):
            unsure.append(event)
        elif isinstance(event, Closed) and not event.failures:
            sure.append(unsure.pop())
    return sure, unsure


def total(closings: Iterable[Closing]) -> Totals:
    """The counters of several caches."""
    return sum((one.totals for one in closings), start=Totals())


def _losses(logs: Mapping[int, Sequence[AnyEvent]]) -> list[_Loss]:
    found = []
    killed = {event.actor: event.at for event in logs[DRIVER] if isinstance(event, Killed)}
    for number, log in logs.items():
        for at, event in enumerate(log):
            if isinstance(event, Planned):
                end = log[at + 1].at if at + 1 < len(log) else killed.get(number, event.at)
                names = frozenset({*event.keys, *event.digests})
                found.append(_Loss(event.at, end, event.place, names))
            elif isinstance(event, Damaged):
                found.append(
                    _Loss(event.since, event.at, event.place, frozenset({event.name}), event)
                )
    return found


def _reading(events: Sequence[AnyEvent], losses: Sequence[_Loss]) -> Iterable[str]:
    for event in events:
        if isinstance(event, Bad):
            # Damaged in place under the reader's eyes: nobody can help that.
            excused = any(
                loss.damage
                and event.digest in loss.names
                and loss.begin <= event.at
                and loss.end >= event.since
                for loss in losses
            )
            if not excused:
                yield f"wrong bytes: {event}"
        elif isinstance(event, Lost):
            excused = any(
                event.digest in loss.names
                and loss.place == str(event.machine)
                and loss.begin <= event.at
                and loss.end >= event.since - (_LATE if loss.damage else 0)
                for loss in losses
            )
            if not excused:
                yield f"gone although nothing took it: {event}"


def _verifying(events: Sequence[AnyEvent], losses: Sequence[_Loss]) -> Iterable[str]:
    by_place = defaultdict(list)
    for loss in losses:
        by_place[loss.place].append(loss)
        if loss.damage and loss.place != OUTER:
            by_place[OUTER].append(loss)  # done between the last look and the sending
    for event in events:
        if isinstance(event, Found):
            # An entry is named in full, the blob that it lacks by its beginning.
            excused = any(
                loss.begin <= event.at
                and (
                    (event.name in loss.names and loss.damage is not None)
                    or (
                        event.kind == "ac"
                        and any(f" {name[:12]}," in event.problem for name in loss.names)
                    )
                )
                for loss in by_place[event.place]
            )
            if not excused:
                yield f"damaged although nobody did it: {event}"


def _compiling(
    ground: Ground, logs: Mapping[int, Sequence[AnyEvent]], losses: Sequence[_Loss]
) -> Iterable[str]:
    """Each key once, unless its result was lost from where all would find it."""
    place = OUTER if ground.outer else "0"
    compiles: dict[str, list[tuple[Compiled, float]]] = defaultdict(list)
    for log in logs.values():
        published = {event.digest: event.at for event in log if isinstance(event, Published)}
        for event in log:
            if isinstance(event, Compiled):
                done = published.get(event.digests[0], float("inf"))
                compiles[event.key].append((event, done))
    for key, found in compiles.items():
        found.sort(key=lambda one: one[0].at)
        start = 0.0
        for (one, done), (other, _) in pairwise(found):
            if done <= other.at:
                names = {key, *one.digests}
                excused = any(
                    names & loss.names
                    # From the compile before on: what was found bad then may be set aside only
                    # now, when a good one has taken its place.
                    and (
                        (loss.place == place and loss.begin <= other.at and loss.end >= start)
                        # Gone before it could be sent on.
                        or (
                            loss.place == str(one.machine)
                            and loss.begin <= done
                            and loss.end >= one.at
                        )
                    )
                    for loss in losses
                )
                if not excused:
                    yield f"compiled again for no reason: {one} (done {done}), {other}"
            elif done < float("inf") and one.machine == other.machine:
                yield f"compiled by two at once: {one} (done {done}), {other}"
            # Else it was killed in publishing, or two machines did not see each other.
            start = one.at


def _counting(events: Sequence[AnyEvent], losses: Sequence[_Loss]) -> Iterable[str]:
    damaged = [loss.damage for loss in losses if loss.damage]
    for event in events:
        if isinstance(event, Closing):
            totals = event.totals
            if sum(totals.hits.values()) + sum(totals.misses.values()) != event.lookups:
                yield f"hits and misses are not {event.lookups} lookups: {totals}"
            kinds = {fault.partition("/")[2] for fault in totals.faults}
            if kinds - {"corrupt"} or len(event.warnings) != len(totals.faults):
                yield f"unexplained faults {totals.faults}: {event.warnings}"
            # A process tells of the first of each kind, and of what it was.
            for warning in event.warnings:
                if not any(one.since <= event.at and one.name[:12] in warning for one in damaged):
                    yield f"unexplained warning: {warning}"


def _counts(events: Sequence[AnyEvent]) -> dict[str, int]:
    closings = [event for event in events if isinstance(event, Closing)]
    summed = total(closings)
    keys: Counter[str] = Counter(event.key for event in events if isinstance(event, Compiled))
    return {
        "kills": sum(isinstance(event, Killed) for event in events),
        "lookups": sum(one.lookups for one in closings),
        "hits": sum(summed.hits.values()),
        "misses": sum(summed.misses.values()),
        "compiles": keys.total(),
        "keys": len(keys),
        "files read": sum(one.checked for one in closings),
        "collections": sum(isinstance(event, Collected) for event in events),
        "evictions": sum(event.entries for event in events if isinstance(event, Collected)),
        "damages": sum(isinstance(event, Damaged) for event in events),
        "damage met by readers": sum(summed.faults.values()),
        "damage met by verify": sum(isinstance(event, Found) for event in events),
        "verifications": sum(isinstance(event, Verified) for event in events),
        "index held too long": sum(event.failures for event in events if isinstance(event, Closed)),
        "lost after a hit": sum(isinstance(event, Lost) for event in events),
        "damaged in the reader's hand": sum(isinstance(event, Bad) for event in events),
        "bytes received": sum(summed.received.values()),
        "bytes sent": sum(summed.sent.values()),
    }
