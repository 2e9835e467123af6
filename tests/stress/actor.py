"""One process of a stress, which may be killed at any moment: `actor.py PART`.

A builder looks up and "compiles" what misses; a project builds a real kernel, edited now and then;
a loader looks up, maps and keeps what it mapped; a collector removes what was used longest ago; a
verifier reads everything again.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec
from events import (
    Bad,
    Closed,
    Closing,
    Collected,
    Compiled,
    Found,
    Log,
    Lost,
    Planned,
    Published,
    Verified,
    now,
)
from ground import OUTER, Ground

from max_build.errors import StoreError
from max_build.key import digest
from max_build.record import Blob, Record
from max_build.store import Cache, Hit, open_cache
from max_build.store.directory import DirectoryStore
from max_build.store.gc import collect, pins, plan
from max_build.store.survey import survey
from max_build.store.verify import verify
from max_build.testing.store import example

FAMILIES = 6
_HELD = 12
_EDITS = 8
_PER_CACHE = 40  # lookups, until an actor closes its cache and opens another


class Part(msgspec.Struct, frozen=True):
    """What one actor is to do, until the file `stop` is there."""

    number: int
    role: str
    machine: int
    seed: int
    stop: str
    max_size: int
    log: str
    ground: Ground


def common(name: str) -> bytes:
    """The blob that the units of a family share."""
    return f"family {family(name)} ".encode() * 2000


def family(name: str) -> int:
    return int(name.removeprefix("unit")) % FAMILIES


def names(count: int) -> list[str]:
    return [f"unit{n}" for n in range(count)]


def size(chance: Random) -> int:
    """Of a blob: mostly small, some large enough for the memo, a few for the other way to hash."""
    kind = chance.random()
    if kind < 0.8:
        return chance.randrange(200, 8000)
    return chance.randrange(70_000, 200_000) if kind < 0.96 else chance.randrange(2 << 20, 3 << 20)


class Held(msgspec.Struct, frozen=True):
    """A mapping, kept whatever becomes of its file."""

    digest: str
    mapping: mmap.mmap
    since: float


class Index(logging.Handler):
    """Counts what the index, whose failures cost nobody anything, logs of them."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.failures = 0
        log = logging.getLogger("max_build.store.index")
        log.setLevel(logging.DEBUG)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.failures += 1


