"""One operation of a store that holds 1,000, 10,000 and 100,000 entries, beside its peers.

    python tests/benchmarks/bench_entries.py [--quick] [--json FILE]

An entry is a record and a blob of 4 kB. The peers hold the blob alone: plain files, written beside
and moved in after an fsync as ours are, and diskcache, which syncs less.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import diskcache
import measure
from measure import Figure, at_most, process, ratio_at_most, say, timed, turns

from max_build.record import Blob, Record, encode
from max_build.store import Cache, CacheSettings, Hit, Miss, open_cache
from max_build.store.directory import DirectoryStore
from max_build.store.entry import seal
from max_build.testing.store import example

SIZES = (1_000, 10_000, 100_000)
QUICK = (25, 50, 100)
BYTES = 4096
OLD = 7 * 86400.0
TENTH = 10
"""One in so many is old, and goes with a gc."""

GC = """
import sys, time
from pathlib import Path
from max_build.store.directory import DirectoryStore
from max_build.store.gc import collect, plan
from max_build.store.survey import survey
store = DirectoryStore(Path(sys.argv[1]))
started = time.perf_counter()
what = plan(survey(store), max_age=float(sys.argv[2]))
planned = time.perf_counter() - started
collect(store, what)
print(time.perf_counter() - started, planned)
"""
VERIFY = """
import sys, time
from pathlib import Path
from max_build.store.directory import DirectoryStore
from max_build.store.verify import verify
store = DirectoryStore(Path(sys.argv[1]))
started = time.perf_counter()
found = verify(store, repair=False)
print(time.perf_counter() - started)
assert not found.findings
"""
OPEN = """
import sys, time
from max_build.store import CacheSettings, open_cache
started = time.perf_counter()
cache = open_cache(CacheSettings(dir=sys.argv[1]))
opened = time.perf_counter() - started
cache.lookup(sys.argv[2])
print(opened, time.perf_counter() - started)
"""


def figures(quick: bool) -> Iterator[Figure]:
    """Each operation at each size, and how the largest compares with the smallest."""
    sizes = QUICK if quick else SIZES
    costs: dict[str, dict[int, Sequence[float]]] = {}
    for size in sizes:
        with measure.scratch() as base:
            for operation, row in _at(base, size, *((2, 5) if quick else (7, 100))):
                yield row
                if operation:
                    costs.setdefault(operation, {})[size] = row.ours
    small, large = sizes[0], sizes[-1]
    for operation, found in costs.items():
        what, peer = f"{operation}: among {large:,}", f"among {small:,}"
        unit = "MB" if "memory" in operation else "ms" if operation == "open" else "us"
        yield Figure(what, unit, found[large], peer, found[small], ratio_at_most(1.5))


@dataclass(frozen=True, slots=True)
class Item:
    """What is put and got: a record of ours, and its blob."""

    record: Record
    data: bytes

    @classmethod
    def of(cls, number: int) -> Item:
        data = random.Random(number).randbytes(BYTES)
        return cls(example(str(number), data), data)

    @property
    def blob(self) -> Blob:
        return self.record.blobs[0]


class Contender(Protocol):
    """A store that was filled with the items of `range(size)`, every tenth one old."""

    def put(self, item: Item) -> object: ...
    def get(self, item: Item) -> object: ...
    def lookup(self, item: Item) -> object: ...
    def miss(self, item: Item) -> object: ...
    def verify(self) -> float:
        """Seconds for everything, read and checked."""

    def gc(self) -> float:
        """Seconds for the old ones to go, and all to be looked at."""


def _at(base: Path, size: int, rounds: int, each: int) -> Iterator[tuple[str, Figure]]:
    """The figures of one size, each after the name that it has at every size."""
    say(f"a store of {size:,} entries, and its peers")
    pick = random.Random(size)
    fresh = iter(range(size, sys.maxsize))
    # As many at every size: the rest only fills the directories.
    asked = pick.sample(range(size), min(size, SIZES[0]))
    root = base / "ours"
    _fill(root, size)
    with open_cache(CacheSettings(dir=str(root))) as cache:
        names = ("max-build", "plain files", "diskcache")
        own = Ours(cache)
        stores: list[Contender] = [
            own, Plain(base / "plain", size), Indexed(base / "diskcache", size)
        ]  # fmt: skip

        def run(store: Contender, operation: str) -> float:
            """Microseconds of one, of several."""
            numbers = (
                next(fresh) if operation in ("put", "miss") else pick.choice(asked)
                for _ in range(each)
            )
            items = [Item.of(number) for number in numbers]
            action = getattr(store, operation)
            return 1e6 * timed(lambda: [action(item) for item in items]) / each

        for operation in ("put", "get", "lookup", "miss"):
            found = turns(
                rounds,
                **{
                    name: lambda store=store, operation=operation: run(store, operation)
                    for name, store in zip(names, stores, strict=True)
                },
            )
            for peer in names[1:]:
                what = f"{operation} among {size:,}"
                yield operation, Figure(what, "us", found[names[0]], peer, found[peer])
        for operation in ("verify", "gc"):
            ours, *theirs = ([1e6 * getattr(store, operation)() / size] for store in stores)
            for peer, its in zip(names[1:], theirs, strict=True):
                what = f"{operation} of {size:,}, per entry"
                yield f"{operation}, per entry", Figure(what, "us", ours, peer, its)
            peak = own.peaks[operation]
            what = f"{operation}, peak memory"
            yield what, Figure(f"{operation} of {size:,}: peak memory", "MB", [peak])
        limit = at_most(5000) if size == SIZES[-1] else None
        plan = Figure(f"gc of {size:,}: the plan alone", "ms", [1e3 * own.planned], target=limit)
        yield "", plan
    opened = [process([sys.executable, "-c", OPEN, root, Item.of(0).record.key]) for _ in range(5)]
    took = [1e3 * float(one.out.split()[0]) for one in opened]
    yield "open", Figure(f"open, of {size:,}", "ms", took, target=at_most(20))


def _fill(root: Path, size: int) -> None:
    """A local tier, written behind its back."""
    root.mkdir(mode=0o700)
    store = DirectoryStore(root)
    store.folder("tmp")
    for number in range(size):
        item = Item.of(number)
        files = {
            store.path("cas", item.blob.digest): item.data,
            store.path("ac", item.record.key): seal(encode(item.record)),
        }
        for path, data in files.items():
            _write(path, data, old=number % TENTH == 0)


def _write(path: Path, data: bytes, *, old: bool) -> None:
    try:
        path.write_bytes(data)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True)
        path.write_bytes(data)
    if old:
        when = time.time() - OLD
        os.utime(path, (when, when))


class Ours:
    """The local tier of a cache; it verifies what it looks up."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.peaks: dict[str, float] = {}
        self.planned = 0.0

    def put(self, item: Item) -> None:
        self.cache.publish(item.record, {item.blob.digest: item.data})

    def get(self, item: Item) -> bytes:
        found = self.cache.lookup(item.record.key)
        assert isinstance(found, Hit)
        return self.cache.path(found.record.blobs[0]).read_bytes()

    def lookup(self, item: Item) -> None:
        assert isinstance(self.cache.lookup(item.record.key), Hit)

    def miss(self, item: Item) -> None:
        assert isinstance(self.cache.lookup(item.record.key), Miss)

    def verify(self) -> float:
        return self._run("verify", VERIFY)

    def gc(self) -> float:
        return self._run("gc", GC)

    def _run(self, name: str, program: str) -> float:
        assert self.cache.root is not None
        ended = process([sys.executable, "-c", program, self.cache.root, OLD / 2])
        self.peaks[name] = ended.peak_mb
        seconds, *more = map(float, ended.out.split())
        self.planned = more[0] if more else 0.0
        return seconds


