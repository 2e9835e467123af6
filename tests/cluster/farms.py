"""A real Dask farm on loopback: a scheduler, and workers with cache directories of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Farm", "farm"]


@dataclass
class Farm:
    """A scheduler in `folder`, and the workers started so far by name."""

    folder: Path
    address: str
    environment: Mapping[str, str]
    scheduler: subprocess.Popen[bytes]
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def worker(
        self, name: str, resources: str = "cuda=1 max=1", *options: str, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a worker without a nanny, so that a killed one stays dead."""
        process = _start(
            self.folder,
            name,
            {**self.environment, "MAX_BUILD_CACHE_DIR": str(self.folder / name), **variables},
            "worker",
            self.address,
            *("--name", name, "--nthreads", "1", "--no-nanny", "--host", "127.0.0.1"),
            *("--resources", resources, "--no-dashboard", "--dashboard-address", "127.0.0.1:0"),
            *options,
        )
        self.workers[name] = process
        return process

    def kill(self, name: str) -> None:
        """End a worker as a power cut would."""
        self.workers[name].send_signal(signal.SIGKILL)
        self.workers[name].wait()

    def log(self, name: str) -> str:
        """What a process said."""
        return (self.folder / f"{name}.log").read_text()

    def compiling(self, timeout: float = 120.0) -> str:
        """Wait until a worker has a compile running, and return its name."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for name, process in self.workers.items():
                if process.poll() is None and _children(process.pid):
                    return name
            time.sleep(0.02)
        message = "no worker ever compiled"
        raise AssertionError(message)


@contextlib.contextmanager
def farm(folder: Path, *options: str, **variables: str) -> Iterator[Farm]:
    """A farm without workers; everything of it is gone at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **variables}
    told = folder / "scheduler.json"
    scheduler = _start(
        folder,
        "scheduler",
        environment,
        "scheduler",
        *("--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(told)),
        *("--no-dashboard", "--dashboard-address", "127.0.0.1:0"),
        *options,
    )
    made: Farm | None = None
    try:
        made = Farm(folder, _address(told, scheduler, folder), environment, scheduler)
        yield made
    finally:
        for process in (*(made.workers.values() if made else ()), scheduler):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(
    folder: Path, name: str, environment: Mapping[str, str], *command: str
) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "distributed.cli.dask_" + command[0], *command[1:]],
            cwd=folder,
            env=dict(environment),
            stdout=log,
            stderr=log,
        )


def _address(told: Path, scheduler: subprocess.Popen[bytes], folder: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and scheduler.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(told.read_text())["address"])
        time.sleep(0.05)
    raise AssertionError((folder / "scheduler.log").read_text())


def _children(pid: int) -> list[str]:
    """The compile processes that a worker started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if f"PPid:\t{pid}\n" in status.read_text():
                command = (status.parent / "cmdline").read_bytes()
                if b"max_build.worker" in command:
                    found.append(status.parent.name)
    return found
