"""MAX's interpreter cache for a team: warmed on one machine, installed on the others.

MAX's eager mode compiles each operation at its first use unless `max warm-interpreter-cache` ran,
which takes many minutes and leaves what it compiled in MAX's own cache folder. That folder can be
copied: here it becomes one archive, stored like any artifact.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from max_build.atomic import replacing
from max_build.errors import CompileError, StoreError, ToolchainError
from max_build.key import Components, digest, key_of
from max_build.record import Blob, Record
from max_build.store import Cache, Hit
from max_build.store.compress import open_packed
from max_build.store.flight import node_lock

__all__ = ["Machine", "Report", "fetch", "install", "machine", "pack", "warm"]

STAMP = "eager_gc_warm_stamp.json"
"""What MAX leaves beside its models when all of them are there."""

Report = Callable[[str, int, int], None]
"""Called with what is being done, and how much of how much is."""

_PROBE = """
import importlib, json, os, sys
from max.engine import __version__
from max_build import distributions
from max_build.compilers.max_graph import DISTRIBUTIONS, foreign_parts
from max_build.runtime.host import processor
gc = importlib.import_module("max._interpreter_ops.gc_compile")
folder = gc._cache_dir()
print(json.dumps({
    "compiler": distributions.identities(DISTRIBUTIONS),
    "context": gc._context_signature(),
    "folder": str(folder.parent) if folder else "",
    "foreign": foreign_parts(os.environ),
    "processor": processor(),
    "warmed": bool(gc.warm_stamp_matches()),
}))
"""


class Machine(msgspec.Struct, frozen=True):
    """What decides whether this machine can use another's cache, and where its own lies.

    Parameters
    ----------
    context
        MAX's own word for accelerators, processor and version.
    processor
        Digest of what the CPU is and can do: MAX compiles for the CPU it runs on.
    folder
        MAX's cache folder; empty where it has none.
    warmed
        Whether MAX finds itself warmed already.
    foreign
        Why `compiler` does not tell which MAX this is; empty where it does.
    """

    compiler: dict[str, str]
    context: str
    processor: str
    folder: str
    warmed: bool
    foreign: str = ""

    def components(self) -> Components:
        """What the archive is keyed by."""
        return Components(
            compiler=self.compiler,
            target="interpreter",
            host=f"this {self.processor}",
            sources={"context": digest(self.context.encode())},
        )


def machine() -> Machine:
    """Ask the installed MAX, in a process of its own.

    Raises
    ------
    ToolchainError
        If there is none, or not one that has an interpreter cache.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        message = f"MAX's interpreter cache cannot be asked for: {why[0]}"
        raise ToolchainError(message, hint="install `max-build[max]`, with MAX 26.7 or later")
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Machine)
    if found.foreign:
        message = f"this MAX is not what is installed: {found.foreign}"
        raise ToolchainError(message, hint="take the other out of `PYTHONPATH`")
    if not found.processor:
        message = "what CPU this machine has cannot be told, and MAX compiles for it"
        raise ToolchainError(message, hint="MAX's interpreter cache is for Linux with `/proc`")
    if not found.folder:
        message = "MAX has no cache folder on this machine"
        raise ToolchainError(message, hint="set `MODULAR_DERIVED_PATH` to a writable directory")
    return found


def fetch(cache: Cache, here: Machine, report: Report) -> str:
    """Install the archive for this machine if a tier has it; the tier's name, else empty.

    Raises
    ------
    CompileError
        If the archive is not one, or cannot be installed.
    """
    found = cache.lookup(key_of(here.components()))
    blob = found.record.blob("bundle") if isinstance(found, Hit) else None
    if not isinstance(found, Hit) or blob is None:
        return ""
    try:
        path = cache.path(blob)
    except StoreError:
        return ""
    install(path, Path(here.folder), report)
    return found.tier


def warm(
    cache: Cache, here: Machine, report: Report, *, jobs: int = 0, command: Sequence[str] = ()
) -> Record:
    """Let MAX warm a cache of its own, and publish and install what it left.

    It works in a folder of the local tier that an interrupted run leaves behind, and the next one
    goes on with. Where another run is at work there, it is waited for, and what it left taken.

    Parameters
    ----------
    jobs
        Compiles at once; 0 is MAX's own choice.
    command
        In place of `max warm-interpreter-cache`.

    Raises
    ------
    CompileError
        If MAX fails, or the disk refuses.
    """
    key = key_of(here.components())
    try:
        with _at_work(cache, key) as (work, waited):
            if waited and fetch(cache, here, report):
                found = cache.lookup(key)
                if isinstance(found, Hit):
                    return found.record
            record = _made(cache, here, work, report, jobs, command)
            shutil.rmtree(work, ignore_errors=True)  # a failed run leaves it
            return record
    except StoreError:
        raise
    except OSError as error:
        place = f"`{error.filename}`: " if error.filename else ""
        message = f"the interpreter cache cannot be made: {place}{error.strerror or error}"
        raise CompileError(message) from error


