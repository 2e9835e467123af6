"""Hits and remotes of the cache: how long, how fast, and in how much memory.

    python tests/benchmarks/bench_store.py [--quick] [--json FILE]

Verified hits of 1 MB and 20 MB; throughput, lookups and memory of nginx and of an S3 server beside
the bare client library, from the same server in the same run. A server that is not installed is
left out. What an operation costs among many entries is in `bench_entries.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cache_servers
import measure
from measure import Figure, at_most, ratio_at_least, ratio_at_most, say, timed, timed_turns

from max_build.key import digest
from max_build.record import Record
from max_build.store import CacheSettings, Hit, open_cache
from max_build.store.base import Sink, Store
from max_build.store.entry import seal
from max_build.store.journal import Journal
from max_build.store.tiers import Tier
from max_build.testing.store import example

MB = 1 << 20


def settle(root: Path) -> None:
    """As if all of it had been written a minute ago."""
    when = time.time() - 60
    for path in root.glob("*/*/*"):
        os.utime(path, (when, when))
    measure.settle()  # ctime is not ours to set


def hits(quick: bool) -> Iterator[Figure]:
    """Of artifacts of the size that a graph's and a large graph's have."""
    say("verified hits")
    counts = {1: 7, 20: 3} if quick else {1: 21, 20: 7}
    with measure.scratch() as base:
        root = base / "cache"
        records: dict[int, list[Record]] = {size: [] for size in counts}
        with open_cache(CacheSettings(dir=str(root))) as cache:
            for size, count in counts.items():
                for number in range(count):
                    data = os.urandom(size * MB)
                    record = example(f"{size}-{number}", data)
                    cache.publish(record, {digest(data): data})
                    records[size].append(record)
        settle(root)

        def all_hits() -> Iterator[dict[int, list[float]]]:
            """Twice in one process: milliseconds of each."""
            with open_cache(CacheSettings(dir=str(root))) as cache:
                cache.memo.get("warm", "up")  # the index is open, as in any build

                def hit(record: Record) -> None:
                    found = cache.lookup(record.key)
                    assert isinstance(found, Hit)
                    cache.path(found.record.blobs[0])

                for _ in range(2):
                    yield {
                        size: [1e3 * timed(lambda r=r: hit(r)) for r in records[size]]
                        for size in counts
                    }

        first, again = all_hits()
        third, _ = all_hits()
        hashed = {
            size: [1e3 * timed(lambda r=r: _hashed(root, r)) for r in records[size]]
            for size in counts
        }
        peer = "SHA-256 of the file"
        for size, limit in ((1, 1), (20, 15)):
            what = f"verified hit of {size} MB"
            theirs = hashed[size]
            yield Figure(f"{what}, first time", "ms", first[size], peer, theirs, at_most(limit))
            yield Figure(f"{what}, again", "ms", again[size], peer, theirs, at_most(1))
        what = "verified hit of 20 MB, again, from a new index"
        yield Figure(what, "ms", third[20], peer, hashed[20], at_most(1))


def _hashed(root: Path, record: Record) -> None:
    name = record.blobs[0].digest
    assert _digest(root / "cas" / name[:2] / name) == name


def anonymous_memory() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


@contextlib.contextmanager
def peak():
    """The most anonymous memory above the start, in MB, as a list of one."""
    base, most, over = anonymous_memory(), [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], anonymous_memory() - base)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield most
    over.set()
    watcher.join()


def compare(
    name: str,
    store: Store,
    bare_put: Callable[[], None],
    bare_get: Callable[[], None],
    bare_small: Callable[[int], None],
    base: Path,
    quick: bool,
) -> Iterator[Figure]:
    """Throughput and lookups of `store` beside the bare library's."""
    big = base / "big"
    size = big.stat().st_size
    name_of = _digest(big)
    rounds, count = (1, 100) if quick else (3, 1000)

    def put() -> None:
        with big.open("rb") as file:
            store.put_blob(name_of, file)

    def get() -> None:
        with (base / "got").open("wb") as file:
            sink = Sink(file, size)
            assert store.get_blob(name_of, sink)
            assert sink.holds(name_of)

    most: dict[str, list[float]] = {"put": [], "get": []}

    def watched(way: str, action: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with peak() as found:
                action()
            most[way] += found

        return run

    found = timed_turns(
        rounds,
        put_bare=bare_put,
        put=watched("put", put),
        get_bare=bare_get,
        get=watched("get", get),
        get_hashed=lambda: (bare_get(), _digest(base / "got")),
    )
    speed = {key: [size / 1e6 / one for one in seconds] for key, seconds in found.items()}
    megabytes = f"{size / 1e6:.0f} MB"
    for way in ("put", "get"):
        what = f"{name}: {way} of {megabytes}"
        peer = "the bare library"
        theirs = speed[f"{way}_bare"]
        yield Figure(what, "MB/s", speed[way], peer, theirs, ratio_at_least(0.8))
        yield Figure("… its memory above the base", "MB", most[way], target=at_most(64))
    what, peer = f"{name}: get of {megabytes}", "the bare library, then SHA-256"
    yield Figure(what, "MB/s", speed["get"], peer, speed["get_hashed"], ratio_at_least(0.8))

    entry = seal(b'{"x":"%s"}' % (b"y" * 900))
    key = digest(b"small")
    store.put_entry(key, entry, replace=True)
    tier = Tier(store, "off", request_timeout=2, budget=3, note=Journal().note)

    def lookups() -> None:
        for _ in range(count):
            assert tier.entry(key) == entry

    small = timed_turns(rounds, bare=lambda: bare_small(count), ours=lookups)
    ours, theirs = (measure.each(small[one], 1e6 / count) for one in ("ours", "bare"))
    peer = "the bare library"
    yield Figure(f"{name}: a lookup of 1 kB", "us", ours, peer, theirs, ratio_at_most(1.3))


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def machine_code(path: Path, megabytes: int) -> None:
    """It shrinks as machine code does: runs of what was seen before, between new bytes."""
    with path.open("wb") as file:
        words = [os.urandom(24) for _ in range(4096)]
        for _ in range(megabytes):
            picks = os.urandom(2 * 40_000)
            chunk = b"".join(
                words[(picks[i] << 8 | picks[i + 1]) & 4095] for i in range(0, 80_000, 2)
            )
            file.write((chunk + os.urandom(MB))[:MB])


def nginx(base: Path, quick: bool) -> Iterator[Figure]:
    """The server of `cache/`, as shipped."""
    import urllib3

    from max_build.store.http import HttpStore

    big = base / "big"
    with cache_servers.nginx(base) as server:
        store = HttpStore(server.writer_url, writable=True)
        pool = urllib3.PoolManager()
        headers = urllib3.make_headers(basic_auth=f"{server.user}:{server.password}")
        url = f"{server.url}/cas/{digest(b'bare')}"

        def put() -> None:
            with big.open("rb") as file:
                size = str(big.stat().st_size)
                done = pool.request(
                    "PUT", url, body=file, headers={**headers, "Content-Length": size}
                )
                assert done.status < 300

        def get() -> None:
            got = pool.request("GET", url, preload_content=False)
            with (base / "got").open("wb") as file:
                for chunk in got.stream(MB, decode_content=False):
                    file.write(chunk)
            got.release_conn()

        def small(count: int) -> None:
            for _ in range(count):
                assert pool.request("GET", f"{server.url}/ac/{digest(b'small')}").status == 200

        yield from compare("nginx", store, put, get, small, base, quick)


def s3(base: Path, quick: bool) -> Iterator[Figure]:
    """SeaweedFS."""
    import obstore
    from obstore.store import from_url

    from max_build.store.objects import ObjectStore

    big = base / "big"
    with cache_servers.seaweed(base) as endpoint:
        os.environ.update(cache_servers.S3_ENVIRONMENT, AWS_ENDPOINT_URL=endpoint)
        url = f"s3://{cache_servers.BUCKET}/x"
        store = ObjectStore(url, writable=True)
        bare = from_url(url, client_options={"allow_http": True}, endpoint=endpoint)

        def put() -> None:
            with big.open("rb") as file:
                obstore.put(bare, "bare", file)

        def get() -> None:
            with (base / "got").open("wb") as file:
                for chunk in obstore.get(bare, "bare").stream():
                    file.write(chunk)

        def small(count: int) -> None:
            key = digest(b"small")
            for _ in range(count):
                obstore.get(bare, f"ac/{key[:2]}/{key}").bytes()

        yield from compare("S3 (SeaweedFS)", store, put, get, small, base, quick)


def remotes(quick: bool) -> Iterator[Figure]:
    """Each server that is installed."""
    for program, part in (("nginx", nginx), ("weed", s3)):
        if cache_servers.program(program):
            say(f"a server of its own: {program}")
            with measure.scratch() as base:
                machine_code(base / "big", 20 if quick else 200)
                yield from part(base, quick)


def figures(quick: bool) -> Iterator[Figure]:
    """All of it."""
    yield from hits(quick)
    yield from remotes(quick)


if __name__ == "__main__":
    measure.main("store", figures, __doc__)
