"""One open weights file: its bytes mapped, or read in large pieces, and never a SIGBUS.

A mapping is `MAP_PRIVATE`, readable *and* writable, and `MAP_NORESERVE`: consumers that copy
read-only arrays in silence (MAX's `Buffer.from_numpy`) then alias it, nothing written through a
view reaches the file, pages are shared between processes, and strict-overcommit hosts do not
count it. Where a mapping is a bad idea (`policy`), an anonymous *arena* of the file's size
takes its place, page for page: a tensor lies at the same distance from the start in both, and
blocks of the arena are filled by large parallel reads when first asked for.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import threading
import time
import weakref
from typing import TYPE_CHECKING, TypeVar

from max_build.errors import WeightsError
from max_build.machine import available_memory, mount_of
from max_build.weights import policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["CHUNK", "File", "identity", "in_parallel", "workers"]

_log = logging.getLogger(__name__)

#: Bytes of one read or of one populated window: large enough for O_DIRECT and network
#: filesystems to run at full speed, small enough to stay in the last-level cache.
CHUNK = 4 << 20
_BLOCK = 64 << 10  # granule in which an arena is filled
_PAGE = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000
_SAMPLES, _SAMPLE = 256, 16  # windows, and pages in each, that tell what is cached
_MADV_POPULATE_READ = 22  # Linux 5.14

_T = TypeVar("_T")


class File:
    """A regular file, opened once and checked against change ever after.

    Safe to share between threads and across a fork.

    Raises
    ------
    WeightsError
        If the file cannot be opened; from any method, if it can no longer be read or has
        changed since.
    """

    def __init__(self, path: str, mode: policy.Mode = "auto") -> None:
        self.path = path
        self.mode = mode
        self._descriptor = -1
        try:
            # A FIFO would block an open that waits for its writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._descriptor)
        except (OSError, ValueError) as error:
            message = f"cannot open weights file `{path}`: {_reason(error)}"
            raise WeightsError(message) from error
        if not stat.S_ISREG(status.st_mode):
            message = f"weights file `{path}` is not a regular file"
            raise WeightsError(message)
        self.size = status.st_size
        self.identity = identity(status)
        self.opened = time.time_ns()
        self._memory: mmap.mmap | None = None
        self._filled: bytearray | None = None  # one flag per block of an arena
        self._lock = threading.Lock()
        _open_files.add(self)

    def __repr__(self) -> str:
        return f"File({self.path!r}, {self.size} bytes)"

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        """Close the file and unmap it.

        Raises
        ------
        WeightsError
            If an array or buffer still lies in it.
        """
        try:
            if self._memory is not None:
                self._memory.close()
        except BufferError:
            message = f"cannot close `{self.path}`: arrays or buffers still use its memory"
            raise WeightsError(message, hint="drop them first") from None
        self._memory = None
        self.__del__()

    @property
    def descriptor(self) -> int:
        """The open descriptor; use it with positioned reads only."""
        if self._descriptor < 0:
            message = f"weights file `{self.path}` is closed"
            raise WeightsError(message)
        return self._descriptor

    def check(self) -> None:
        """Raise unless the file is as it was when opened."""
        status = os.fstat(self.descriptor)
        if status.st_size != self.size or status.st_mtime_ns != self.identity[3]:
            sizes = f"{self.size} bytes then, {status.st_size} now"
            message = f"weights file `{self.path}` was changed while in use: {sizes}"
            raise WeightsError(message, hint="replace weights by renaming a new file over the old")

    # Reading

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`."""
        try:
            found = os.pread(self.descriptor, nbytes, offset)
        except OSError as error:
            raise self._failed(offset, error) from error
        if len(found) < nbytes:  # a signal, a read of more than 2 GiB, or the end
            buffer = bytearray(nbytes)
            self.read_into(offset, memoryview(buffer))
            return bytes(buffer)
        return found

    def read_into(self, offset: int, buffer: memoryview, *, descriptor: int = -1) -> None:
        """Fill `buffer` with the bytes from `offset`."""
        at, end = offset, offset + len(buffer)
        source = self.descriptor if descriptor < 0 else descriptor
        while at < end:
            try:
                got = os.preadv(source, [buffer[at - offset :]], at)
            except OSError as error:
                raise self._failed(at, error) from error
            if got == 0:
                raise self._failed(at, f"the file ends there; it had {self.size} bytes when opened")
            at += got

    def _failed(self, offset: int, error: Exception | str) -> WeightsError:
        reason = _reason(error) if isinstance(error, Exception) else error
        message = f"cannot read weights file `{self.path}` at offset {offset}: {reason}"
        return WeightsError(message)

    # Memory

    def memory(self, offset: int, nbytes: int) -> mmap.mmap:
        """Return memory whose byte `i` is the file's byte `i`, good in the range asked for."""
        self.check()
        memory = self._memory
        if memory is None:
            with self._lock:
                memory = self._memory or self._allocate()
        if self._filled is not None:
            self._fill(memory, self._filled, offset, nbytes)
        return memory

    @property
    def is_read(self) -> bool:
        """Tensors are read into an arena when asked for, not mapped."""
        return self._filled is not None

    def _allocate(self) -> mmap.mmap:
        access = policy.access_for(self.mode, self.filesystem)
        if access.how == "map":
            try:
                self._memory = mmap.mmap(
                    self.descriptor,
                    self.size,
                    flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            except OSError as error:
                # ENODEV: the filesystem has no maps; ENOMEM: an address-space limit.
                if self.mode == "map" or error.errno not in (errno.ENODEV, errno.ENOMEM):
                    raise self._failed(0, error) from error
                access = policy.Access("read", f"mmap failed: {_reason(error)}")
            else:
                return self._memory
        _log.info("%s: %s because %s", self.path, access.how, access.reason)
        blocks = -(-self.size // _BLOCK)
        try:
            memory = mmap.mmap(
                -1, blocks * _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            )
        except OSError as error:
            raise self._failed(0, error) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _advise(memory, mmap.MADV_HUGEPAGE, 0, len(memory))
        self._filled = bytearray(blocks)
        self._memory = memory
        return memory

    @property
    def filesystem(self) -> str:
        """Type of the filesystem that holds the file, or `""`."""
        return mount_of(self.path, self.identity[0]).kind

    def _fill(self, memory: mmap.mmap, filled: bytearray, offset: int, nbytes: int) -> None:
        first, last = offset // _BLOCK, -(-(offset + nbytes) // _BLOCK)
        if filled.find(0, first, last) < 0:
            return
        with self._lock:
            pieces = list(_missing(filled, first, last))
            if not pieces:
                return
            need = sum(end - begin for begin, end in pieces) * _BLOCK
            if need > (have := available_memory()):
                message = f"reading `{self.path}` takes {need >> 20} MiB; {have >> 20} MiB are free"
                raise WeightsError(message, hint='mode="map" reads in place')
            from max_build.weights.stream import Reader, goes_direct

            direct = len(pieces) > 1 and goes_direct(self)
            view = memoryview(memory)

            def fill(piece: tuple[int, int]) -> None:
                begin, end = piece[0] * _BLOCK, min(piece[1] * _BLOCK, self.size)
                reader = Reader(self, direct=direct)
                try:
                    reader.read(begin, end - begin, view[begin : piece[1] * _BLOCK])
                finally:
                    reader.close()

            try:
                in_parallel(fill, pieces)
            finally:
                view.release()
            self.check()  # what was read may be half of one file and half of another
            for begin, end in pieces:
                filled[begin:end] = b"\1" * (end - begin)

    def resident(self) -> float:
        """Return the part of the file that is in the page cache, from 0 to 1, by samples."""
        import ctypes

        # A map of its own: the tensors' may be an arena, and asking must not keep one.
        try:
            memory = mmap.mmap(
                self.descriptor, self.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except (OSError, ValueError):
            return 0.0
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        anchor = ctypes.c_char.from_buffer(memory)
        address, pages = ctypes.addressof(anchor), -(-self.size // _PAGE)
        flags = (ctypes.c_ubyte * _SAMPLE)()
        asked = found = 0
        for begin in range(0, pages, max(_SAMPLE, pages // _SAMPLES)):
            count = min(_SAMPLE, pages - begin)
            if mincore(address + begin * _PAGE, count * _PAGE, flags) == 0:
                asked += count
                found += sum(flag & 1 for flag in flags[:count])
        del anchor
        memory.close()
        return found / max(asked, 1)

    def prefetch(self, offset: int, nbytes: int, done: Callable[[int], object]) -> None:
        """Make a range resident, so that no later access faults page by page.

        Parameters
        ----------
        offset, nbytes
            The range.
        done
            Called with the number of bytes of each window as it becomes resident.
        """
        memory = self.memory(offset, 0)
        end = offset + nbytes
        if self._filled is None and nbytes:
            # All of it is asked for at once; the windows below then find it under way.
            os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
        for begin in range(offset, end, CHUNK):
            length = min(CHUNK, end - begin)
            if self._filled is None:
                self._populate(memory, begin, length)
            else:
                self.memory(begin, length)
            done(length)

    def _populate(self, memory: mmap.mmap, offset: int, nbytes: int) -> None:
        start = offset // _PAGE * _PAGE
        self.check()
        try:
            memory.madvise(_MADV_POPULATE_READ, start, offset + nbytes - start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise self._failed(offset, error) from error
            self.read(offset, nbytes)  # an older kernel: at least the page cache has it

    def __reduce__(self) -> str | tuple[object, ...]:
        message = "an open weights file cannot be pickled; open it again by its path"
        raise TypeError(message)


_Identity = tuple[int, int, int, int]


def identity(status: os.stat_result) -> _Identity:
    """Return what stays the same as long as a file does."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _advise(memory: mmap.mmap, advice: int, start: int, length: int) -> None:
    try:
        memory.madvise(advice, start, length)
    except OSError:
        _log.debug("madvise %s refused", advice)


def _missing(filled: bytearray, first: int, last: int) -> Iterable[tuple[int, int]]:
    """Yield the runs of blocks not yet filled, each at most a chunk long."""
    most = CHUNK // _BLOCK
    while (first := filled.find(0, first, last)) >= 0:
        end = filled.find(1, first, last)
        end = min(last if end < 0 else end, first + most)
        yield first, end
        first = end


def workers(pieces: int) -> int:
    """Return how many threads to read `pieces` chunks with: two to eight, by the CPUs."""
    return max(1, min(pieces, 8, max(2, len(os.sched_getaffinity(0)))))


def in_parallel(work: Callable[[_T], object], pieces: list[_T]) -> None:
    """Do `work` on each piece on a few threads; raise the first failure when all have ended."""
    if len(pieces) <= 1:
        for piece in pieces:
            work(piece)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(workers(len(pieces)), "max-build-read") as pool:
        for _ in pool.map(work, pieces):
            pass


_open_files: weakref.WeakSet[File] = weakref.WeakSet()


def _renew_locks() -> None:
    # A thread of the parent may have held a lock at the fork; nobody here would release it.
    for file in _open_files:
        file._lock = threading.Lock()  # noqa: SLF001


os.register_at_fork(after_in_child=_renew_locks)
