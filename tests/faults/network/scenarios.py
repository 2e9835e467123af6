"""What happens in the guest: `scenarios.py NAME` prints facts as JSON; the host judges them."""

from __future__ import annotations

import io
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "store"))

import stress_worker
from machines import (
    EXPORT,
    HERE,
    MACHINES,
    PATIENCE,
    PROTOCOL,
    Process,
    build,
    builds,
    findings,
    leftovers,
    mounted,
    record_of,
    server,
    settings,
    shared_folder,
    together,
)

from max_build.key import digest
from max_build.store import Hit, Miss, open_cache
from max_build.store.directory import DirectoryStore
from max_build.store.gc import gc
from max_build.store.tiers import Tier
from max_build.testing.store import example

Facts = dict[str, Any]

# Eight machines and their server share one processor, which does not make the server sick.
PATIENT = {"request_timeout": 20.0, "budget": 60.0}


def contend() -> Facts:
    """Eight machines, 50 keys each, half of them everybody's."""
    return contended("contend", 50)


def contended(name: str, keys: int) -> Facts:
    log = Path(f"/run/compiled-{name}")
    shared_folder(name)
    started = time.monotonic()
    done = together(
        lambda n=n: stress_worker.run(settings(n, name, **PATIENT), n, keys, log) for n in MACHINES
    )
    compiled = Counter(log.read_text().split())
    return {
        "seconds": round(time.monotonic() - started, 1),
        "errors": errors(done),
        "compiled": len(compiled),
        "compiled more than once": sorted(n for n, count in compiled.items() if count > 1),
        "findings": findings(name),
        "leftovers": leftovers(name),
    }


def killed() -> Facts:
    """Two of eight machines die at a random moment, six rounds."""
    facts: Facts = {"rounds": 0, "errors": [], "findings": []}
    shared_folder("killed")
    for number in range(6):
        log = Path(f"/run/compiled-killed-{number}")
        processes = []
        for n in MACHINES:
            chosen = settings(n, "killed", Path(f"/run/own/killed{number}/{n}"), lease=1, **PATIENT)
            processes.append(
                Process(lambda n=n, c=chosen, log=log: stress_worker.run(c, n, 10, log))
            )
        time.sleep(random.uniform(0.1, 3))
        for process in processes[:2]:
            process.kill()
        until = time.monotonic() + PATIENCE
        facts["errors"] += errors([one.facts(until) for one in processes[2:]])
        facts["findings"] += findings("killed")
        facts["rounds"] += 1
        if number % 2:
            shutil.rmtree(EXPORT / "killed")
            shared_folder("killed")
    return facts


def recreated() -> Facts:
    """The team's directory is deleted and made anew on the server, again and again."""

    def meanwhile() -> None:
        for number in range(4):
            time.sleep(2.5)
            aside = EXPORT / f"aside{number}"
            (EXPORT / "recreated").rename(aside)
            shared_folder("recreated")
            while aside.exists():  # whoever is within goes on writing there
                shutil.rmtree(aside, ignore_errors=True)

    return disturbed("recreated", 12, meanwhile)


def restarted() -> Facts:
    """The server is restarted twice."""

    def meanwhile() -> None:
        for _ in range(2):
            time.sleep(3)
            server("stop")
            time.sleep(1)
            server("start")

    return disturbed("restarted", 14, meanwhile)


def unexported() -> Facts:
    """The server forgets what it exports, for two seconds: every handle is stale."""

    def meanwhile() -> None:
        time.sleep(3)
        subprocess.run(["exportfs", "-ua"], check=True)
        subprocess.run(["exportfs", "-f"], check=True)
        time.sleep(2)
        server("start")

    return disturbed("unexported", 10, meanwhile)


def unplugged() -> Facts:
    """Half of the machines lose the network for ten seconds."""

    def plug(state: str) -> None:
        for n in range(1, 5):
            subprocess.run(["ip", "link", "set", f"v{n}", state], check=True)

    def meanwhile() -> None:
        time.sleep(2)
        plug("down")
        time.sleep(10)
        plug("up")

    return disturbed("unplugged", 14, meanwhile)


