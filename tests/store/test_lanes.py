"""Calls that may never return."""

from __future__ import annotations

import threading
import time

import pytest

from max_build.errors import StoreError
from max_build.store.lanes import GivenUp, Lanes


def lanes_of_a_tier():
    return [one for one in threading.enumerate() if one.name == "max-build-tier"]


def test_the_time_without_progress_counts_from_the_last_one():
    over = threading.Event()
    seen = iter([0, 7])  # it moved once, right after the start, and never again
    started = time.monotonic()
    with pytest.raises(GivenUp):
        Lanes().call(over.wait, 2.0, lambda: next(seen, 7))
    assert time.monotonic() - started < 3.5
    over.set()


def test_a_call_that_gets_on_is_waited_for():
    moved = 0

    def work():
        nonlocal moved
        for _ in range(30):
            time.sleep(0.05)
            moved += 1
        return "done"

    assert Lanes().call(work, 0.5, lambda: moved) == "done"


def test_a_call_that_was_given_up_and_returns_leaves_no_thread():
    before = set(lanes_of_a_tier())
    over = threading.Event()
    with pytest.raises(GivenUp):
        Lanes().call(over.wait, 0.05)
    (thread,) = set(lanes_of_a_tier()) - before
    over.set()
    thread.join(20)
    assert not thread.is_alive()


def test_where_no_thread_can_be_started_the_store_has_failed():
    usual = threading.stack_size(1 << 46)  # more than there is address space for
    try:
        with pytest.raises(StoreError, match="no thread can be started"):
            Lanes().call(lambda: None, 1.0)
    finally:
        threading.stack_size(usual)