class Plain:
    """Files in 256 folders, written beside and moved in after an fsync."""

    def __init__(self, root: Path, size: int) -> None:
        self.root = root
        for number in range(size):
            item = Item.of(number)
            _write(self._place(item), item.data, old=number % TENTH == 0)

    def put(self, item: Item) -> None:
        place = self._place(item)
        beside = self.root / f"{item.record.key}.tmp"
        with beside.open("wb") as file:
            file.write(item.data)
            file.flush()
            os.fsync(file.fileno())
        place.parent.mkdir(exist_ok=True)
        beside.rename(place)

    def get(self, item: Item) -> bytes:
        return self._place(item).read_bytes()

    def lookup(self, item: Item) -> None:
        assert self._place(item).exists()

    def miss(self, item: Item) -> None:
        assert not self._place(item).exists()

    def verify(self) -> float:
        def read() -> None:
            for folder in os.scandir(self.root):
                for one in os.scandir(folder.path):
                    hashlib.sha256(Path(one.path).read_bytes()).digest()

        return timed(read)

    def gc(self) -> float:
        def sweep() -> None:
            found = [
                (one.stat().st_mtime, one.path)
                for folder in os.scandir(self.root)
                for one in os.scandir(folder.path)
            ]
            for when, path in sorted(found):
                if time.time() - when > OLD / 2:
                    os.unlink(path)

        return timed(sweep)

    def _place(self, item: Item) -> Path:
        return self.root / item.record.key[:2] / item.record.key


class Indexed:
    """diskcache, which holds values of this size in its database."""

    def __init__(self, root: Path, size: int) -> None:
        self.cache = diskcache.Cache(str(root), size_limit=1 << 40)
        with self.cache.transact():
            for number in range(size):
                item = Item.of(number)
                expire = None if number % TENTH else OLD
                self.cache.set(item.record.key, item.data, expire=expire)

    def put(self, item: Item) -> None:
        self.cache.set(item.record.key, item.data)

    def get(self, item: Item) -> bytes:
        return self.cache.get(item.record.key)

    def lookup(self, item: Item) -> None:
        assert item.record.key in self.cache

    def miss(self, item: Item) -> None:
        assert item.record.key not in self.cache

    def verify(self) -> float:
        return timed(self.cache.check)

    def gc(self) -> float:
        return timed(lambda: self.cache.expire(now=time.time() + 2 * OLD))


if __name__ == "__main__":
    measure.main("store", figures, __doc__)
