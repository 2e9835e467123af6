from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from max_build.key import digest
from max_build.store import CacheSettings, Hit, Miss, open_cache
from max_build.store.directory import DirectoryStore
from max_build.store.flight import node_lock
from max_build.store.gc import gc, pin, plan
from max_build.store.names import FARM, LEFTOVERS, aside, new_folder, temporary
from max_build.store.survey import Found, Survey, survey
from max_build.store.verify import verify
from max_build.testing.store import example

HOUR = 3600.0
NOW = 1_000_000.0


def blob(number):
    return bytes([number]) * 32


def found(name, age, *blobs, size=10):
    return Found(name, NOW - age, size, tuple(blob(n) for n in blobs))


def seen(entries, blobs, age=10 * HOUR):
    return Survey(tuple(entries), {blob(n): (size, NOW - age) for n, size in blobs.items()}, NOW)


def test_the_longest_unused_goes_first():
    entries = [found("old", 9 * HOUR, 1), found("new", 2 * HOUR, 2), found("mid", 5 * HOUR, 3)]
    done = plan(seen(entries, {1: 100, 2: 100, 3: 100}), max_size=250)
    assert [entry.key for entry in done.entries] == ["old"]
    assert set(done.blobs) == {blob(1)}
    assert (done.freed, done.left) == (110, 220)


def test_a_blob_stays_as_long_as_one_entry_names_it():
    entries = [found("old", 9 * HOUR, 1), found("new", 2 * HOUR, 1)]
    done = plan(seen(entries, {1: 100}), max_age=5 * HOUR)
    assert [entry.key for entry in done.entries] == ["old"]
    assert not done.blobs


def test_what_was_just_used_stays_and_so_does_what_is_pinned():
    entries = [found("fresh", 60, 1), found("pinned", 90 * HOUR, 2), found("old", 90 * HOUR, 3)]
    done = plan(seen(entries, {1: 100, 2: 100, 3: 100}), max_size=0, pinned=["pinned"])
    assert [entry.key for entry in done.entries] == ["old"]
    assert set(done.blobs) == {blob(3)}


def test_a_blob_that_no_entry_names_goes_after_the_grace():
    assert set(plan(seen([], {1: 5})).blobs) == {blob(1)}
    assert not plan(seen([], {1: 5}, age=60)).blobs


names = st.integers(0, 20)


@given(
    st.lists(st.tuples(names, st.floats(0, 100 * HOUR), st.lists(names, max_size=3)), max_size=20),
    st.dictionaries(names, st.integers(0, 1000), max_size=20),
    st.integers(0, 5000),
    st.sets(names),
)
def test_a_plan_never_leaves_an_entry_without_its_blobs(entries, blobs, limit, pinned):
    given_entries = [found(f"{n}-{at}", age, *some) for at, (n, age, some) in enumerate(entries)]
    done = plan(seen(given_entries, blobs), max_size=limit, pinned=[f"{n}-0" for n in pinned])
    gone = {entry.key for entry in done.entries}
    for entry in given_entries:
        if entry.key not in gone:
            assert not set(entry.blobs) & set(done.blobs)
        else:
            assert NOW - entry.used > HOUR
            assert entry.key not in {f"{n}-0" for n in pinned}


# --- for real


@pytest.fixture
def filled(tmp_path):
    records = []
    with open_cache(CacheSettings(dir=str(tmp_path))) as cache:
        for number in range(4):
            data = os.urandom(10_000)
            record = example(f"u{number}", data)
            cache.publish(record, {digest(data): data})
            records.append(record)
    for number, record in enumerate(records):
        age(tmp_path, record, (10 - number) * HOUR)
    return tmp_path, records


def age(root, record, seconds):
    when = time.time() - seconds
    names = [("ac", record.key), *(("cas", b.digest) for b in record.blobs)]
    for kind, name in names:
        os.utime(root / kind / name[:2] / name, (when, when))


