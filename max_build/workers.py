"""The building side of workers: start, ask, time out, and tell how one died."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from max_build import compilers
from max_build.errors import CompileError, MaxBuildError
from max_build.machine import available_memory
from max_build.messages import Answer, Compiled, Derived, Failed, Request

__all__ = ["MEMORY_EACH", "Worker", "Workers", "capacity", "environment"]

T = TypeVar("T", Derived, Compiled)

MEMORY_EACH = 2 << 30
"""Bytes of memory to count for one worker."""

_LOG_LIMIT = 64 << 10
_TAIL_LINES = 20


def capacity() -> int:
    """How many workers this machine carries: min(CPUs, memory / 2 GiB), at least 1.

    Memory is what is available now, or what the control groups still allow where that is less.
    """
    cpus = len(os.sched_getaffinity(0))
    return max(1, min(cpus, available_memory() // MEMORY_EACH))


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: that of the build, with what may shape a graph made canonical.

    A set's order, a number's or a date's format and the text encoding are then the same on every
    machine, so that a graph built from them is too. A build that ignores Python's variables
    (`python -I`, `-E`) hides them from its workers, which cannot ignore the hash seed.
    """
    hidden = "PYTHON" if sys.flags.ignore_environment else "\0"
    return {
        **{name: value for name, value in base.items() if not name.startswith(hidden)},
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "TZ": "UTC",
    }


def _flags() -> list[str]:
    """What makes a worker import from where the build does: lookups go by the build's path."""
    return [*["-s"] * sys.flags.no_user_site, *["-S"] * sys.flags.no_site]


class Worker:
    """One subprocess, for one job or for many of one compiler.

    Parameters
    ----------
    root
        The project's directory, where the worker runs.
    """

    def __init__(self, root: Path) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._log_start = 0
        self._answers, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *_flags(), "-m", "max_build.worker", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs,),
                cwd=root,
                env=environment(os.environ),
                umask=0o022,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        self._buffer = b""
        self.alive = True

    def ask(self, request: Request, kind: type[T], *, timeout: float) -> T:
        """Send one request and wait for its answer of that kind, `timeout` seconds at most.

        Raises
        ------
        CompileError
            If the worker died or took too long, with its own last words; or what it answered,
            where the compiler or the project is at fault.
        ToolchainError
            If it answered that a compiler is missing or broken.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a dead worker is told by the missing answer
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill()
                message = f"gave up after {timeout:g} s{self._last_words()}"
                hint = "raise `compile-timeout` (`MAX_BUILD_COMPILE_TIMEOUT`, in seconds)"
                raise CompileError(message, hint=hint)
            ready, _, _ = select.select([self._answers], [], [], min(left, 3600.0))
            if not ready:
                continue
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise self._death()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: Answer = msgspec.json.decode(line, type=Answer)
        if isinstance(answer, Failed):
            raise answer.error()
        assert isinstance(answer, kind), f"{type(request).__name__} was answered by {answer!r}"
        return answer

    def take_log(self) -> str:
        """What the worker wrote since the last call, cut to its last 64 KiB."""
        self._log.seek(self._log_start)
        data = self._log.read()
        self._log_start += len(data)
        return data[-_LOG_LIMIT:].decode(errors="replace").strip()

    def kill(self) -> None:
        """End it and everything it started."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Let it leave, and see that it does."""
        self.alive = False
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self.kill()
        with contextlib.suppress(OSError):
            os.close(self._answers)
        self._log.close()

    def _death(self) -> CompileError:
        if not self.alive:
            return CompileError("the build was interrupted")
        self.alive = False
        status = self._process.wait()
        hint = ""
        if status == -signal.SIGKILL:
            how = "was killed (SIGKILL), most likely because memory ran out"
            hint = "`MAX_BUILD_JOBS=1` compiles one unit at a time"
        elif status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        else:
            how = f"left with status {status} before it answered"
        return CompileError(f"the worker {how}{self._last_words()}", hint=hint)

    def _last_words(self) -> str:
        lines = self.take_log().splitlines()[-_TAIL_LINES:]
        return "; its last words:\n  " + "\n  ".join(lines) if lines else ""


class Workers:
    """The workers of one build: idle ones are used again where their compiler allows."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._idle: dict[str, list[Worker]] = {}
        self._busy: set[Worker] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def worker(self, compiler: str) -> Iterator[Worker]:
        """A worker for one job of `compiler`, for the length of the block."""
        with self._lock:
            idle = self._idle.get(compiler)
            worker = idle.pop() if idle else Worker(self._root)
            self._busy.add(worker)
        try:
            yield worker
        except MaxBuildError:
            raise  # an answer like any other: the worker waits for its next request
        except BaseException:
            worker.kill()
            raise
        finally:
            again = worker.alive and not compilers.get(compiler).one_job_per_process
            with self._lock:
                self._busy.discard(worker)
                if again:
                    worker.take_log()
                    self._idle.setdefault(compiler, []).append(worker)
            if not again:
                worker.close()

    def close(self) -> None:
        """Let idle workers leave, and end those that are still at work."""
        with self._lock:
            busy = tuple(self._busy)
            idle = [one for workers in self._idle.values() for one in workers]
            self._idle.clear()
        for worker in busy:
            worker.kill()
        for worker in idle:
            worker.close()
