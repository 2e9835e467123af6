"""When all is quiet: what is left of a stress, and whether the cache still does its work."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from actor import common, names
from events import AnyEvent, Killed
from ground import Ground
from judge import DRIVER, closed, total

from max_build.key import digest
from max_build.record import Record
from max_build.store import CacheSettings, open_cache
from max_build.store.directory import DirectoryStore
from max_build.store.gc import gc
from max_build.store.index import Memo
from max_build.store.stats import Totals, load_totals
from max_build.store.verify import verify

_PASSING = ("tmp", "lock", "lease")
_PER_KILL = 4  # names of one process at once: a lock, a folder, two files
_MORE = 4  # units that nobody has built yet
_LONG = 30 * 86400.0


def census(ground: Ground, logs: Mapping[int, Sequence[AnyEvent]]) -> list[str]:
    """What is not as it should be."""
    problems = [*_kept(ground, logs)]
    stores = [ground.place(n) for n in range(len(ground.machines))]
    if ground.outer == "shared":
        stores.append(DirectoryStore(Path(ground.machines[0].shared), "shared", shared=True))
    kills = sum(isinstance(event, Killed) for event in logs[DRIVER])
    for store in stores:
        problems += _left(store, kills)
        verify(store)
        problems += [f"not repaired: {one}" for one in verify(store).findings]
    if ground.outer == "remote" and ground.lists:
        verify(ground.outside())
        problems += [f"not repaired: {one}" for one in verify(ground.outside()).findings]
    for settings in ground.machines:
        problems += _served(ground, settings)
    if ground.outer:
        problems += _newcomer(ground)
    problems += [f"left behind by nobody killed: {path}" for s in stores for path in _passing(s)]
    return problems


def _kept(ground: Ground, logs: Mapping[int, Sequence[AnyEvent]]) -> list[str]:
    """Whether what the directories count is the sum of what was counted by who closed."""
    problems = []
    for number, settings in enumerate(ground.machines):
        sure, unsure = [], []
        for log in logs.values():
            done, dying = closed(log)
            sure += [one for one in done if one.machine == number]
            unsure += [one for one in dying if one.machine == number]
        memo = Memo(Path(settings.dir) / "index")
        kept = load_totals(memo)
        memo.close()
        least = _numbers(total(sure))
        most = _numbers(total([*sure, *unsure]))
        got = _numbers(kept)
        for name in sorted({*least, *most, *got}):
            slack = 1e-6 * (name == "saved")  # seconds, summed up in another order
            if not least.get(name, 0) - slack <= got.get(name, 0) <= most.get(name, 0) + slack:
                problems.append(
                    f"machine {number} counts {got.get(name, 0)} of {name}, "
                    f"its processes {least.get(name, 0)} to {most.get(name, 0)}"
                )
    return problems


def _numbers(totals: Totals) -> dict[str, float]:
    found = {"builds": float(totals.builds), "saved": totals.seconds_saved}
    for family in ("hits", "misses", "faults", "received", "sent"):
        for name, count in getattr(totals, family).items():
            found[f"{family} {name}"] = count
    return found


def _left(store: DirectoryStore, kills: int) -> list[str]:
    """Whether only the killed left files behind, and a gc takes them when their time is over."""
    left = _passing(store)
    problems = []
    if len(left) > _PER_KILL * kills:
        problems.append(f"{len(left)} temporary files of {kills} killed processes: {left}")
    for path in left:
        past = time.time() - _LONG
        os.utime(path, (past, past), follow_symlinks=False)
    gc(store)
    problems += [f"gc leaves {path}" for path in _passing(store)]
    return problems


def _passing(store: DirectoryStore) -> list[Path]:
    """What should not stay."""
    found = [path for name in _PASSING for path in (store.root / name).glob("*")]
    return [*found, *store.root.glob("new-*")]


def _served(ground: Ground, settings: CacheSettings) -> list[str]:
    """Whether a build gets all units, and the next one finds them all here."""
    problems, counted = _build(ground, settings)
    again, totals = _build(ground, settings)
    problems += again
    if (
        totals.hits != {"local": ground.units + _MORE}
        or totals.misses
        or totals.received
        or totals.sent
    ):
        problems.append(f"built for the second time: {totals}")
    if totals.faults or (counted.faults and ground.lists):
        problems.append(f"faults where all was verified: {counted} {totals}")
    return problems


def _newcomer(ground: Ground) -> list[str]:
    """Whether a machine that has nothing gets all from the outer tier, to the byte."""
    # What was damaged outside, and a build of the machines above did not need, is healed by one.
    problems, _ = _build(ground, ground.newcomer("newcomer"))
    settings = ground.newcomer("next")
    again, totals = _build(ground, settings)
    stored = sum(item.size for item in DirectoryStore(Path(settings.dir)).list("cas"))
    if totals.hits != {ground.outer: ground.units + _MORE} or totals.received != {
        ground.outer: stored
    }:
        problems.append(f"a new machine got {totals}, and has {stored} bytes")
    if totals.faults:
        problems.append(f"faults where all was healed: {totals}")
    return [*problems, *again]


def _build(ground: Ground, settings: CacheSettings) -> tuple[list[str], Totals]:
    """Obtain every unit, and hold the counters against what was seen to happen."""
    from stress_worker import Files, drawn, obtain

    problems: list[str] = []
    outside = ground.outside() if ground.outer else None
    compiled = lacking = 0

    def compile_(name: str) -> tuple[Record, Files]:
        nonlocal compiled, lacking
        record, files = drawn(name, 5000, common(name))
        compiled += 1
        if outside is not None:
            lacking += sum(len(data) for blob, data in files.items() if not outside.has_blob(blob))
        return record, files

    with open_cache(settings) as cache:
        for name in names(ground.units + _MORE):
            record = obtain(cache, name, lambda name=name: compile_(name)).record
            for blob in record.blobs:
                data = cache.path(blob).read_bytes()
                if digest(data) != blob.digest or record.unit != name:
                    problems.append(f"wrong bytes in the end: {name} {blob}")
        totals = cache.stats.totals()
    if sum(totals.misses.values()) != compiled:
        problems.append(f"{compiled} compiled, but {totals}")
    sent = totals.sent.get(ground.outer, 0)
    # A blob that is there, but was found to be bad, is sent as well.
    if sent < lacking or (sent > lacking and not totals.faults):
        problems.append(f"{lacking} bytes were lacking outside, but {totals}")
    return problems, totals