@contextlib.contextmanager
def _at_work(cache: Cache, key: str) -> Iterator[tuple[Path, bool]]:
    """The folder to work in, which nobody else does, and whether somebody was waited for."""
    store = cache.local.store
    if store is None or not store.writable:
        with tempfile.TemporaryDirectory(prefix="max-build-") as scratch:
            yield Path(scratch), False
        return
    work = store.root / "interpreter" / key
    work.parent.mkdir(exist_ok=True)
    with node_lock(work.with_suffix(".lock"), math.inf) as waited:
        work.mkdir(exist_ok=True)
        yield work, waited


def _made(
    cache: Cache, here: Machine, work: Path, report: Report, jobs: int, command: Sequence[str]
) -> Record:
    started = time.monotonic()
    _run([*(command or _command()), *(["--jobs", str(jobs)] if jobs else [])], work)
    seconds = time.monotonic() - started
    archive = work / "bundle.tar.zst"
    pack(work / "modular", archive, report)
    blob = Blob.of("bundle", archive.read_bytes())
    components = here.components()
    record = Record(
        key=key_of(components),
        unit="interpreter",
        components=components,
        blobs=(blob,),
        seconds=round(seconds, 3),
    )
    cache.publish(record, {blob.digest: archive})
    install(archive, Path(here.folder), report)
    return record


def _command() -> list[str]:
    beside = Path(sys.executable).with_name("max")
    program = str(beside) if beside.exists() else shutil.which("max")
    if program is None:
        message = "the command `max` is not installed"
        raise ToolchainError(message, hint="install `max-build[max]`")
    return [program, "warm-interpreter-cache"]


def _run(command: list[str], work: Path) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MODULAR_DERIVED_PATH", "MAX_EAGER_OP_PRECOMPILE")
    }
    done = subprocess.run(
        command,
        env={**environment, "XDG_CACHE_HOME": str(work), "MAX_EAGER_ALLOW_LAZY_COMPILE": "1"},
        stdout=sys.stderr,
        check=False,
    )
    if done.returncode:
        message = f"`{' '.join(command)}` ended with status {done.returncode}"
        hint = "run the command again: it goes on with what was compiled so far"
        raise CompileError(message, hint=hint)


def pack(folder: Path, archive: Path, report: Report) -> None:
    """Write the regular files below `folder` as a zstd-compressed tar, the stamp last.

    Names are sorted and nothing of this machine or moment is in the headers.

    Raises
    ------
    CompileError
        If the stamp is missing: MAX did not finish.
    """
    paths = sorted(one for one in folder.rglob("*") if one.is_file() and not one.is_symlink())
    stamps = [one for one in paths if one.name == STAMP]
    if not stamps:
        message = f"MAX left no `{STAMP}`: its interpreter cache is not complete"
        raise CompileError(message)
    total = sum(one.stat().st_size for one in paths)
    done = 0
    with open_packed(archive, "wb") as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for path in (*(one for one in paths if one.name != STAMP), *stamps):
            entry = tarfile.TarInfo(str(PurePosixPath(path.relative_to(folder))))
            data = path.read_bytes()
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
            done += len(data)
            report("packing", done, total)


def install(archive: Path, folder: Path, report: Report) -> int:
    """Merge an archive into MAX's cache folder; the number of files that were new.

    A file that is there with the same size stays: MAX names what it caches by what went in. Each
    file appears in one step, and the stamp, last: an interrupted install is no harm, and the next
    one goes on with the rest.

    Raises
    ------
    CompileError
        If a member would lie outside the folder or is no regular file, or the disk refuses.
    """
    new = 0
    size = archive.stat().st_size
    try:
        with (
            archive.open("rb") as raw,
            open_packed(raw, "rb") as stream,
            tarfile.open(fileobj=stream, mode="r|") as tar,
        ):
            for entry in tar:
                target = _target(folder, entry)
                report("installing", min(raw.tell(), size), size)
                if (
                    target.is_file()
                    and target.stat().st_size == entry.size
                    and target.name != STAMP
                ):
                    continue
                source = tar.extractfile(entry)
                assert source is not None, entry.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with replacing(target, 0o644) as file:
                    file.write(source.read())
                new += 1
    except (OSError, tarfile.TarError, EOFError, ValueError) as error:
        message = f"the interpreter cache cannot be installed into `{folder}`: {error}"
        raise CompileError(message) from error
    return new


def _target(folder: Path, entry: tarfile.TarInfo) -> Path:
    name = PurePosixPath(entry.name)
    if not entry.isreg() or name.is_absolute() or ".." in name.parts:
        message = f"member `{entry.name}` is not one that belongs into the archive"
        raise CompileError(message)
    return folder / name
