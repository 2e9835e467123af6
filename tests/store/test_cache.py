from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from max_build.errors import ConfigError, StoreError
from max_build.key import digest, key_of
from max_build.store import CacheSettings, Hit, Miss, open_cache
from max_build.testing.store import example

ARTIFACT = os.urandom(50_000)


def publish(cache, name="unit", *blobs):
    blobs = blobs or (ARTIFACT,)
    record = example(name, *blobs)
    cache.publish(record, {digest(data): data for data in blobs})
    return record


def blob_path(root, record, number=0):
    name = record.blobs[number].digest
    return root / "cas" / name[:2] / name


def entry_path(root, record):
    return root / "ac" / record.key[:2] / record.key


@pytest.fixture
def cache(tmp_path):
    with open_cache(CacheSettings(dir=str(tmp_path / "cache"))) as cache:
        yield cache


@pytest.fixture
def root(cache):
    return cache.root


# --- the local tier


def test_what_was_published_is_a_hit(cache):
    record = publish(cache)
    found = cache.lookup(record.key)
    assert found == Hit(record, "local")
    assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT
    assert cache.stats.hits == {"local": 1}
    assert cache.stats.seconds_saved == record.seconds
    assert cache.warnings == []


def test_what_was_not_is_absent(cache):
    assert cache.lookup(digest(b"no")) == Miss("absent")
    assert cache.stats.misses == {"absent": 1}


def test_content_may_be_a_file(cache, tmp_path):
    record = example("unit", ARTIFACT)
    (tmp_path / "out").write_bytes(ARTIFACT)
    cache.publish(record, {record.blobs[0].digest: tmp_path / "out"})
    assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT


def test_wrong_content_is_never_published(cache):
    record = example("unit", ARTIFACT)
    for content in (ARTIFACT[:-1], ARTIFACT + b"x", bytes(len(ARTIFACT))):
        with pytest.raises(StoreError) as caught:
            cache.publish(record, {record.blobs[0].digest: content})
        assert caught.value.kind == "corrupt"
    with pytest.raises(StoreError) as caught:
        cache.publish(record, {})
    assert caught.value.kind == "missing"
    assert cache.lookup(record.key) == Miss("absent")


@pytest.mark.parametrize(
    "damage", ["flip", "cut", "grow", "empty", "symlink", "folder", "unreadable"]
)
def test_a_damaged_blob_is_a_miss_that_heals(cache, root, damage):
    record = publish(cache)
    path = blob_path(root, record)
    spoil(path, damage)
    found = cache.lookup(record.key)
    if damage == "unreadable" and os.geteuid() == 0:
        assert isinstance(found, Hit)  # root reads everything
        return
    assert isinstance(found, Miss)
    assert found.reason == "damaged"
    assert cache.stats.faults == {("local", "corrupt"): 1}
    assert list((root / "quarantine").iterdir())
    assert isinstance(cache.lookup(record.key), Miss)
    publish(cache)
    assert isinstance(cache.lookup(record.key), Hit)
    assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "symlink", "folder"])
def test_a_damaged_entry_is_a_miss_that_heals(cache, root, damage):
    record = publish(cache)
    spoil(entry_path(root, record), damage)
    found = cache.lookup(record.key)
    assert isinstance(found, Miss)
    assert found.reason == "damaged"
    publish(cache)
    assert cache.lookup(record.key) == Hit(record, "local")


def spoil(path, damage):
    if damage == "unreadable":
        path.chmod(0)
        return
    data = path.read_bytes()
    path.unlink()
    if damage == "symlink":
        path.symlink_to("/etc/hostname")
    elif damage == "folder":
        path.mkdir()
    else:
        middle = len(data) // 2
        path.write_bytes(
            {
                "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
                "cut": data[:middle],
                "grow": data + b"\n",
                "empty": b"",
            }[damage]
        )


def test_no_flipped_bit_of_an_entry_goes_unseen(cache, root):
    record = publish(cache)
    path = entry_path(root, record)
    data = path.read_bytes()
    path.chmod(0o644)
    for at in range(len(data)):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
        found = cache.lookup(record.key)
        assert isinstance(found, Miss) or found.record == record, at


