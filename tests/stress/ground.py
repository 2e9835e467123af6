"""Where a stress takes place: machines with a directory each, and the tier they share.

Machines are folders here, and the processes of all of them run on this one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from max_build.store import CacheSettings
from max_build.store.base import Store
from max_build.store.directory import DirectoryStore

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "servers"), str(TESTS / "store")]

KINDS = ("own", "shared", "s3", "nginx")
OUTER = "outer"
_MACHINES = 2
# A busy machine is not a sick tier: here, any time-out would be a fault that nobody can explain.
_PATIENT = {"connect_timeout": 60.0, "request_timeout": 60.0, "budget": 300.0}


class Ground(msgspec.Struct, frozen=True):
    """The caches of a stress.

    Parameters
    ----------
    base
        A folder of its own.
    machines
        The settings of each machine.
    units
        How many there are to build.
    outer
        The outer tier: `shared`, `remote`, or nothing.
    """

    base: str
    machines: tuple[CacheSettings, ...]
    units: int
    outer: str = ""

    @property
    def lists(self) -> bool:
        """Whether the outer tier can say what it holds."""
        return bool(self.outer) and not self.machines[0].remote.startswith("http")

    def place(self, machine: int) -> DirectoryStore:
        """A machine's own directory."""
        root = Path(self.machines[machine].dir)
        root.mkdir(0o700, exist_ok=True)
        return DirectoryStore(root)

    def outside(self) -> Store:
        """The outer tier, beside any cache."""
        settings = self.machines[0]
        if settings.shared:
            return DirectoryStore(Path(settings.shared), "shared", shared=True)
        if settings.remote.startswith("http"):
            from max_build.store.http import HttpStore

            return HttpStore(settings.remote, settings, writable=True)
        from max_build.store.objects import ObjectStore

        return ObjectStore(settings.remote, settings, writable=True)

    def newcomer(self, name: str) -> CacheSettings:
        """A machine that has nothing yet."""
        return msgspec.structs.replace(self.machines[0], dir=f"{self.base}/{name}")


@contextlib.contextmanager
def ground(kind: str, base: Path, units: int = 48) -> Iterator[Ground]:
    """Lay out the caches of one of `KINDS`, with its server, below `base`."""
    with contextlib.ExitStack() as stack:
        outer: dict[str, str] = {}
        if kind == "shared":
            outer = {"shared": str(base / "team")}
            (base / "team").mkdir()
            (base / "team").chmod(0o2775)
        elif kind != "own":
            (base / "server").mkdir()
            serve = {"nginx": _nginx, "s3": _s3}[kind]
            outer = {
                "remote": stack.enter_context(serve(base / "server")),
                "remote_mode": "read-write",
            }
        machines = tuple(
            CacheSettings(dir=str(base / f"machine{n}"), lease=5.0, **outer, **_PATIENT)
            for n in range(_MACHINES if outer else 1)
        )
        yield Ground(str(base), machines, units, next(iter(outer), ""))


@contextlib.contextmanager
def _nginx(folder: Path) -> Iterator[str]:
    import cache_servers

    with cache_servers.nginx(folder) as server:
        yield server.writer_url


@contextlib.contextmanager
def _s3(folder: Path) -> Iterator[str]:
    import cache_servers

    with cache_servers.seaweed(folder) as endpoint:
        wanted = {**cache_servers.S3_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield f"s3://{cache_servers.BUCKET}/{uuid.uuid4().hex}"
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
