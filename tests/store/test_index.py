from __future__ import annotations

import os
import pickle
import sqlite3
import time

import pytest

from max_build.key import digest
from max_build.store import CacheSettings, Hit, open_cache
from max_build.store.index import Memo
from max_build.testing.store import example


@pytest.fixture
def memo(tmp_path):
    memo = Memo(tmp_path / "index")
    yield memo
    memo.close()


def old(path, data):
    path.write_bytes(data)
    when = time.time() - 60
    os.utime(path, (when, when))
    return path


def test_a_value_comes_back(memo, tmp_path):
    assert memo.get("a", "k") is None
    memo.set("a", "k", b"1")
    memo.set("b", "k", b"2")
    memo.update("a", "k", lambda value: value + b"!")
    assert (memo.get("a", "k"), memo.get("b", "k")) == (b"1!", b"2")
    again = Memo(tmp_path / "index")
    assert again.get("a", "k") == b"1!"
    again.close()


def test_the_values_of_a_prefix_come_at_once(memo):
    memo.set_all("a", {"x:1": b"1", "x:\U0010fffe": b"2", "x": b"3", "y:1": b"4"})
    memo.set("b", "x:1", b"5")
    assert memo.under("a", "x:") == {"x:1": b"1", "x:\U0010fffe": b"2"}
    assert memo.under("a", "z") == {}


def test_without_a_folder_nothing_is_remembered():
    memo = Memo(None)
    memo.set("a", "k", b"1")
    assert memo.get("a", "k") is None
    assert memo.under("a", "") == {}


def test_the_digest_of_a_file(memo, tmp_path):
    path = old(tmp_path / "f", b"one")
    time.sleep(2.1)  # its ctime settles
    for _ in range(2):
        assert memo.digest_of(path) == digest(b"one")
    assert memo.get("file", str(path)) is not None


@pytest.mark.parametrize("change", ["content", "content and time", "replaced"])
def test_a_changed_file_is_read_again(memo, tmp_path, change):
    path = old(tmp_path / "f", b"one")
    time.sleep(2.1)
    assert memo.digest_of(path) == digest(b"one")
    before = path.stat()
    if change == "replaced":
        old(tmp_path / "g", b"two").rename(path)
    else:
        path.write_bytes(b"two")
    if change != "content":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert memo.digest_of(path) == digest(b"two")


def test_a_file_written_just_now_is_not_remembered(memo, tmp_path):
    path = tmp_path / "f"
    for number in range(50):
        path.write_bytes(b"%02d" % number)
        assert memo.digest_of(path) == digest(b"%02d" % number)
    assert memo.get("file", str(path)) is None


def test_a_file_from_the_future_is_not_remembered(memo, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    when = time.time() + 3600
    os.utime(path, (when, when))
    memo.digest_of(path)
    assert memo.get("file", str(path)) is None


def test_a_file_that_is_not_there_is_an_os_error(memo, tmp_path):
    with pytest.raises(FileNotFoundError):
        memo.digest_of(tmp_path / "none")


class Boom:
    def __reduce__(self):
        return (os.mkdir, (os.environ["BOOM"],))


def test_no_pickle_is_ever_read(memo, tmp_path, monkeypatch):
    monkeypatch.setenv("BOOM", str(tmp_path / "boom"))
    memo.set("a", "k", b"1")
    memo.set("a", "other", b"2")
    with sqlite3.connect(tmp_path / "index" / "cache.db") as db:
        db.execute(
            "UPDATE Cache SET mode = 4, value = ? WHERE key = 'a:k'", (pickle.dumps(Boom()),)
        )
    db.close()
    assert memo.get("a", "k") is None
    assert not (tmp_path / "boom").exists()


def test_what_is_not_plain_is_not_written(memo):
    from max_build.store.plain_cache import PlainDisk

    disk = PlainDisk.__new__(PlainDisk)
    with pytest.raises(TypeError):
        disk.put(("a", 1))
    with pytest.raises(TypeError):
        disk.store({"a": 1}, read=False)
    with pytest.raises(ValueError, match="not text"):
        disk.get(b"pickle", False)


@pytest.mark.parametrize("damage", ["garbage", "cut", "empty", "folder", "unwritable"])
def test_a_broken_index_is_no_loss(tmp_path, damage):
    where = CacheSettings(dir=str(tmp_path))
    record = example("u", b"x")
    with open_cache(where) as cache:
        cache.publish(record, {digest(b"x"): b"x"})
    path = tmp_path / "index" / "cache.db"
    for extra in ("-wal", "-shm"):
        path.with_name(path.name + extra).unlink(missing_ok=True)
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "unwritable":
        path.write_bytes(data)
        path.chmod(0o400)
        path.parent.chmod(0o500)
    else:
        path.write_bytes({"garbage": os.urandom(5000), "cut": data[:5000], "empty": b""}[damage])
    for _ in range(3):
        with open_cache(where) as cache:
            assert cache.lookup(record.key) == Hit(record, "local")
            cache.memo.set("a", "k", b"1")
            cache.records_of("u")
            assert cache.warnings == []
    if damage in {"garbage", "cut", "empty"}:
        with open_cache(where) as cache:
            assert cache.memo.get("a", "k") == b"1"
    path.parent.chmod(0o700)


def test_a_forked_process_has_a_connection_of_its_own_and_waits_for_nobody(memo):
    memo.set("a", "k", b"1")
    mine = memo._index
    with memo._turn, memo._lock:  # as a thread may that is not in the child
        child = os.fork()
        if child == 0:
            same = memo.get("a", "k") == b"1" and memo._index is not mine
            memo.close()
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert memo.get("a", "k") == b"1"
    assert memo._index is mine