def disturbed(name: str, seconds: float, meanwhile: Callable[[], None]) -> Facts:
    """Build on eight machines while something happens; then once more in peace."""
    shared_folder(name)
    done = together((lambda n=n: builds(n, name, seconds) for n in MACHINES), meanwhile)
    units = [f"unit{n}" for n in range(12)]
    # A lost network or server comes back when the client tries again, not at once.
    patience = time.monotonic() + 60
    after: list[Facts] = []
    while time.monotonic() < patience:
        after = together(
            lambda n=n: dict(build(n, settings(n, name, Path(f"/run/own/{name}-{n}")), units))
            for n in MACHINES
        )
        for n in MACHINES:
            shutil.rmtree(f"/run/own/{name}-{n}", ignore_errors=True)
        if all(one.get("hit shared") == len(units) for one in after):
            break
    total: Counter[str] = Counter()
    for one in done:
        total.update(one.get("came", {}))
    return {
        "errors": errors(done),
        "came": dict(sorted(total.items())),
        "longest": max(one.get("longest", 0) for one in done),
        "after": [one for one in after if one.get("hit shared") != len(units)],
        "healed after": round(time.monotonic() - patience + 60, 1),
        "findings": findings(name),
    }


def collected() -> Facts:
    """Seven machines build while the eighth makes room, sparing nothing."""
    shared_folder("collected")

    def collector() -> Facts:
        removed = rounds = 0
        end = time.monotonic() + 12
        store = DirectoryStore(mounted(8) / "collected", "shared", shared=True)
        while time.monotonic() < end:
            report = gc(store, max_size=200_000, grace=0)
            removed += report.entries
            rounds += 1
            time.sleep(0.2)
        return {"removed": removed, "rounds": rounds}

    def machine(n: int) -> Callable[[], Facts]:
        return lambda: builds(n, "collected", 12)

    done = together([*(machine(n) for n in range(1, 8)), collector])
    total: Counter[str] = Counter()
    for one in done[:-1]:
        total.update(one.get("came", {}))
    return {
        "errors": errors(done),
        "came": dict(sorted(total.items())),
        "collector": done[-1],
        "findings": findings("collected"),
    }


def mapped() -> Facts:
    """One machine has an artifact mapped, another collects it, and the page cache is dropped."""
    shared_folder("mapped")
    data = random.Random(1).randbytes(8 << 20)
    record, _ = record_of("mapped")
    import msgspec

    from max_build.record import Blob

    blob = Blob(role="mef", digest=digest(data), size=len(data))
    record = msgspec.structs.replace(record, blobs=(blob,))
    with open_cache(settings(2, "mapped")) as cache:
        cache.publish(record, {blob.digest: data})
    outcomes: Facts = {}
    home = Path("home")
    (EXPORT / home).mkdir(mode=0o755)
    places = [("shared", None), ("home", home)]
    for where, own in places[:1] if PROTOCOL == "smb" else places:

        def read(own: Path | None = own) -> Facts:
            chosen = settings(1, "mapped", own and mounted(1) / own)
            with open_cache(chosen) as cache:
                assert isinstance(cache.lookup(record.key), Hit)
                path = cache.path(blob)
                with path.open("rb") as file:
                    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            assert view[:4] == data[:4]
            Path("/run/mapped").touch()
            while Path("/run/mapped").exists():
                time.sleep(0.02)
            return {"right": view[:] == data, "gone": not path.exists()}

        process = Process(read)
        until = time.monotonic() + PATIENCE
        while not Path("/run/mapped").exists() and time.monotonic() < until:
            time.sleep(0.02)
        for folder in ("mapped", home) if own else ("mapped",):
            store = DirectoryStore(mounted(2) / folder, "shared", shared=folder == "mapped")
            gc(store, max_size=0, grace=-5)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        Path("/run/mapped").unlink()
        outcomes[where] = process.facts(until)
        with open_cache(settings(2, "mapped")) as cache:  # for the next round
            cache.publish(record, {blob.digest: data})
    return outcomes


