"""What every store must do, as tests to inherit.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def open_store(self, tmp_path):
            return lambda *, writable=True: MyStore(tmp_path, writable=writable)

Each call of `open_store` gives a new handle to the same, at first empty, place.
"""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Callable
from typing import Protocol

import pytest

from max_build.errors import StoreError
from max_build.key import Components, canonical, digest, key_of
from max_build.record import Blob, Record
from max_build.store.base import Leases, Sink, Store
from max_build.store.entry import seal

__all__ = ["Opener", "StoreContract", "example", "poured"]


class Opener(Protocol):
    """Opens the store under test."""

    def __call__(self, *, writable: bool = True) -> Store:
        """A new handle."""


def example(name: str, *blobs: bytes) -> Record:
    """A record of a unit `name` with these blobs (at least one)."""
    components = Components(compiler={"test": "1"}, target="cpu", sources={"ir": name})
    named = tuple(Blob.of("mef", data) for data in blobs)
    return Record(
        key=key_of(components), unit=name, components=components, blobs=named, seconds=2.0
    )


def poured(store: Store, data: bytes) -> bytes | None:
    """What the store gives for the blob that `data` is, or None if it has none."""
    file = io.BytesIO()
    sink = Sink(file, len(data))
    return file.getvalue() if store.get_blob(digest(data), sink) else None


class StoreContract:
    """Inherit, and give `open_store`.

    Attributes
    ----------
    lists
        Whether the store can list its names.
    conditional
        Whether a second writer of an entry is always told that it is one.
    """

    lists = True
    conditional = True

    @pytest.fixture
    def store(self, open_store: Opener) -> Store:
        """The store, to be written."""
        return open_store()

    def test_what_was_never_put_is_absent(self, store: Store) -> None:
        name = digest(b"never")
        assert store.get_entry(name) is None
        assert not store.has_blob(name)
        assert poured(store, b"never") is None

    def test_an_entry_comes_back(self, store: Store, open_store: Opener) -> None:
        key, data = _entry("a")
        assert store.put_entry(key, data)
        assert store.get_entry(key) == data
        assert open_store(writable=False).get_entry(key) == data

    def test_the_first_writer_of_an_entry_wins(self, store: Store, open_store: Opener) -> None:
        key, data = _entry("a")
        _, other = _entry("b")
        assert store.put_entry(key, data)
        assert not open_store().put_entry(key, other)
        assert store.get_entry(key) == data

    def test_an_entry_can_be_replaced(self, store: Store) -> None:
        key, data = _entry("a")
        _, other = _entry("b")
        store.put_entry(key, data)
        assert store.put_entry(key, other, replace=True)
        assert store.get_entry(key) == other

    @pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) + 3, 12 << 20])
    def test_a_blob_comes_back(self, store: Store, open_store: Opener, size: int) -> None:
        data = os.urandom(size // 2) + bytes(size - size // 2)
        store.put_blob(digest(data), io.BytesIO(data))
        assert store.has_blob(digest(data))
        assert poured(open_store(writable=False), data) == data

    def test_a_blob_is_read_from_where_its_source_stands(self, store: Store) -> None:
        source = io.BytesIO(b"headpayload")
        source.seek(4)
        store.put_blob(digest(b"payload"), source)
        assert poured(store, b"payload") == b"payload"

    def test_a_blob_is_replaced(self, store: Store) -> None:
        # How a damaged one is healed. A server that checks digests takes only the right bytes.
        name = digest(b"right")
        store.put_blob(name, io.BytesIO(b"right"))
        store.put_blob(name, io.BytesIO(b"right"))
        assert poured(store, b"right") == b"right"

    def test_a_blob_longer_than_its_size_stops_the_transfer(self, store: Store) -> None:
        data = bytes(4 << 20)
        store.put_blob(digest(data), io.BytesIO(data))
        file = io.BytesIO()
        with pytest.raises(StoreError) as caught:
            store.get_blob(digest(data), Sink(file, 1000))
        assert caught.value.kind == "corrupt"
        assert len(file.getvalue()) <= 1000

    def test_names_are_listed(self, store: Store) -> None:
        if not self.lists:
            with pytest.raises(StoreError):
                list(store.list("ac"))
            return
        assert list(store.list("ac")) == list(store.list("cas")) == []
        key, data = _entry("a")
        store.put_entry(key, data)
        store.put_blob(digest(b"x"), io.BytesIO(b"x"))
        (entry,) = store.list("ac")
        (blob,) = store.list("cas")
        assert (entry.kind, entry.name) == ("ac", key)
        assert (blob.kind, blob.name) == ("cas", digest(b"x"))
        assert entry.size >= len(data)
        assert entry.modified > 1_000_000_000

    def test_deleting_is_final_and_may_be_repeated(self, store: Store) -> None:
        key, data = _entry("a")
        store.put_entry(key, data)
        store.put_blob(digest(b"x"), io.BytesIO(b"x"))
        for _ in range(2):
            store.delete("ac", key)
            store.delete("cas", digest(b"x"))
        assert store.get_entry(key) is None
        assert not store.has_blob(digest(b"x"))
        assert store.put_entry(key, data)

    def test_what_is_damaged_can_be_got_out_of_the_way(self, store: Store) -> None:
        key, data = _entry("a")
        store.put_entry(key, data)
        store.discard("ac", key)
        store.discard("ac", key)
        assert store.get_entry(key) is None

    def test_a_reader_changes_nothing(self, open_store: Opener) -> None:
        reader = open_store(writable=False)
        key, data = _entry("a")
        for change in (
            lambda: reader.put_entry(key, data),
            lambda: reader.put_blob(digest(b"x"), io.BytesIO(b"x")),
            lambda: reader.delete("ac", key),
        ):
            with pytest.raises(StoreError) as caught:
                change()
            assert caught.value.kind == "read-only"
        assert open_store().get_entry(key) is None

    def test_many_writers_of_one_name_leave_one_whole_value(self, open_store: Opener) -> None:
        blob = os.urandom(300_000)
        entries = [_entry(f"{n}")[1] for n in range(8)]
        key = digest(b"contended")
        won: list[bool] = []

        def write(data: bytes) -> None:
            store = open_store()
            store.put_blob(digest(blob), io.BytesIO(blob))
            won.append(store.put_entry(key, data))
            assert poured(store, blob) == blob

        _together([functools.partial(write, data) for data in entries])
        assert open_store().get_entry(key) in entries
        if self.conditional:
            assert sum(won) >= 1

    def test_a_lease_has_one_holder(self, store: Store, open_store: Opener) -> None:
        if not isinstance(store, Leases):
            return  # a store need not have leases
        other = open_store()
        assert isinstance(other, Leases)
        key = digest(b"leased")
        assert store.lease_mark(key) is None
        assert store.take_lease(key, b"one")
        assert not other.take_lease(key, b"two")
        before = other.lease_mark(key)
        store.renew_lease(key, b"one")
        assert before is not None
        assert other.lease_mark(key) != before
        other.drop_lease(key, b"two")
        assert store.lease_mark(key) is not None
        store.drop_lease(key, b"one")
        assert other.take_lease(key, b"two")
        store.drop_lease(key, None)
        assert other.lease_mark(key) is None


def _entry(name: str) -> tuple[str, bytes]:
    payload = canonical({"name": name})
    return digest(name.encode()), seal(payload)


def _together(calls: list[Callable[[], object]]) -> None:
    """Run all at once, and raise the first of what they raise."""
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
