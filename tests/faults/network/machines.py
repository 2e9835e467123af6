"""Eight machines of the guest, each a process on a mount of its own, and the server they share."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from max_build.errors import StoreError
from max_build.key import digest
from max_build.record import Blob, Record
from max_build.store import CacheSettings, Hit, open_cache
from max_build.store.directory import DirectoryStore
from max_build.store.verify import verify
from max_build.testing.store import example

HERE = Path(__file__).parent
EXPORT = Path("/mnt/export")
PROTOCOL = os.environ["protocol"]  # noqa: SIM112 - as the kernel's command line names it
MACHINES = range(1, 9)
PATIENCE = 100.0


def mounted(machine: int) -> Path:
    """The export, as a machine sees it."""
    return Path(f"/mnt/m{machine}")


def server(action: str) -> None:
    """Start or stop the file server."""
    subprocess.run([HERE / "server.sh", action], check=True)


def shared_folder(name: str) -> str:
    """An empty directory for a team, made on the server."""
    folder = EXPORT / name
    folder.mkdir()
    folder.chmod(0o2775)
    return name


def settings(machine: int, name: str, own: Path | None = None, **more: Any) -> CacheSettings:
    """A machine's settings: a local cache in memory, and the team's directory."""
    folder = own or Path(f"/run/own/{name}/{machine}")
    return CacheSettings(dir=str(folder), shared=str(mounted(machine) / name), **more)


def findings(name: str, *, shared: bool = True) -> list[str]:
    """What a reading of all that the server has brings up."""
    return [f"{one}" for one in verify(DirectoryStore(EXPORT / name, shared=shared)).findings]


def leftovers(name: str) -> int:
    """Files that writers left behind."""
    folders = [EXPORT / name / "tmp", *(EXPORT / name).glob("new-*")]
    return sum(len(list(folder.iterdir())) for folder in folders if folder.is_dir())


class Process:
    """A forked process that does one thing, and tells what came of it in a file."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._answer = Path(f"/run/answer-{os.urandom(4).hex()}")
        self.pid = os.fork()
        if self.pid == 0:
            try:
                outcome = {"facts": action()}
            except BaseException:  # noqa: BLE001 - told
                outcome = {"error": traceback.format_exc()}
            self._answer.write_text(json.dumps(outcome))
            os._exit(0)

    def kill(self) -> None:
        os.kill(self.pid, 9)

    def facts(self, until: float) -> dict[str, Any]:
        """What it returned, or `{"error": …}`; it is given until then."""
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > until:
                return {"error": f"it is still there: {_where(self.pid)}"}
            time.sleep(0.01)
        if status:
            return {"error": f"it ended with {os.waitstatus_to_exitcode(status)}"}
        outcome = json.loads(self._answer.read_text())
        return outcome if "error" in outcome else outcome["facts"]


def _where(pid: int) -> str:
    """What the threads of a process wait for in the kernel."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return "\n\n".join(f"{thread.name}:\n{(thread / 'stack').read_text()}" for thread in threads)


def together(
    actions: Iterable[Callable[[], Any]], meanwhile: Callable[[], Any] = lambda: None
) -> list[dict[str, Any]]:
    """Do all at once, each in a process, and something here; the facts of each."""
    processes = [Process(action) for action in actions]
    meanwhile()
    until = time.monotonic() + PATIENCE
    return [process.facts(until) for process in processes]


def content(key: str) -> bytes:
    """The one right artifact of a key, of up to 64 kB."""
    draw = random.Random(key)
    return key.encode() + draw.randbytes(draw.randrange(200, 64_000))


def record_of(name: str) -> tuple[Record, bytes]:
    """A record whose blob is `content` of its key."""
    import msgspec

    record = example(name, b"placeholder")
    data = content(record.key)
    blob = Blob(role="mef", digest=digest(data), size=len(data))
    return msgspec.structs.replace(record, blobs=(blob,)), data


def build(machine: int, chosen: CacheSettings, names: Iterable[str]) -> Counter[str]:
    """What a build does with units of these names; counts what came of them."""
    came: Counter[str] = Counter()
    with open_cache(chosen) as cache:
        for name in names:
            record, data = record_of(name)
            found = cache.lookup(record.key)
            if isinstance(found, Hit):
                came[f"hit {found.tier}"] += 1
            else:
                came[f"miss {found.reason}"] += 1
                cache.publish(record, {digest(data): data})
                found = Hit(record, "compiled")
            try:
                right = cache.path(found.record.blobs[0]).read_bytes() == data
            except (StoreError, FileNotFoundError):
                came["gone"] += 1  # the local cache is collected, too
                continue
            came["right" if right else "WRONG"] += 1
        came.update({f"fault {tier} {kind}": n for (tier, kind), n in cache.stats.faults.items()})
        if left_out := sum("left out" in line for line in cache.warnings):
            came["left out"] = left_out
        for line in cache.warnings:
            print(f"machine {machine}: {line}", file=sys.stderr)
    return came


def builds(machine: int, name: str, seconds: float) -> dict[str, Any]:
    """Build again and again, each time on a new disk: the sum, and the longest build."""
    total: Counter[str] = Counter()
    longest = 0.0
    end = time.monotonic() + seconds
    own = Path(f"/run/own/{name}/{machine}")
    while time.monotonic() < end:
        names = random.sample([f"unit{n}" for n in range(12)], 6)
        started = time.monotonic()
        total += build(machine, settings(machine, name, own), names)
        longest = max(longest, time.monotonic() - started)
        shutil.rmtree(own, ignore_errors=True)
        total["builds"] += 1
    return {"came": dict(total), "longest": round(longest, 1), "error": ""}
