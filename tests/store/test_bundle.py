from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from max_build.errors import StoreError
from max_build.key import digest
from max_build.store import CacheSettings, Hit, Miss, open_cache
from max_build.store.bundle import pack, unpack
from max_build.store.cache import NOT_KEPT
from max_build.store.compress import open_packed
from max_build.store.stats import Totals, load_totals
from max_build.store.transfer import chosen, pull, pull_recipes, push, recipes_for
from max_build.store.trust import new_key
from max_build.testing.store import example


def filled(where, **options):
    cache = open_cache(CacheSettings(dir=str(where), **options))
    records = [example(f"u{n}", str(n).encode() * 1000, b"common") for n in range(3)]
    for number, record in enumerate(records):
        data = str(number).encode() * 1000
        cache.publish(record, {digest(data): data, digest(b"common"): b"common"})
        lookup = digest(f"l{number}".encode())
        cache.add_recipe(lookup, b'{"key":"%s"}' % record.key.encode())
    return cache, records


def test_a_bundle_carries_all_there_is(tmp_path):
    cache, records = filled(tmp_path / "here")
    keys = [record.key for record in records]
    with cache:
        lookups = list(recipes_for(cache.local.store, keys))
        assert len(lookups) == 3
        done = pack(cache, [*keys, *lookups], tmp_path / "b.tar.zst")
    assert (done.entries, done.blobs) == (6, 4)
    with open_cache(CacheSettings(dir=str(tmp_path / "there"))) as cache:
        done = unpack(cache, tmp_path / "b.tar.zst")
        assert (done.entries, done.blobs, done.refused) == (6, 4, ())
        for number, record in enumerate(records):
            assert cache.lookup(record.key) == Hit(record, "local")
            assert cache.recipes(digest(f"l{number}".encode()))
        assert cache.records_of("u1") == [records[1]]


def test_a_bundle_is_the_same_wherever_it_is_made(tmp_path):
    for name in ("one", "two"):
        cache, records = filled(tmp_path / name)
        with cache:
            pack(cache, [record.key for record in records], tmp_path / f"{name}.tar.zst")
    assert (tmp_path / "one.tar.zst").read_bytes() == (tmp_path / "two.tar.zst").read_bytes()


def test_a_bundle_is_written_beside_no_name_of_somebody_else(tmp_path):
    other = tmp_path / "b.tar.zst.tmp"  # as another that packs the same file might call its own
    other.write_bytes(b"not ours")
    cache, records = filled(tmp_path / "here")
    with cache:
        pack(cache, [records[0].key], tmp_path / "b.tar.zst")
    assert other.read_bytes() == b"not ours"
    assert {path.name for path in tmp_path.iterdir()} == {"here", "b.tar.zst", other.name}


def test_where_no_bundle_can_be_written_it_is_told(tmp_path):
    cache, records = filled(tmp_path / "here")
    (tmp_path / "file").touch()
    with cache:
        for place in ("file", "nowhere"):
            with pytest.raises(StoreError, match="cannot be written"):
                pack(cache, [records[0].key], tmp_path / place / "b")


