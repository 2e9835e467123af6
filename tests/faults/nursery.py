"""Workers without their start of 0.2 s: forks of a process that has everything imported.

The process that forks them builds nothing itself: SQLite must not be used on both sides of a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback

from max_build import worker

LIMIT = 60.0


class Nursery:
    """Stands in for `subprocess.Popen` of workers, in the process that made it and its forks."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._ours.close()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who mind
            with contextlib.suppress(BaseException):
                self._serve(theirs)
            os._exit(0)
        theirs.close()

    def __call__(self, command, *, stdout, stderr, pass_fds, cwd, env, umask, **_) -> Nursling:
        assert command[1:3] == ["-m", "max_build.worker"]
        requests, stdin = os.pipe()
        told, tells = os.pipe()
        text = json.dumps([str(cwd), dict(env), umask]).encode()
        fds = [requests, stdout.fileno(), stderr.fileno(), *pass_fds, tells]
        socket.send_fds(self._ours, [text], fds)
        os.close(requests)
        os.close(tells)
        return Nursling(stdin, told)

    def _serve(self, theirs: socket.socket) -> None:
        while True:
            text, fds, _, _ = socket.recv_fds(theirs, 1 << 20, 5)
            if not text:
                return
            if not os.fork():
                theirs.close()
                _mind(json.loads(text), fds)
            for fd in fds:
                os.close(fd)


def _mind(request: list, fds: list[int]) -> None:
    """Fork the worker, and tell its number and in the end its status."""
    *files, answers, tells = fds
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        for fd in (*files, answers):
            os.close(fd)
        os.write(tells, b"%d\n" % pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(tells, b"%d\n" % status)
        os._exit(0)
    try:
        cwd, env, umask = request
        os.setsid()
        for number, fd in enumerate(files):
            os.dup2(fd, number)
            os.close(fd)
        os.close(tells)
        os.umask(umask)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
        worker.main(answers)
    except BaseException:  # noqa: BLE001 - its last words
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


class Nursling:
    """What `max_build.workers` uses of a `Popen`."""

    def __init__(self, stdin: int, told: int) -> None:
        self.stdin = os.fdopen(stdin, "wb")
        self._told = os.fdopen(told, "rb", buffering=0)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float = LIMIT) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([], timeout)
            self.returncode = int(self._told.readline() or 1)
        return self.returncode
