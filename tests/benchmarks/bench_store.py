"""What the cache costs: `python tests/benchmarks/bench_store.py [PART …]`.

Parts: `local` (hits of 1 MB and 20 MB), `many` (100,000 entries), `nginx` and `s3` (throughput,
lookups and memory beside the bare client library, from the same server in the same run). Prints a
table of median, figure to hold, and whether it was held.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))

import cache_servers

from max_build.key import digest
from max_build.store import CacheSettings, open_cache
from max_build.store.base import Sink, Store
from max_build.store.directory import DirectoryStore
from max_build.store.entry import seal
from max_build.testing.store import example

MB = 1 << 20
ROUNDS = 21
failed = 0


def report(what: str, value: float, unit: str, limit: float | None = None, *, least=False) -> None:
    global failed
    held = "" if limit is None else "ok" if (value >= limit if least else value <= limit) else "NO"
    failed += held == "NO"
    bound = "" if limit is None else f"{'>=' if least else '<='} {limit:g}"
    print(f"{what:58} {value:10.3f} {unit:6} {bound:>9} {held}", flush=True)


def timed(action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def settle(root: Path) -> None:
    """As if all of it had been written a minute ago."""
    when = time.time() - 60
    for path in root.glob("*/*/*"):
        os.utime(path, (when, when))
    time.sleep(2.1)  # ctime is not ours to set


# --- local


def local(base: Path) -> None:
    root = base / "local"
    records = {}
    with open_cache(CacheSettings(dir=str(root))) as cache:
        for size in (1, 20):
            records[size] = []
            for number in range(ROUNDS if size == 1 else 7):
                data = os.urandom(size * MB)
                record = example(f"{size}-{number}", data)
                cache.publish(record, {digest(data): data})
                records[size].append(record)
    settle(root)
    with open_cache(CacheSettings(dir=str(root))) as cache:
        cache.memo.get("warm", "up")  # the index is open, as in any build

        def hit(record) -> None:
            found = cache.lookup(record.key)
            cache.path(found.record.blobs[0])

        first = {size: [timed(lambda r=r: hit(r)) for r in records[size]] for size in records}
        again = {size: [timed(lambda r=r: hit(r)) for r in records[size]] for size in records}
    plain = [timed(lambda r=r: _hashed(root, r)) for r in records[20]]
    report("SHA-256 of a file of 20 MB, nothing else", 1e3 * statistics.median(plain), "ms")
    report("verified hit of 1 MB, first time", 1e3 * statistics.median(first[1]), "ms", 1)
    report("verified hit of 1 MB, again", 1e3 * statistics.median(again[1]), "ms", 1)
    report("verified hit of 20 MB, first time", 1e3 * statistics.median(first[20]), "ms", 15)
    report("verified hit of 20 MB, again", 1e3 * statistics.median(again[20]), "ms", 1)
    with open_cache(CacheSettings(dir=str(root))) as cache:
        cache.memo.get("warm", "up")
        third = [timed(lambda r=r: hit(r)) for r in records[20]]
    report("verified hit of 20 MB, again, another process", 1e3 * statistics.median(third), "ms", 1)


def _hashed(root: Path, record) -> None:
    name = record.blobs[0].digest
    with (root / "cas" / name[:2] / name).open("rb", buffering=0) as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == name


# --- many entries


def many(base: Path) -> None:
    root = base / "many"
    root.mkdir(mode=0o700)
    store = DirectoryStore(root)
    store.folder("tmp")
    count = 100_000
    for number in range(count):
        record = example(str(number), str(number).encode())
        for kind, name, data in (
            ("cas", record.blobs[0].digest, str(number).encode()),
            ("ac", record.key, seal(_encoded(record))),
        ):
            path = store.path(kind, name)
            try:
                path.write_bytes(data)
            except FileNotFoundError:
                path.parent.mkdir(parents=True)
                path.write_bytes(data)
    key = record.key
    program = (
        "import time, sys; from max_build.store import open_cache, CacheSettings\n"
        f"t = time.perf_counter(); c = open_cache(CacheSettings(dir={str(root)!r}))\n"
        f"print(time.perf_counter() - t); h = c.lookup({key!r}); print(time.perf_counter() - t)"
    )
    runs = []
    for _ in range(5):
        out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        runs.append([float(line) for line in out.stdout.split()])
    report("open, 100,000 entries", 1e3 * statistics.median(r[0] for r in runs), "ms", 20)
    report("open and first lookup", 1e3 * statistics.median(r[1] for r in runs), "ms")
    program = (
        "import time; from pathlib import Path\n"
        "from max_build.store.directory import DirectoryStore; from max_build.store import gc\n"
        f"s = DirectoryStore(Path({str(root)!r})); r = Path('/proc/self/status').read_text\n"
        "m = lambda: int(r().split('RssAnon:')[1].split()[0]) / 1024; b = m()\n"
        "t = time.perf_counter(); seen = gc.survey(s); p = gc.plan(seen, max_size=1 << 20)\n"
        "print(time.perf_counter() - t, time.process_time(), m() - b)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    seconds, processor, memory = (float(part) for part in out.stdout.split())
    report("gc plan, 100,000 entries", seconds, "s", 5)
    report("gc plan, processor time of the process", processor, "s")
    report("gc plan, memory above the base", memory, "MB")


def _encoded(record) -> bytes:
    from max_build.record import encode

    return encode(record)


# --- remotes


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


def compare(name: str, store: Store, bare_put, bare_get, bare_small, base: Path, big: Path) -> None:
    """Throughput and lookups of `store` beside the bare library's."""
    size = big.stat().st_size
    with big.open("rb") as file:
        raw = file.read()
    name_of = digest(raw)
    del raw
    rounds = 3

    def put() -> None:
        with big.open("rb") as file:
            store.put_blob(name_of, file)

    def get() -> None:
        with (base / "got").open("wb") as file:
            sink = Sink(file, size)
            assert store.get_blob(name_of, sink)
            assert sink.holds(name_of)

    bare = {"put": [], "get": []}
    ours = {"put": [], "get": []}
    most = {}
    hashed = []
    for _ in range(rounds):
        bare["put"].append(timed(bare_put))
        with peak() as most["put"]:
            ours["put"].append(timed(put))
        bare["get"].append(timed(bare_get))
        with peak() as most["get"]:
            ours["get"].append(timed(get))
        hashed.append(timed(lambda: (bare_get(), _digest(base / "got"))))
    for way in ("put", "get"):
        library, own = statistics.median(bare[way]), statistics.median(ours[way])
        report(f"{name}: {way} 200 MB, bare library", size / 1e6 / library, "MB/s")
        report(f"{name}: {way} 200 MB, cache", size / 1e6 / own, "MB/s")
        report(f"{name}: {way} 200 MB, share of the library's", library / own, "", 0.8, least=True)
        report(f"{name}: {way} 200 MB, memory above the base", most[way][0], "MB", 64)
    report(
        f"{name}: get 200 MB, share of the library's with SHA-256",
        statistics.median(hashed) / statistics.median(ours["get"]), "", 0.8, least=True,
    )  # fmt: skip
    from max_build.store.journal import Journal
    from max_build.store.tiers import Tier

    entry = seal(b'{"x":"%s"}' % (b"y" * 900))
    key = digest(b"small")
    store.put_entry(key, entry, replace=True)
    tier = Tier(store, "off", request_timeout=2, budget=3, note=Journal().note)

    def lookups() -> None:
        for _ in range(1000):
            assert tier.entry(key) == entry

    library, own = [], []
    for _ in range(rounds):
        library.append(timed(lambda: bare_small(1000)))
        own.append(timed(lookups))
    report(f"{name}: 1,000 lookups, bare library", statistics.median(library), "s")
    report(f"{name}: 1,000 lookups, cache", statistics.median(own), "s")
    report(
        f"{name}: 1,000 lookups, times the library's",
        statistics.median(own) / statistics.median(library), "", 1.3,
    )  # fmt: skip


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def machine_code(path: Path) -> None:
    """200 MB that shrink as machine code does: runs of what was seen before, between new bytes."""
    with path.open("wb") as file:
        words = [os.urandom(24) for _ in range(4096)]
        for _ in range(200):
            picks = os.urandom(2 * 40_000)
            chunk = b"".join(
                words[(picks[i] << 8 | picks[i + 1]) & 4095] for i in range(0, 80_000, 2)
            )
            file.write((chunk + os.urandom(MB))[:MB])


def nginx(base: Path) -> None:
    import urllib3

    from max_build.store.http import HttpStore

    big = base / "big"
    machine_code(big)
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

        compare("nginx", store, put, get, small, base, big)


def s3(base: Path) -> None:
    import obstore
    from obstore.store import from_url

    from max_build.store.objects import ObjectStore

    big = base / "big"
    machine_code(big)
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

        compare("s3 (SeaweedFS)", store, put, get, small, base, big)


PARTS = {"local": local, "many": many, "nginx": nginx, "s3": s3}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        base = Path(tempfile.mkdtemp(prefix="bench-store-"))
        try:
            PARTS[part](base)
        finally:
            shutil.rmtree(base)
    sys.exit(min(failed, 1))