def users() -> Facts:
    """Two members of a team whose umask is 077, each on a mount of their own."""
    folder = EXPORT / "users"
    folder.mkdir()
    os.chown(folder, 0, 3000)
    folder.chmod(0o2775)
    log = Path("/run/log")
    log.mkdir()
    log.chmod(0o777)
    for user, name in ((2001, "ann"), (2002, "bob")):
        if PROTOCOL == "smb":
            command = [HERE / "mount.sh", str(user - 2000), f"/mnt/{name}", name]
            subprocess.run(command, check=True)
        else:
            Path(f"/mnt/{name}").symlink_to(mounted(user - 2000))
        Path(f"/run/home-{name}").mkdir(mode=0o700)
        os.chown(f"/run/home-{name}", user, user)
    import_all()
    done = []
    for user, name in ((2001, "ann"), (2002, "bob"), (2001, "ann")):

        def act(user: int = user, name: str = name) -> Facts:
            os.setgroups([3000])
            os.setgid(3000)
            os.setuid(user)
            os.umask(0o077)
            own = f"/run/home-{name}/c{time.monotonic()}"
            from max_build.store import CacheSettings

            chosen = CacheSettings(dir=own, shared=f"/mnt/{name}/users")
            stress_worker.run(chosen, 0, 10, log / name)
            return {}

        done += together([act])
    return {
        "errors": errors(done),
        "ann": len((log / "ann").read_text().split()),
        "bob": len((log / "bob").read_text().split()),
        "modes": sorted({oct(p.stat().st_mode) for p in folder.glob("*as/??/*")}),
        "folders": sorted({oct(p.stat().st_mode) for p in folder.glob("*as/??")}),
        "findings": findings("users"),
    }


def import_all() -> None:
    """Load what another user's process needs, who may not read this Python's files."""
    import importlib
    import pkgutil

    from max_build import store

    for module in pkgutil.iter_modules(store.__path__, "max_build.store."):
        if module.name not in {"max_build.store.http", "max_build.store.objects"}:
            importlib.import_module(module.name)
    importlib.import_module("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")


def readonly() -> Facts:
    """A mount that is read-only, and an export that is, below a mount that is not."""
    shared_folder("readonly")
    names = [f"unit{n}" for n in range(6)]
    first = build(1, settings(1, "readonly"), names)
    facts: Facts = {"first": dict(first)}
    subprocess.run([HERE / "mount.sh", "2", "/mnt/ro", "root", "ro"], check=True)
    from max_build.store import CacheSettings

    shared = "/mnt/ro/readonly"
    facts["mount"] = dict(
        build(2, CacheSettings(dir="/run/own/ro", shared=shared), [*names, "other"])
    )
    if PROTOCOL != "smb":
        options = "ro,sync,no_root_squash,no_subtree_check,fsid=0"
        command = ["exportfs", "-i", "-o", options, "10.9.3.2:/mnt/export"]
        subprocess.run(command, check=True)
        subprocess.run(["exportfs", "-f"], check=True)
        facts["export"] = dict(build(3, settings(3, "readonly"), [*names, "third"]))
        server("start")
    return facts


def late() -> Facts:
    """What one machine was told is absent, another publishes; the first looks again."""
    shared_folder("late")
    seen = Counter[str]()
    for number in range(20):
        record, data = record_of(f"late{number}")
        caches = [open_cache(settings(n, "late", Path(f"/run/own/{number}-{n}"))) for n in (1, 2)]
        found = caches[0].lookup(record.key)
        assert isinstance(found, Miss)
        caches[1].publish(record, {digest(data): data})
        found = caches[0].lookup(record.key)
        seen["seen" if isinstance(found, Hit) else f"missed {found.reason}"] += 1
        for cache in caches:
            cache.close()
    return dict(seen)


