from __future__ import annotations

import os
import stat
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from max_build.errors import StoreError
from max_build.key import digest
from max_build.store.directory import DirectoryStore
from max_build.testing.store import Opener, StoreContract, poured


class TestOwnDirectory(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path) -> Opener:
        return lambda *, writable=True: DirectoryStore(tmp_path, writable=writable)


class TestTeamDirectory(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path) -> Opener:
        return lambda *, writable=True: DirectoryStore(
            tmp_path, "shared", writable=writable, shared=True
        )


@pytest.fixture
def own(tmp_path):
    return DirectoryStore(tmp_path)


def put(store, data):
    import io

    store.put_blob(digest(data), io.BytesIO(data))
    return store.path("cas", digest(data))


def test_a_blob_lies_raw_in_the_own_directory(own):
    assert put(own, b"bytes").read_bytes() == b"bytes"


def test_a_blob_lies_as_zstd_in_a_team_directory(tmp_path):
    store = DirectoryStore(tmp_path, shared=True)
    data = b"again and " * 10_000
    path = put(store, data)
    assert path.read_bytes()[:4] == b"\x28\xb5\x2f\xfd"
    assert path.stat().st_size < len(data) / 100


def test_modes_of_a_team_directory_do_not_depend_on_the_umask(tmp_path):
    old = os.umask(0o077)
    try:
        store = DirectoryStore(tmp_path, shared=True)
        store.tag()
        path = put(store, b"x")
        store.put_entry(digest(b"k"), b"entry")
        store.discard("ac", digest(b"k"))
    finally:
        os.umask(old)
    for found in tmp_path.rglob("*"):
        mode = stat.S_IMODE(found.stat().st_mode)
        assert mode == (0o2775 if found.is_dir() else 0o664), found
    assert path.exists()


def test_nothing_but_the_two_files_stays_behind(own, tmp_path):
    put(own, b"x")
    own.put_entry(digest(b"k"), b"entry")
    files = [found for found in tmp_path.rglob("*") if found.is_file()]
    assert sorted(found.parent.parent.name for found in files) == ["ac", "cas"]


@pytest.mark.parametrize("make", ["symlink", "fifo", "folder"])
def test_what_is_not_a_file_is_damage_and_heals(own, tmp_path, make):
    key = digest(b"k")
    path = own.path("ac", key)
    path.parent.mkdir(parents=True)
    if make == "symlink":
        path.symlink_to("/etc/hostname")
    elif make == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(StoreError) as caught:
        own.get_entry(key)
    assert caught.value.kind == "corrupt"
    own.discard("ac", key)
    assert own.get_entry(key) is None
    own.put_entry(key, b"entry")
    assert own.get_entry(key) == b"entry"


def test_a_folder_in_the_way_of_a_blob_is_moved_aside(own):
    path = own.path("cas", digest(b"x"))
    path.mkdir(parents=True)
    put(own, b"x")
    assert poured(own, b"x") == b"x"


def test_an_oversized_entry_is_not_read(own):
    path = own.path("ac", digest(b"k"))
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="larger than any entry"):
        own.get_entry(digest(b"k"))


def test_a_bomb_is_stopped_at_the_size_of_the_blob(tmp_path):
    store = DirectoryStore(tmp_path, shared=True)
    data = bytes(200 << 20)
    path = put(store, data)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(StoreError, match="longer than"):
        poured_as(store, digest(data), 100)


def poured_as(store, name, size):
    import io

    from max_build.store.base import Sink

    return store.get_blob(name, Sink(io.BytesIO(), size))


def test_foreign_names_are_not_listed(own, tmp_path):
    put(own, b"x")
    (tmp_path / "cas" / "README").write_text("hello")
    (tmp_path / "cas" / "zz").mkdir()
    (tmp_path / "cas" / "zz" / "notes.txt").write_text("hello")
    assert len(list(own.list("cas"))) == 1


@pytest.mark.parametrize("folder", ["tmp", "cas"])
def test_writers_that_make_a_folder_at_once_may_take_away_each_others(own, monkeypatch, folder):
    """Each moves its own new folder over the others', as long as these are empty."""
    calls = {"tmp": (os, "open"), "cas": (os, "replace")}
    module, name = calls[folder]
    original, taken = getattr(module, name), []

    def late(path, *rest, **options):
        if len(taken) < 5:
            parent = os.path.dirname(rest[0] if folder == "cas" else path)
            if folder in parent:
                taken.append(parent)
                os.rmdir(parent)
        return original(path, *rest, **options)

    monkeypatch.setattr(module, name, late)
    assert put(own, b"bytes").read_bytes() == b"bytes"
    assert len(taken) == 5


def test_first_writers_who_make_the_folders_at_once_lose_nothing(tmp_path):
    for turn in range(300):
        store = DirectoryStore(Path(tempfile.mkdtemp(dir=tmp_path)))
        keys = [digest(f"{turn} {number}".encode()) for number in range(4)]
        gate = threading.Barrier(len(keys))

        def put(key, store=store, gate=gate):
            gate.wait()
            store.put_entry(key, b"x")

        with ThreadPoolExecutor(len(keys)) as pool:
            list(pool.map(put, keys))
        assert [store.get_entry(key) for key in keys] == [b"x"] * len(keys)