def test_gc_makes_room(filled):
    root, records = filled
    store = DirectoryStore(root)
    assert gc(store, max_size=25_000, dry_run=True).entries == 2
    assert len(list(store.list("ac"))) == 4
    report = gc(store, max_size=25_000)
    assert (report.entries, report.blobs) == (2, 2)
    with open_cache(CacheSettings(dir=str(root))) as cache:
        kinds = [type(cache.lookup(record.key)) for record in records]
    assert kinds == [Miss, Miss, Hit, Hit]


def test_a_pin_holds(filled):
    root, records = filled
    store = DirectoryStore(root)
    pin(store, records[0].key)
    gc(store, max_size=0)
    assert [item.name for item in store.list("ac")] == [records[0].key]
    pin(store, records[0].key, pinned=False)
    gc(store, max_size=0)
    assert not list(store.list("ac"))


def test_an_entry_used_between_plan_and_deed_stays(filled):
    from max_build.store.gc import collect

    root, records = filled
    store = DirectoryStore(root)
    what = plan(survey(store), max_size=0)
    store.touch(records[0].key)
    collect(store, what)
    with open_cache(CacheSettings(dir=str(root))) as cache:
        assert isinstance(cache.lookup(records[0].key), Hit)


def test_what_was_used_half_an_hour_ago_stays(filled):
    root, records = filled
    age(root, records[0], 50 * 60)
    with open_cache(CacheSettings(dir=str(root))) as cache:
        assert isinstance(cache.lookup(records[0].key), Hit)
    path = DirectoryStore(root).path("ac", records[0].key)
    used = path.stat().st_mtime - 30 * 60
    os.utime(path, (used, used))
    gc(DirectoryStore(root), max_size=0)
    assert path.exists()


def test_a_mapped_artifact_survives_its_eviction(filled):
    root, records = filled
    with open_cache(CacheSettings(dir=str(root))) as cache:
        cache.lookup(records[0].key)
        with cache.path(records[0].blobs[0]).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    store = DirectoryStore(root)
    gc(store, max_size=0, grace=-10)
    assert not list(store.list("cas"))
    assert digest(mapped) == records[0].blobs[0].digest
    mapped.close()


def test_leftovers_of_killed_writers_go(filled):
    root, _ = filled
    store = DirectoryStore(root)
    left = {"tmp": temporary(), "lock": digest(b"k"), "quarantine": aside("ac", digest(b"k"))}
    for folder, name in left.items():
        path = store.folder(folder) / name
        path.write_text("")
        os.utime(path, (1, 1))
    new = root / new_folder()
    new.mkdir()
    os.utime(new, (1, 1))
    farm = Path(tempfile.mkdtemp(prefix=FARM, dir=root / "tmp"))
    (farm / "source.py").write_text("")
    os.utime(farm, (1, 1))
    now = temporary()
    (root / "tmp" / now).write_text("")
    assert gc(store, dry_run=True).leftovers == 5
    assert farm.exists()
    assert gc(store).leftovers == 5
    assert [path.name for path in (root / "tmp").iterdir()] == [now]


def test_what_a_store_makes_for_a_while_has_names_that_gc_knows(tmp_path):
    store = DirectoryStore(tmp_path)
    key = digest(b"k")
    store.take_lease(key, b"us")
    with node_lock(store.folder("lock") / key, 1), store.receive(digest(b""), 0):
        store.put_entry(key, b"bad")
        store.discard("ac", key)
        store.path("ac", key).mkdir()
        store.put_entry(key, b"good", replace=True)
        for folder in ("tmp", "lock", "lease", "quarantine"):
            found = [path.name for path in (tmp_path / folder).iterdir()]
            assert found, folder
            assert all(LEFTOVERS[folder][0].fullmatch(name) for name in found), found


def test_gc_leaves_files_that_are_not_the_caches(tmp_path):
    theirs = ["tmp/thesis.txt", "new-design/plan.md", "lock/x", "lease/y", "quarantine/z", "new-1"]
    for name in theirs:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        for one in (path, path.parent):
            os.utime(one, (1, 1))
    with open_cache(CacheSettings(dir=str(tmp_path))) as cache:
        cache.publish(example("u", b"x"), {digest(b"x"): b"x"})
    assert (tmp_path / "collected").exists()
    assert all((tmp_path / name).read_text() == "mine" for name in theirs)


