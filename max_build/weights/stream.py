"""Carry out a plan: read blocks into staging buffers on a few threads, and pass them on.

Memory stays at the staging buffers whatever the model's size: reads are positioned and
bounded, no file is mapped, and each buffer is used again.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from max_build.machine import available_memory
from max_build.weights import policy
from max_build.weights.plan import SECTOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from max_build.weights.pages import File
    from max_build.weights.plan import Block, Plan

__all__ = ["Reader", "Sink", "Streamed", "execute", "goes_direct", "staging"]


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a transfer or prefetch did.

    Parameters
    ----------
    nbytes, seconds
        Bytes delivered, and the time it took.
    direct
        Paths of the files that were read round the page cache.
    """

    nbytes: int
    seconds: float
    direct: tuple[str, ...] = ()

    @property
    def gigabytes_per_second(self) -> float:
        """Bandwidth, in 1e9 bytes a second."""
        return self.nbytes / max(self.seconds, 1e-9) / 1e9


class Sink(Protocol):
    """Where blocks go. Each lane is used by one thread at a time."""

    def buffer(self, lane: int, slot: int) -> memoryview:
        """Return the staging buffer, page-aligned, once nothing reads from it any more."""

    def take(self, block: Block) -> None:
        """Start the block's copies from its staging buffer to its arena."""

    def finish(self, lane: int) -> None:
        """Return when all copies of the lane have ended."""


class Reader:
    """Positioned reads of one file by one thread.

    Parameters
    ----------
    file
        The file; opened once more, for threads that share a descriptor look like random
        access to a network filesystem.
    direct
        Read round the page cache where the filesystem lets us.
    """

    def __init__(self, file: File, *, direct: bool = False) -> None:
        self._file = file
        self._descriptor = -1
        self.direct = direct
        self._open()

    def _open(self) -> None:
        # By way of /proc, so that it is the same file even if another took its name.
        path = f"/proc/self/fd/{self._file.descriptor}"
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
            self._descriptor = os.open(path, flags)
        except OSError:
            self.direct = False
            self._descriptor = os.dup(self._file.descriptor)

    def read(self, offset: int, nbytes: int, buffer: memoryview) -> None:
        """Fill the first `nbytes` of `buffer` from a sector's `offset`."""
        done = 0
        while self.direct and done < nbytes:
            whole = min(-(-nbytes // SECTOR) * SECTOR, len(buffer))
            try:
                got = os.preadv(self._descriptor, [buffer[done:whole]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                got = 0
            done += got
            # The end of the file may lie inside a sector, but nothing else may; and what
            # the device refuses once is asked of the page cache from now on.
            if got == 0 or (done < nbytes and done % SECTOR):
                self.close()
                self.direct = False
                self._open()
        if done < nbytes:
            self._file.read_into(offset + done, buffer[done:nbytes], descriptor=self._descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def staging(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory for one slot, of huge pages if there are any."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def execute(
    plan: Plan,
    sink: Sink,
    progress: Callable[[int, int], object] | None = None,
    *,
    direct: bool | None = None,
) -> Streamed:
    """Carry out `plan` into `sink`.

    Parameters
    ----------
    progress
        Called with the bytes read so far and the bytes to read.
    direct
        Go round the page cache; None decides for each file by filesystem, by how much of it
        is cached and by free memory.

    Raises
    ------
    WeightsError
        If a file can no longer be read or was changed meanwhile.
    """
    begun = time.perf_counter()
    for file in plan.files:
        file.check()
    directly = [goes_direct(file) if direct is None else direct for file in plan.files]
    total, done, lock = plan.read_bytes, 0, threading.Lock()
    failures: list[BaseException] = []

    def run(lane: int) -> None:
        nonlocal done
        readers: dict[int, Reader] = {}
        try:
            for block in plan.blocks[lane :: plan.lanes]:
                if failures:
                    break
                if (reader := readers.get(block.file)) is None:
                    file = plan.files[block.file]
                    reader = readers[block.file] = Reader(file, direct=directly[block.file])
                reader.read(block.offset, block.nbytes, sink.buffer(lane, block.slot))
                sink.take(block)
                if progress is not None:
                    with lock:
                        done += block.nbytes
                        progress(done, total)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failures.append(error)
        finally:
            try:
                sink.finish(lane)
            except BaseException as error:  # noqa: BLE001
                failures.append(error)
            for reader in readers.values():
                reader.close()

    lanes = min(plan.lanes, len(plan.blocks))
    threads = [
        threading.Thread(target=run, args=(lane,), name=f"max-build-lane-{lane}")
        for lane in range(1, lanes)
    ]
    for thread in threads:
        thread.start()
    if lanes:
        run(0)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    for file in plan.files:
        file.check()
    paths = tuple(file.path for file, on in zip(plan.files, directly, strict=True) if on)
    return Streamed(plan.nbytes, time.perf_counter() - begun, paths)


def goes_direct(file: File) -> bool:
    """Whether reading the whole of `file` should go round the page cache."""
    tight = available_memory() < 2 * file.size
    return policy.reads_directly(file.filesystem, file.resident(), tight=tight)