def test_a_record_under_another_key_is_damage(cache, root):
    record = publish(cache, "one")
    other = publish(cache, "two")
    entry_path(root, other).unlink()
    os.link(entry_path(root, record), entry_path(root, other))
    found = cache.lookup(other.key)
    assert isinstance(found, Miss)
    assert "belongs to key" in found.detail


def test_a_blob_that_is_gone_is_dangling_and_heals(cache, root):
    record = publish(cache)
    blob_path(root, record).unlink()
    assert cache.lookup(record.key).reason == "dangling"
    assert cache.lookup(record.key, fetch=False).reason == "dangling"
    with pytest.raises(StoreError) as caught:
        cache.path(record.blobs[0])
    assert caught.value.kind == "missing"
    publish(cache)
    assert isinstance(cache.lookup(record.key), Hit)


def test_damage_after_the_first_read_is_found_by_the_next(cache, root):
    record = publish(cache)
    old = time.time() - 60
    os.utime(blob_path(root, record), (old, old))
    assert isinstance(cache.lookup(record.key), Hit)
    spoil(blob_path(root, record), "flip")
    with pytest.raises(StoreError):
        cache.path(record.blobs[0])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_subset_of_files_may_be_deleted(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("cache")
    with open_cache(CacheSettings(dir=str(root))) as cache:
        records = [publish(cache, f"u{n}", ARTIFACT, str(n).encode()) for n in range(3)]
        cache.add_recipe(digest(b"l"), b'{"a":1}')
    files = sorted(path for path in root.rglob("*") if path.is_file())
    for path in data.draw(st.sets(st.sampled_from(files))):
        path.unlink()
    with open_cache(CacheSettings(dir=str(root))) as cache:
        cache.recipes(digest(b"l"))
        for number, record in enumerate(records):
            found = cache.lookup(record.key)
            if isinstance(found, Miss):
                publish(cache, f"u{number}", ARTIFACT, str(number).encode())
                found = cache.lookup(record.key)
            assert isinstance(found, Hit)
            assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT


def test_the_hit_path_imports_nothing_heavy(tmp_path):
    with open_cache(CacheSettings(dir=str(tmp_path))) as cache:
        record = publish(cache)
    program = f"""
import sys
before = set(sys.modules)  # what the environment itself loads at start, coverage for one
from max_build.store import open_cache, CacheSettings
cache = open_cache(CacheSettings(dir={str(tmp_path)!r}))
hit = cache.lookup({record.key!r})
cache.path(hit.record.blobs[0])
heavy = {{"numpy", "sqlite3", "diskcache", "cryptography", "obstore", "urllib3", "max"}}
heavy |= {{"backports.zstd", "concurrent.futures"}}
sys.exit(", ".join(heavy & (set(sys.modules) - before)) or 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# --- where it lies, and what if it cannot


def test_home_unset_falls_back_to_a_private_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open_cache(CacheSettings()) as cache:
        assert cache.root == tmp_path / f"max-build-{os.getuid()}"
        assert cache.root.stat().st_mode & 0o777 == 0o700
        assert isinstance(cache.lookup(publish(cache).key), Hit)


def test_a_link_is_no_private_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "ours").mkdir()
    (tmp_path / f"max-build-{os.getuid()}").symlink_to(tmp_path / "ours")
    with open_cache(CacheSettings()) as cache:
        assert cache.root is None
        assert cache.warnings[0].endswith("is not used: it is a link")
        publish(cache)
    assert not list((tmp_path / "ours").iterdir())


def test_xdg_comes_before_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_cache(CacheSettings()) as cache:
        assert cache.root == tmp_path / "max-build"


@pytest.mark.parametrize("make", ["file", "world-writable", "foreign"])
def test_a_directory_of_no_use_is_stood_in_for(monkeypatch, tmp_path, make):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    root = tmp_path / "cache"
    if make == "file":
        root.write_text("")
    else:
        root.mkdir()
        if make == "world-writable":
            root.chmod(0o777)
        elif os.geteuid() == 0:
            os.chown(root, 12345, -1)
        else:
            pytest.skip("only root can give a directory away")
    with open_cache(CacheSettings(dir=str(root))) as cache:
        assert cache.root == tmp_path / f"max-build-{os.getuid()}"
        assert "is not used" in cache.warnings[0]
        assert isinstance(cache.lookup(publish(cache).key), Hit)


def test_with_no_directory_at_all_scratch_does(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        "max_build.store.opening._fallback_root", lambda: tmp_path / "file" / "below"
    )
    with open_cache(CacheSettings(dir=str(tmp_path / "file"))) as cache:
        assert cache.root is None
        record = publish(cache)
        path = cache.path(record.blobs[0])
        assert path.read_bytes() == ARTIFACT
        with cache.single_flight(digest(b"k")) as waited:
            assert not waited
        cache.add_recipe(digest(b"l"), b"{}")
    assert not path.exists()


def test_a_full_disk_costs_nothing_but_the_cache(small_disk):
    with open_cache(CacheSettings(dir=str(small_disk))) as cache:
        data = os.urandom(2 << 20)
        record = publish(cache, "big", data)
        assert cache.path(record.blobs[0]).read_bytes() == data
        assert isinstance(cache.lookup(record.key), Hit)
        assert "No space left" in cache.warnings[0]
        assert cache.stats.faults["local", "full"] >= 1
        publish(cache, "other", os.urandom(2 << 20))
        assert len(cache.warnings) == 1
    assert not list(small_disk.glob("tmp/*"))
    with open_cache(CacheSettings(dir=str(small_disk))) as cache:
        assert isinstance(cache.lookup(record.key), Miss)


def test_a_read_only_directory_is_read(read_only_disk, tmp_path):
    filled, root = read_only_disk
    with open_cache(CacheSettings(dir=str(filled))) as cache:
        old = publish(cache)
    with open_cache(CacheSettings(dir=str(root))) as cache:
        assert cache.root == root
        assert isinstance(cache.lookup(old.key), Hit)
        record = publish(cache, "new", b"new")
        assert cache.path(record.blobs[0]).read_bytes() == b"new"
        assert isinstance(cache.lookup(record.key), Hit)
        with cache.single_flight(record.key):
            pass
        assert cache.warnings == [f"cache directory `{root}` is read-only: nothing new is kept"]


def test_a_file_size_limit_is_a_full_disk(tmp_path):
    program = f"""
import resource, signal, os
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from max_build.store import open_cache, CacheSettings
from max_build.testing.store import example
cache = open_cache(CacheSettings(dir={str(tmp_path)!r}))
data = os.urandom(300_000)
record = example("u", data)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    cache.publish(record, {{record.blobs[0].digest: data}})
except Exception as error:
    print(type(error).__name__, getattr(error, "kind", ""))
print(cache.stats.faults)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )
    # Not even scratch takes it here, which is the one refusal that is told.
    assert "StoreError full" in done.stdout