def test_what_is_altered_in_a_bundle_is_refused(tmp_path):
    record = example("u", b"good")
    cache = open_cache(CacheSettings(dir=str(tmp_path / "here")))
    with cache:
        cache.publish(record, {digest(b"good"): b"good"})
        entry = cache.local.get_entry(record.key)
    bundle = tmp_path / "b.tar.zst"
    name = digest(b"good")
    with open_packed(bundle, "wb") as out, tarfile.open(fileobj=out, mode="w|") as tar:
        for member, data in (
            (f"cas/{name[:2]}/{name}", b"evil"),
            (f"ac/{record.key[:2]}/{record.key}", entry),
            ("../../etc/cron.d/x", b"evil"),
            (f"ac/00/{'0' * 64}", entry),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo(f"cas/{'1' * 2}/{'1' * 64}")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        tar.addfile(link)
    with open_cache(CacheSettings(dir=str(tmp_path / "there"))) as cache:
        done = unpack(cache, bundle)
        assert (done.entries, done.blobs) == (0, 0)
        assert len(done.refused) == 5
        assert isinstance(cache.lookup(record.key), Miss)


@pytest.mark.parametrize("content", [b"", b"not zstd", None])
def test_what_is_no_bundle_is_told(tmp_path, content):
    path = tmp_path / "b"
    if content is not None:
        path.write_bytes(content)
    with (
        open_cache(CacheSettings(dir=str(tmp_path / "c"))) as cache,
        pytest.raises(StoreError, match="cannot be read"),
    ):
        unpack(cache, path)


def test_a_cut_bundle_is_told(tmp_path):
    cache, records = filled(tmp_path / "here")
    with cache:
        pack(cache, [record.key for record in records], tmp_path / "b")
    data = (tmp_path / "b").read_bytes()
    (tmp_path / "b").write_bytes(data[: len(data) // 2])
    with (
        open_cache(CacheSettings(dir=str(tmp_path / "there"))) as cache,
        pytest.raises(StoreError, match="cannot be read"),
    ):
        unpack(cache, tmp_path / "b")


def test_a_bundle_needs_the_signatures_that_a_remote_needs(tmp_path):
    public = new_key("ci", tmp_path / "key")
    cache, records = filled(tmp_path / "plain")
    with cache:
        pack(cache, [records[0].key], tmp_path / "plain.tar")
    cache, records = filled(tmp_path / "signed", signing_key=str(tmp_path / "key"))
    with cache:
        pack(cache, [records[0].key], tmp_path / "signed.tar")
    demanding = CacheSettings(
        dir=str(tmp_path / "there"), remote_trust="require", public_keys=(public,)
    )
    with open_cache(demanding) as cache:
        assert "unsigned" in unpack(cache, tmp_path / "plain.tar").refused[0]
        assert unpack(cache, tmp_path / "signed.tar").refused == ()


def test_push_and_pull_move_what_is_chosen(tmp_path):
    (tmp_path / "remote").mkdir()
    url = f"file://{tmp_path / 'remote'}"
    filled(tmp_path / "here")[0].close()
    reader = CacheSettings(dir=str(tmp_path / "here"), remote=url)
    writer = CacheSettings(dir=str(tmp_path / "here"), remote=url, remote_mode="read-write")
    with open_cache(reader) as cache:
        chosen_records = list(chosen(cache.local.store, units=["u1"]))
        assert [record.unit for record in chosen_records] == ["u1"]
        with pytest.raises(StoreError, match="may only read the remote cache") as caught:
            push(cache, chosen_records)
        assert "MAX_BUILD_REMOTE_MODE=read-write" in caught.value.hint
    with open_cache(writer) as cache:
        assert len(push(cache, chosen_records).moved) == 1
    with open_cache(CacheSettings(dir=str(tmp_path / "there"), remote=url)) as cache:
        keys = [record.key for record in chosen(cache.outer[0].store)]
        assert keys == [chosen_records[0].key]
        assert pull(cache, keys).failed == {}
        pull_recipes(cache, cache.outer[0].store, keys)
    with open_cache(CacheSettings(dir=str(tmp_path / "there"))) as cache:
        assert isinstance(cache.lookup(keys[0]), Hit)
        assert cache.recipes(digest(b"l1"))


def test_a_pull_counts_bytes_and_no_hits(tmp_path):
    (tmp_path / "remote").mkdir()
    where = {"remote": f"file://{tmp_path / 'remote'}", "remote_mode": "read-write"}
    cache, records = filled(tmp_path / "here", **where)
    cache.close()
    keys = [record.key for record in records]
    for _ in range(2):
        with open_cache(CacheSettings(dir=str(tmp_path / "there"), **where)) as cache:
            assert pull(cache, [*keys, "0" * 64]).moved == tuple(keys)
    with open_cache(CacheSettings(dir=str(tmp_path / "there"))) as cache:
        ever, last = load_totals(cache.memo), load_totals(cache.memo, "last")
    assert (ever.hits, ever.misses, ever.seconds_saved) == ({}, {}, 0)
    assert ever.received == {"remote": 3006}
    assert last == Totals()  # nothing was looked up yet


def test_what_a_push_sent_is_counted(tmp_path):
    (tmp_path / "shared").mkdir()
    filled(tmp_path / "here")[0].close()
    there = CacheSettings(dir=str(tmp_path / "here"), shared=str(tmp_path / "shared"))
    with open_cache(there) as cache:
        push(cache, list(chosen(cache.local.store)))
    with open_cache(there) as cache:
        assert load_totals(cache.memo).sent == {"shared": 3006}


def test_a_pull_and_an_unpack_that_nothing_is_left_of_say_so(tmp_path, read_only_disk):
    (tmp_path / "shared").mkdir()
    _, read_only = read_only_disk
    cache, records = filled(tmp_path / "here", shared=str(tmp_path / "shared"))
    keys = [record.key for record in records]
    with cache:
        pack(cache, keys, tmp_path / "b")
    with open_cache(CacheSettings(dir=str(read_only))) as cache:
        done = unpack(cache, tmp_path / "b")
        assert (done.entries, done.blobs, len(done.refused)) == (0, 0, 3)
        assert "the local directory cannot be written" in done.refused[0]
    there = CacheSettings(dir=str(read_only), shared=str(tmp_path / "shared"))
    with open_cache(there) as cache:
        done = pull(cache, keys)
        assert done.moved == ()
        assert set(done.failed.values()) == {NOT_KEPT}


def test_a_full_disk_refuses_what_is_unpacked(tmp_path, small_disk):
    big = os.urandom(2 << 20)
    with open_cache(CacheSettings(dir=str(tmp_path / "here"))) as cache:
        record = example("big", big)
        cache.publish(record, {digest(big): big})
        pack(cache, [record.key], tmp_path / "b")
    with open_cache(CacheSettings(dir=str(small_disk))) as cache:
        done = unpack(cache, tmp_path / "b")
    assert (done.entries, done.blobs) == (0, 0)
    assert done.refused


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_holes_in_a_bundle_are_refused(tmp_path, form):
    name = digest(b"x")
    info = tarfile.TarInfo(f"cas/{name[:2]}/{name}")
    info.size = 1
    if form == tarfile.PAX_FORMAT:
        info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 20)}
        header = info.tobuf(form)
    else:
        info.type = tarfile.GNUTYPE_SPARSE
        buffer = bytearray(info.tobuf(form))
        buffer[386:410] = b"00000000000\x0000000000001\x00"  # one byte, at 0
        buffer[483:495] = b"00004000000\x00"  # of 1 MiB
        buffer[148:156] = b" " * 8
        buffer[148:156] = b"%06o\x00 " % sum(buffer[:512])
        header = bytes(buffer)
    with open_packed(tmp_path / "b", "wb") as out:
        out.write(header + b"a".ljust(512, b"\0") + bytes(1024))
    with open_cache(CacheSettings(dir=str(tmp_path / "c"))) as cache:
        done = unpack(cache, tmp_path / "b")
    assert "no name of a bundle" in done.refused[0]


def test_a_bundle_named_for_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache, records = filled(tmp_path / "here")
    with cache, pytest.raises(StoreError, match=r"bundle `\.` cannot be written"):
        pack(cache, [records[0].key], Path("."))
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_records_are_chosen_by_key_unit_and_target(tmp_path):
    cache, records = filled(tmp_path)
    with cache:
        store = cache.local.store
        assert len(list(chosen(store))) == 3
        assert list(chosen(store, keys=[records[0].key])) == [records[0]]
        assert list(chosen(store, keys=[records[0].key[:10]])) == [records[0]]
        assert list(chosen(store, targets=["sm_90a"])) == []
        assert len(list(chosen(store, targets=["cpu"], units=["u0", "u2"]))) == 2