class Actor:
    """Its chance, its log, and what it holds."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.chance = Random(part.seed)
        self.log = Log(Path(part.log))
        self.index = Index()
        self.held: deque[Held] = deque(maxlen=_HELD)
        self.names = names(part.ground.units)
        self.lookups = self.checked = 0

    def run(self) -> None:
        step = {
            "builder": lambda: self.use(self.build),
            "project": lambda: self.use(self.make),
            "loader": lambda: self.use(self.load),
            "collector": self.collect,
            "verifier": self.verify,
        }[self.part.role]
        while not self.over():
            step()

    def over(self) -> bool:
        return os.path.exists(self.part.stop)

    # --- those with a cache

    def use(self, act: Callable[[Cache, str], None]) -> None:
        """A cache's life: open, some lookups, close."""
        self.lookups = self.checked = self.index.failures = 0
        cache = open_cache(self.part.ground.machines[self.part.machine])
        for _ in range(self.chance.randrange(1, _PER_CACHE)):
            act(cache, self.chance.choice(self.names))
            time.sleep(self.chance.uniform(0, 0.02))
            if self.over():
                break
        totals, warnings = cache.stats.totals(), tuple(cache.warnings)
        self.log.tell(
            Closing(now(), self.part.machine, self.lookups, self.checked, totals, warnings)
        )
        cache.close()
        self.log.tell(Closed(now(), self.index.failures))

    def build(self, cache: Cache, name: str) -> None:
        from stress_worker import Files, drawn, obtain

        compiled = []

        def compile_() -> tuple[Record, Files]:
            record, files = drawn(name, size(self.chance), common(name))
            digests = tuple(blob.digest for blob in record.blobs)
            self.log.tell(Compiled(now(), record.key, digests, self.part.machine))
            compiled.append(record)
            return record, files

        since = now()
        self.lookups += 1
        found = obtain(cache, name, compile_)
        if compiled:
            self.log.tell(Published(now(), found.record.key, found.record.blobs[0].digest))
        self.check(cache, name, found.record, since)

    def make(self, cache: Cache, _: str) -> None:
        from kernel_repos import SAXPY, make
        from max_build import load_settings
        from max_build.pipeline import build

        marked = f"saxpy{self.chance.randrange(_EDITS)}"
        repo = make(
            Path(self.part.ground.base, f"repo{self.part.number}"),
            {"saxpy.cu": SAXPY.replace("saxpy", marked)},
            {"saxpy": 'source = "saxpy.cu"'},
        )
        since = now()
        self.lookups += 1
        (one,) = build(load_settings(repo.root), cache).outcomes
        assert one.record is not None, one.error
        self.check(cache, "saxpy", one.record, since, marked.encode())

    def load(self, cache: Cache, name: str) -> None:
        since = now()
        self.lookups += 1
        found = cache.lookup(example(name, b"").key)
        if isinstance(found, Hit):
            self.check(cache, name, found.record, since)
        if self.held:
            self.read(self.chance.choice(self.held), again=True)

    def check(
        self, cache: Cache, name: str, record: Record, since: float, mark: bytes = b""
    ) -> None:
        """Map each blob of a record, and read it: its first has to hold the mark, or the key."""
        assert record.unit == name
        for blob in record.blobs:
            held = self.map(cache, blob, since)
            if held is None:
                return
            data = self.read(held)
            if data is not None and blob == record.blobs[0]:
                assert (mark or record.key.encode()) in data
            if self.part.role == "loader":
                self.held.append(held)

    def map(self, cache: Cache, blob: Blob, since: float) -> Held | None:
        before = now()
        try:
            with cache.path(blob).open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            pass
        except ValueError:  # an empty file cannot be mapped
            self.log.tell(Bad(now(), before, blob.digest, held=False))
            return None
        except StoreError as error:
            if error.kind not in {"missing", "corrupt"}:
                raise
        else:
            return Held(blob.digest, mapping, before)
        self.log.tell(Lost(now(), since, blob.digest, self.part.machine))
        return None

    def read(self, held: Held, *, again: bool = False) -> bytes | None:
        self.checked += 1
        data = held.mapping[:]
        if digest(data) == held.digest:
            return data
        self.log.tell(Bad(now(), held.since, held.digest, again))
        return None

    # --- those that keep order

    def collect(self) -> None:
        label, store = self.chance.choice(self.directories())
        limit = self.part.max_size * (2 if label == OUTER else 1)
        grace = self.chance.choice([0.2, 1.0, 3.0])
        what = plan(survey(store), max_size=limit, grace=grace, pinned=pins(store))
        keys = tuple(entry.key for entry in what.entries)
        self.log.tell(Planned(now(), label, keys, tuple(blob.hex() for blob in what.blobs)))
        report = collect(store, what)
        self.log.tell(Collected(now(), label, report.entries, report.blobs))
        self.pause()

    def verify(self) -> None:
        places = [*self.directories()]
        if self.part.ground.outer == "remote" and self.part.ground.lists:
            places.append((OUTER, self.part.ground.outside()))
        label, store = self.chance.choice(places)
        for one in verify(store).findings:
            self.log.tell(Found(now(), label, one.kind, one.name, one.problem))
        self.log.tell(Verified(now(), label))
        self.pause()

    def directories(self) -> Sequence[tuple[str, DirectoryStore]]:
        ground = self.part.ground
        found = [(str(n), ground.place(n)) for n in range(len(ground.machines))]
        if ground.outer == "shared":
            found.append((OUTER, ground.outside()))
        return found

    def pause(self) -> None:
        time.sleep(self.chance.uniform(0.1, 0.6))


if __name__ == "__main__":
    Actor(msgspec.json.decode(sys.argv[1], type=Part)).run()