def beside() -> Facts:
    """While one machine compiles, another makes the folder that the result belongs into."""
    shared_folder("beside")
    by_shard: dict[str, list[str]] = {}
    number = 0
    pairs: list[tuple[str, str]] = []
    while len(pairs) < 10:
        names = by_shard.setdefault(example(f"beside{number}", b"").key[:2], [])
        names.append(f"beside{number}")
        if len(names) == 2:
            pairs.append((names[0], names[1]))
        number += 1
    came: Counter[str] = Counter()
    for first, second in pairs:
        record, data = record_of(first)
        with open_cache(settings(1, "beside", Path(f"/run/own/{first}"))) as cache:
            assert isinstance(cache.lookup(record.key), Miss)
            build(2, settings(2, "beside", Path(f"/run/own/{second}")), [second])
            cache.publish(record, {digest(data): data})
            came.update(cache.warnings)
        own = Path(f"/run/own/{first}-3")
        came.update(build(3, settings(3, "beside", own), [first, second]))
    return dict(came)


def home() -> Facts:
    """The developer's own cache lies in a home directory that eight machines mount."""
    (EXPORT / "homes").mkdir(mode=0o755)
    from max_build.store import CacheSettings

    log = Path("/run/compiled-homes")
    done = together(
        lambda n=n: stress_worker.run(
            CacheSettings(dir=str(mounted(n) / "homes" / "cache")), n, 20, log
        )
        for n in MACHINES
    )
    compiled = Counter(log.read_text().split())
    return {
        "errors": errors(done),
        "compiled": len(compiled),
        "wanted": 10 + 8 * 10,
        "compiled more than once": sorted(n for n, count in compiled.items() if count > 1),
        "findings": findings("homes/cache", shared=False),
    }


def figures() -> Facts:
    """Milliseconds per call of the shared tier, median of 40, on an idle guest."""
    shared_folder("figures")
    notes: list[str] = []
    stores = [DirectoryStore(mounted(n) / "figures", "shared", shared=True) for n in (1, 2)]
    one, two = (
        Tier(
            store,
            "off",
            request_timeout=10,
            budget=30,
            note=lambda label, error: notes.append(f"{label}: {error.message}"),
        )
        for store in stores
    )
    took: dict[str, list[float]] = {}

    def timed(what: str, call: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = call()
        took.setdefault(what, []).append((time.monotonic() - started) * 1000)
        return result

    from max_build.record import encode
    from max_build.store.base import Sink
    from max_build.store.entry import seal

    for number in range(40):
        record, data = record_of(f"figure{number}")
        entry = seal(encode(record), None)
        blob = record.blobs[0]
        file = Path(f"/run/blob{number}")
        file.write_bytes(data)
        timed("entry absent", lambda k=record.key: two.entry(k))
        # An NFS client tells by a folder's time that it changed, which goes in ticks.
        time.sleep(0.05)
        timed("send blob of 32 kB", lambda b=blob, f=file: one.send(b, f))
        timed("put entry", lambda k=record.key, e=entry: one.put_entry(k, e, replace=False))
        assert timed("entry present", lambda k=record.key: two.entry(k)) == entry
        timed("has blob", lambda b=blob: two.has_blob(b.digest))
        sink = Sink(io.BytesIO(), blob.size)
        timed("pour blob of 32 kB", lambda b=blob, s=sink: two.pour(b, s))
        timed("take lease", lambda k=record.key: stores[0].take_lease(k, b"owner"))
        timed("drop lease", lambda k=record.key: stores[0].drop_lease(k, b"owner"))
        file.unlink()
    return {"ms": {what: round(median(times), 2) for what, times in took.items()}, "notes": notes}


def errors(done: list[Facts]) -> list[str]:
    """What went wrong in processes."""
    return [one["error"] for one in done if one and one.get("error")]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