def test_no_time_unused_is_a_limit_too():
    done = plan(seen([found("used", 2 * HOUR, 1)], {1: 100}), max_age=0)
    assert [entry.key for entry in done.entries] == ["used"]


def test_gc_reads_what_a_bazel_server_keeps(tmp_path):
    from max_build.record import encode
    from max_build.store import actionresult
    from max_build.store.entry import seal

    store = DirectoryStore(tmp_path)
    record = example("u", b"x")
    store.put_entry(record.key, actionresult.encode(seal(encode(record))))
    (entry,) = survey(store).entries
    assert entry.blobs == (bytes.fromhex(digest(b"x")),)


def test_the_local_directory_is_held_to_its_size(tmp_path):
    where = CacheSettings(dir=str(tmp_path), max_size=25_000)
    records = []
    for number in range(5):
        with open_cache(where) as cache:
            data = os.urandom(10_000)
            record = example(f"u{number}", data)
            cache.publish(record, {digest(data): data})
            records.append(record)
        age(tmp_path, record, (9 - number) * HOUR)
        (tmp_path / "collected").unlink(missing_ok=True)
    sizes = [item.size for item in DirectoryStore(tmp_path).list("cas")]
    assert sum(sizes) <= 30_000
    with open_cache(where) as cache:
        assert isinstance(cache.lookup(records[-1].key), Hit)


READER = """
import sys, time
from max_build.store import open_cache, CacheSettings, Hit
from max_build.testing.store import example
from max_build.key import digest
end = time.monotonic() + 2
rounds = 0
while time.monotonic() < end:
    with open_cache(CacheSettings(dir=sys.argv[1])) as cache:
        for n in range(10):
            data = str(n).encode() * 1000
            record = example(f"r{n}", data)
            if not isinstance(cache.lookup(record.key), Hit):
                cache.publish(record, {digest(data): data})
            try:
                found = cache.path(record.blobs[0]).read_bytes()
            except OSError:
                continue  # collected this very moment, and said so
            assert found == data
        assert not cache.warnings, cache.warnings
        rounds += 1
print(rounds)
"""
COLLECTOR = """
import sys, time
from max_build.store.directory import DirectoryStore
from max_build.store.gc import gc
from pathlib import Path
end = time.monotonic() + 2
while time.monotonic() < end:
    gc(DirectoryStore(Path(sys.argv[1])), max_size=0, grace=-10)
"""


def test_readers_and_collectors_together(tmp_path):
    (tmp_path / "c").mkdir(mode=0o700)
    commands = [[sys.executable, "-c", READER, str(tmp_path / "c")]] * 3
    commands += [[sys.executable, "-c", COLLECTOR, str(tmp_path / "c")]] * 2
    processes = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for c in commands
    ]
    for process in processes:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error


# --- verify


@pytest.mark.parametrize("shared", [False, True])
def test_verify_finds_and_moves_what_is_wrong(tmp_path, shared):
    from max_build.store.entry import seal, seal_recipes

    store = DirectoryStore(tmp_path, shared=shared)
    records = [example(f"u{n}", str(n).encode() * 100) for n in range(4)]
    for number, record in enumerate(records):
        put(store, record, str(number).encode() * 100)
    lookup = digest(b"l")
    store.put_entry(lookup, seal(seal_recipes(lookup, (b"{}",))))
    assert verify(store).findings == ()
    spoiled = store.path("cas", records[0].blobs[0].digest)
    data = spoiled.read_bytes()
    spoiled.chmod(0o644)
    spoiled.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    store.delete("cas", records[1].blobs[0].digest)
    store.put_entry(records[2].key, b"nonsense", replace=True)
    result = verify(store, repair=False)
    assert (result.entries, result.blobs) == (5, 3)
    assert len(result.findings) == 4
    assert len(verify(store).findings) == 4
    after = verify(store)
    assert after.findings == ()
    assert (after.entries, after.blobs) == (2, 2)


def put(store, record, data):
    import io

    from max_build.record import encode
    from max_build.store.entry import seal

    store.put_blob(digest(data), io.BytesIO(data))
    store.put_entry(record.key, seal(encode(record)))