# --- one compile


def test_single_flight_lets_one_compile(tmp_path):
    compiled, waits = [], []
    record = example("unit", ARTIFACT)

    def build():
        with open_cache(CacheSettings(dir=str(tmp_path))) as cache:
            with cache.single_flight(record.key) as waited:
                waits.append(waited)
                if isinstance(cache.lookup(record.key), Miss):
                    compiled.append(1)
                    time.sleep(0.2)
                    publish(cache)
            assert isinstance(cache.lookup(record.key), Hit)

    threads = [threading.Thread(target=build) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert waits.count(False) == 1
    assert not list((tmp_path / "lock").iterdir())


def test_a_killed_holder_frees_its_lock(tmp_path):
    key = digest(b"k")
    program = f"""
import sys, time
from max_build.store import open_cache, CacheSettings
with open_cache(CacheSettings(dir={str(tmp_path)!r})).single_flight({key!r}):
    print("held", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    threading.Timer(0.3, holder.kill).start()
    with open_cache(CacheSettings(dir=str(tmp_path))) as cache, cache.single_flight(key) as waited:
        assert waited
    holder.wait()
    holder.stdout.close()


def test_the_wait_is_bounded(tmp_path):
    key = digest(b"k")
    with (
        open_cache(CacheSettings(dir=str(tmp_path))) as one,
        open_cache(CacheSettings(dir=str(tmp_path), wait=0.2)) as two,
        one.single_flight(key),
        two.single_flight(key) as waited,
    ):
        assert waited


# --- recipes, history, counters


def test_recipes_are_kept_newest_first_and_limited(cache):
    lookup = digest(b"l")
    assert cache.recipes(lookup) == ()
    for number in range(10):
        cache.add_recipe(lookup, b'{"n":%d}' % number, limit=4)
    cache.add_recipe(lookup, b'{"n":8}', limit=4)
    assert cache.recipes(lookup) == (b'{"n":8}', b'{"n":9}', b'{"n":7}', b'{"n":6}')


def test_of_recipes_that_are_too_large_together_the_newest_are_kept(cache):
    lookup = digest(b"l")
    texts = [b'{"n":%d,"x":"%s"}' % (n, b"a" * 900_000) for n in range(8)]
    for text in texts:
        cache.add_recipe(lookup, text)
    assert cache.recipes(lookup) == tuple(texts[:3:-1])
    assert cache.warnings == []
    cache.add_recipe(lookup, b'{"x":"%s"}' % (b"a" * (5 << 20)))
    assert cache.recipes(lookup) == tuple(texts[:3:-1])
    assert "a recipe is not kept" in cache.warnings[0]


def test_a_record_that_is_too_large_is_told_and_not_written(cache, root):
    record = example("large", ARTIFACT)
    many = {f"include/{n:06}.h": digest(b"%d" % n) for n in range(60_000)}
    components = msgspec.structs.replace(record.components, dependencies=many)
    record = msgspec.structs.replace(record, components=components, key=key_of(components))
    for _ in range(2):
        cache.publish(record, {digest(ARTIFACT): ARTIFACT})
    assert cache.lookup(record.key) == Miss("absent")
    assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT
    assert len(cache.warnings) == 1
    assert "(`large`) is not kept" in cache.warnings[0]


def test_damaged_recipes_are_none(cache, root):
    lookup = digest(b"l")
    cache.add_recipe(lookup, b"{}")
    spoil(root / "ac" / lookup[:2] / lookup, "flip")
    assert cache.recipes(lookup) == ()
    cache.add_recipe(lookup, b'{"x":1}')
    assert cache.recipes(lookup) == (b'{"x":1}',)


def test_a_record_in_place_of_recipes_is_none(cache, root):
    record = publish(cache)
    assert cache.recipes(record.key) == ()


def test_records_of_a_unit_come_newest_first(cache):
    first = publish(cache, "u", b"1")
    second = example("u", b"1")
    assert cache.records_of("u") == [first]
    assert cache.records_of("none") == []
    assert second.key == first.key


def test_counters_last(tmp_path):
    from max_build.store.index import Memo
    from max_build.store.stats import load_totals, prometheus

    where = CacheSettings(dir=str(tmp_path))
    for _ in range(2):
        with open_cache(where) as cache:
            publish(cache)
            cache.lookup(example("unit", ARTIFACT).key)
            cache.lookup(digest(b"no"))
    memo = Memo(tmp_path / "index")
    ever = load_totals(memo)
    assert (ever.hits, ever.misses, ever.builds) == ({"local": 2}, {"absent": 2}, 2)
    assert load_totals(memo, "last").hits == {"local": 1}
    assert 'max_build_hits_total{tier="local"} 2' in prometheus(ever)
    memo.close()


def test_a_wrong_public_key_is_named(tmp_path):
    with pytest.raises(ConfigError, match="public key 2"):
        open_cache(
            CacheSettings(dir=str(tmp_path), public_keys=("a:" + "A" * 43 + "=", "nonsense"))
        )


def test_an_entry_whose_blob_has_just_gone_makes_no_scratch_space(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    record = example("unit", b"bytes")
    with open_cache(CacheSettings(dir=str(tmp_path / "own"))) as cache:
        cache.local.put_entry(record.key, b"entry", record.blobs)
        assert cache.local.get_entry(record.key) is None
        assert not list(scratch.iterdir())
