"""Calls that may never return, made so that the caller does.

A hung network mount, a resolver that does not answer, a server that holds the line: no timeout of
a library covers them all. Each call runs on a daemon thread; one that is given up keeps its
thread, which the process leaves behind when it ends.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

from max_build.errors import StoreError

__all__ = ["GivenUp", "Lanes"]

T = TypeVar("T")

_LOOKS = 8  # at the progress, in the time that may pass without any


class GivenUp(Exception):  # noqa: N818 - said of a call, it reads right
    """The call did not end, nor show progress, in time."""


class _Lane(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="max-build-tier", daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()


class Lanes:
    """Threads that are used again while their calls return."""

    def __init__(self) -> None:
        self._idle: list[_Lane] = []
        self._process = os.getpid()
        self._lock = threading.Lock()

    def call(
        self, function: Callable[[], T], limit: float, progress: Callable[[], int] | None = None
    ) -> T:
        """Return what `function` returns, or raise what it raises.

        Parameters
        ----------
        function
            What to call.
        limit
            Seconds it may take; with `progress`, seconds it may take without any.
        progress
            A number that changes while the call gets on.

        Raises
        ------
        GivenUp
            If it takes longer. The call goes on unseen; its result is dropped.
        StoreError
            If there can be no more threads.
        """
        # A queue and no event: its waiting is native code, a third quicker to and fro.
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def job() -> None:
            try:
                answer.put((function(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller
                answer.put((None, error))

        with self._lock:
            if self._process != os.getpid():  # a fork has our list, and none of our threads
                self._process = os.getpid()
                self._idle.clear()
            lane = self._idle.pop() if self._idle else None
        if lane is None:
            lane = _Lane()
            try:
                lane.start()
            except RuntimeError as error:  # the user may have no more, or there is no memory
                message = "no thread can be started to reach an outer cache"
                raise StoreError(message) from error
        lane.jobs.put(job)
        seen, moved = progress() if progress else 0, time.monotonic()
        while True:
            try:
                result, failure = answer.get(timeout=limit / _LOOKS if progress else limit)
                break
            except queue.Empty:
                now = progress() if progress else 0
                if now != seen:
                    seen, moved = now, time.monotonic()
                elif time.monotonic() - moved >= limit or not progress:
                    lane.jobs.put(None)  # so that it ends, should the call ever do
                    raise GivenUp from None
        with self._lock:
            self._idle.append(lane)
        if failure is not None:
            raise failure
        return cast("T", result)

    def close(self) -> None:
        """End the threads that are idle."""
        with self._lock:
            for lane in self._idle:
                lane.jobs.put(None)
            self._idle.clear()
