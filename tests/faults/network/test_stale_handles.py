"""What a network file system did in the guest, done to a plain directory: stale handles."""

from __future__ import annotations

import errno
import io
import os

import pytest

from max_build.errors import StoreError
from max_build.key import digest
from max_build.store.base import Sink
from max_build.store.directory import DirectoryStore
from max_build.testing.store import poured


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path, "shared", shared=True)


def fail(monkeypatch, name, number, times, below):
    """Let a call of `os` fail that often where its first argument is, or opens, a path of ours."""
    real = getattr(os, name)
    left = [times]

    def call(first, *arguments, **named):
        place = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if left[0] and below in place:
            left[0] -= 1
            raise OSError(number, os.strerror(number), place)
        return real(first, *arguments, **named)

    monkeypatch.setattr(os, name, call)
    return left


@pytest.mark.parametrize("name", ["open", "fstat"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_stale_file_is_opened_anew(store, monkeypatch, name, times):
    store.put_entry("a" * 64, b"entry")
    store.put_blob(digest(b"blob"), io.BytesIO(b"blob"))
    store.take_lease("a" * 64, b"me")
    for below in ("/ac/", "/cas/", "/lease/"):
        left = fail(monkeypatch, name, errno.ESTALE, times, below)
        assert store.get_entry("a" * 64) == b"entry"
        assert poured(store, b"blob") == b"blob"
        assert store.lease_mark("a" * 64) is not None
        assert left == [0]


def test_a_file_that_stays_stale_is_a_fault(store, monkeypatch):
    store.put_entry("a" * 64, b"entry")
    fail(monkeypatch, "open", errno.ESTALE, 1000, "/ac/")
    with pytest.raises(StoreError) as caught:
        store.get_entry("a" * 64)
    assert caught.value.kind == "io"


def test_a_blob_that_goes_stale_half_way_is_not_poured_twice(store, monkeypatch):
    data = os.urandom(4 << 20)  # several reads; zstd cannot shorten it
    store.put_blob(digest(data), io.BytesIO(data))

    sink = Sink(io.BytesIO(), len(data))
    real, left = sink.write, [1]

    def write(more):
        if sink.count and left:
            left.clear()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(more)

    monkeypatch.setattr(sink, "write", write)
    with pytest.raises(StoreError) as caught:
        store.get_blob(digest(data), sink)
    assert caught.value.kind == "io"
    assert 0 < sink.count < len(data)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_shard_that_another_replaced_is_looked_up_anew(store, monkeypatch, number):
    left = fail(monkeypatch, "replace", number, 2, "/tmp/")
    store.put_entry("a" * 64, b"entry", replace=True)
    assert left == [0]
    assert store.get_entry("a" * 64) == b"entry"


def test_a_folder_that_the_client_takes_for_absent_is_there(store, monkeypatch):
    # As NFS answers: the folder is not there; but nothing can be renamed to it.
    store.put_entry("ab" + "0" * 62, b"first")
    real = os.stat

    def stat(path, *arguments, **named):
        if str(path).endswith("/ac/ab"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", stat)
    assert store.put_entry("ab" + "1" * 62, b"second")
    assert store.get_entry("ab" + "1" * 62) == b"second"
