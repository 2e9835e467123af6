"""A farm of Dask workers that compile what misses, behind the executor protocol.

Dask carries addresses, declarations and messages, as JSON. Sources, records and blobs go through
the shared cache. A Dask worker runs the ordinary build of one unit for one target and publishes
what came of it; the machine that asked then looks the unit up under the key that it derives
itself. So a farm can be slow, wrong or gone, and the build is right all the same: what it did not
bring is compiled here.

Each Dask worker says what it can compile by resources, one per compiler with the number of jobs
it takes (`--resources "max=2 cuda=8"`); `memory=` in bytes bounds them as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from max_build.cluster.farmhand import Answer, Task, check_cache, compile_one, describe, version
from max_build.cluster.snapshot import pack
from max_build.config import Settings, Unit
from max_build.errors import CompileError, ConfigError, StoreError, ToolchainError
from max_build.executor import Here
from max_build.explain import compare, ir_of, nearest
from max_build.key import changes
from max_build.outcomes import Event, Outcome, Reporter
from max_build.record import Blob, Record
from max_build.store import Cache, CacheSettings, Hit
from max_build.store.settings import without_secrets
from max_build.target import Target
from max_build.workers import MEMORY_EACH, capacity

__all__ = ["Farm"]

_CONNECT = 10.0
_LOOK = 2.0
_PATIENCE = 30.0


class Farm:
    """An executor: jobs go to the Dask workers that declare the unit's compiler.

    Parameters
    ----------
    address
        `dask://HOST:PORT` of the scheduler. TLS is used where Dask's own configuration names a
        client certificate (`distributed.comm.tls`).
    report
        Told when a job is sent.

    Raises
    ------
    ConfigError
        If a requirement is not met: a tier that this machine shares and may write, a scheduler
        that answers, workers with the needed compilers and with this max-build.
    """

    def __init__(self, address: str, settings: Settings, cache: Cache, report: Reporter) -> None:
        check_cache(cache)
        self._settings = _portable(settings)
        self._cache = cache
        self._report = report
        self._room = threading.BoundedSemaphore(settings.jobs or capacity())
        self._looking = threading.Lock()
        self._closed = False
        self._gone: set[str] = set()
        self._client = _connect(address)
        try:
            wanted = {unit.compiler for unit in settings.units}
            self.width = settings.jobs or _check_workers(self._client, wanted)
            self._sources = _send_sources(Path(settings.root), cache)
        except BaseException:
            self.close()
            raise

    def run(self, unit: Unit, target: Target, here: Here) -> Outcome:
        """Have it compiled on the farm and look it up; do it here if that comes to nothing."""
        started = time.monotonic()
        known = self._cache.records_of(unit.name)
        answer: Answer | None = None
        outcome: Outcome | None = None
        if not self._never_kept(unit, target):
            try:
                answer = self._ask(unit, target)
            except ConnectionError as error:
                if self._closed:
                    ended = CompileError("the build was ended")
                    return Outcome(unit, target, "failed", error=ended)
                self._warn(unit, target, str(error))
        if answer is not None and answer.state in ("cached", "compiled"):
            with self._looking:  # the build itself looks from one thread only
                outcome = here.look(unit, target)
        if outcome is None:
            with self._room:  # the farm may be wider than this machine
                outcome = here.work(unit, target)
        self._cache.memo.set("farm", f"{unit.name}:{target}", outcome.state.encode())
        if answer is not None:
            outcome = self._credited(outcome, answer, known)
        return dataclasses.replace(outcome, seconds=time.monotonic() - started)

    def close(self) -> None:
        """Leave the farm; what is being compiled there is published when it is done."""
        self._closed = True
        with contextlib.suppress(Exception):  # a farm that is gone cannot be left
            self._client.close(timeout=_LOOK)

    def _never_kept(self, unit: Unit, target: Target) -> bool:
        """Whether the last artifact could not be kept, so that the farm could not hand it over."""
        return self._cache.memo.get("farm", f"{unit.name}:{target}") == b"uncached"

    def _ask(self, unit: Unit, target: Target) -> Answer:
        """Send one job and wait for the answer.

        Raises
        ------
        ConnectionError
            If the farm lost the job for good, or nobody there can take it.
        """
        compiler = unit.compiler
        one = msgspec.structs.replace(unit, targets=(str(target),))
        settings = msgspec.structs.replace(self._settings, units=(one,))
        task = Task(version(), settings, self._sources)
        future: Any = None
        alone = 0.0
        try:
            while self._client.status in ("running", "connecting"):
                workers = _candidates(self._client, compiler)
                alone = 0.0 if workers else alone + _LOOK
                if alone > _PATIENCE or (compiler in self._gone and not workers):
                    if future is not None:
                        future.cancel()
                    self._gone.add(compiler)  # nobody waits for it again
                    message = f"no worker of the farm can compile with `{compiler}` any more"
                    raise ConnectionError(message)
                if future is None:
                    future = self._submit(task, _resources(compiler, workers.values()))
                    where = f"sent to the farm {self._client.scheduler.address}"
                    self._report(Event("compiling", unit.name, str(target), where))
                with contextlib.suppress(TimeoutError):
                    return msgspec.json.decode(future.result(timeout=_LOOK), type=Answer)
        except ConnectionError:
            raise
        except Exception as error:  # whatever Dask makes of a farm that breaks
            first = str(error).partition("\n")[0]
            message = f"the farm lost it: {type(error).__name__}: {first}"
            raise ConnectionError(message) from error
        message = "the farm's scheduler is gone"
        raise ConnectionError(message)

    def _submit(self, task: Task, resources: dict[str, float]) -> Any:
        (unit,) = task.settings.units
        return self._client.submit(
            compile_one,
            msgspec.json.encode(task),
            key=f"max-build-{unit.name}-{unit.targets[0]}-{time.time_ns()}",
            resources=resources,
            pure=False,
        )

    def _credited(self, outcome: Outcome, answer: Answer, known: Sequence[Record]) -> Outcome:
        """The outcome as the farm's work, where it was; a warning where it should have been."""
        made = answer.state in ("cached", "compiled")
        if outcome.state == "cached" and made and outcome.key == answer.key:
            if answer.state == "cached":
                return outcome
            reason = self._reason(outcome.record, known) or answer.reason
            return dataclasses.replace(
                outcome, state="compiled", tier="", reason=reason, where=answer.host
            )
        if isinstance(outcome.error, ToolchainError) and answer.error:
            # Nobody here could compile it, so the farm's word is what there is.
            error = CompileError(f"on {answer.host}: {answer.error}", hint=answer.hint)
            return dataclasses.replace(outcome, error=error)
        if answer.error and outcome.state != "failed":
            self._warn(outcome.unit, outcome.target, f"{answer.host} said: {answer.error}")
        elif made and outcome.key and outcome.key != answer.key:
            what = self._difference(outcome, answer)
            self._warn(outcome.unit, outcome.target, f"{answer.host} derives another key: {what}")
        elif made and outcome.state != "cached":
            why = "; ".join(answer.warnings) or "it is not in a tier that this machine reads"
            self._warn(outcome.unit, outcome.target, f"{answer.host} compiled it, but {why}")
        return outcome

    def _reason(self, record: Record | None, known: Sequence[Record]) -> str:
        """What is different from the records known here: the farm's worker may know none."""
        earlier = nearest(known, record.components) if record is not None else None
        if (
            record is None
            or earlier is None
            or earlier.components.target != record.components.target
        ):
            return ""
        found = compare(self._cache, earlier, record.components, ir_of(self._cache, record))
        return ", ".join(found.words[:4])

    def _difference(self, outcome: Outcome, answer: Answer) -> str:
        theirs = self._cache.lookup(answer.key, fetch=False)
        if outcome.record is None or not isinstance(theirs, Hit):
            return answer.key[:12]
        found = changes(outcome.record.components, theirs.record.components)
        shown = [
            f"{name} {mine or 'unset'} here, {its or 'unset'} there" for name, mine, its in found
        ]
        return ", ".join(shown[:3])

    def _warn(self, unit: Unit, target: Target, why: str) -> None:
        self._cache.warnings.append(f"`{unit.name}` × `{target}` was left to this machine: {why}")


def _send_sources(root: Path, cache: Cache) -> Blob:
    """Put the project's sources into every tier that may be written.

    Raises
    ------
    ConfigError
        If they are too many, or no tier takes them.
    """
    failure = ""
    sent = False
    with tempfile.TemporaryDirectory(prefix="max-build-") as folder:
        path = Path(folder) / "sources.tar"
        blob = pack(root, path)
        for tier in cache.outer:
            if tier.writable:
                try:
                    tier.send(blob, path)
                except StoreError as error:
                    failure = error.message
                else:
                    sent = True
    if not sent:
        message = f"the project's sources do not reach the farm: {failure}"
        raise ConfigError(message, hint="`max-build doctor` tries every tier")
    return blob


def _portable(settings: Settings) -> Settings:
    """The settings as another machine may have them: no path of this one, no farm."""
    root = Path(settings.root)
    paths = []
    for one in settings.python_path:
        if not Path(one).is_relative_to(root):
            message = f"`python-path` names `{one}`, which lies outside of the project"
            raise ConfigError(message, hint="a farm gets the project's own directory only")
        paths.append(Path(one).relative_to(root).as_posix())
    cache = CacheSettings(
        shared=settings.cache.shared,
        shared_mode=settings.cache.shared_mode,
        shared_trust=settings.cache.shared_trust,
        remote=without_secrets(settings.cache.remote),
        remote_mode=settings.cache.remote_mode,
        remote_trust=settings.cache.remote_trust,
        public_keys=settings.cache.public_keys,
        connect_timeout=settings.cache.connect_timeout,
        request_timeout=settings.cache.request_timeout,
        budget=settings.cache.budget,
        lease=settings.cache.lease,
        wait=settings.cache.wait,
    )
    return msgspec.structs.replace(
        settings, root="", python_path=tuple(paths), cache=cache, executor="local", jobs=1
    )


def _connect(address: str) -> Any:
    try:
        from distributed import Client, Security
    except ImportError as error:
        message = f"executor `{address}` needs `{error.name}`, which is not installed"
        raise ConfigError(message, hint="pip install 'max-build[cluster]'") from error
    place = address.removeprefix("dask://").rstrip("/")
    security: Any = Security()  # type: ignore[no-untyped-call, unused-ignore]
    scheme = "tls" if security.tls_client_cert else "tcp"
    try:
        return Client(  # type: ignore[no-untyped-call, unused-ignore]
            f"{scheme}://{place}",
            security=security,
            timeout=_CONNECT,
            set_as_default=False,
            name="max-build",
        )
    except Exception as error:  # whatever Dask makes of an address, a certificate, a silence
        message = f"executor `{address}` does not answer over {scheme}: {error}"
        hint = "is the scheduler up? `distributed.comm.tls` in Dask's configuration chooses TLS"
        raise ConfigError(message, hint=hint) from error


def _candidates(client: Any, compiler: str) -> dict[str, dict[str, Any]]:
    """The workers that declare a compiler, by address."""
    workers: dict[str, dict[str, Any]] = client.scheduler_info(n_workers=-1).get("workers", {})
    return {name: one for name, one in workers.items() if one["resources"].get(compiler, 0) >= 1}


def _resources(compiler: str, workers: Iterable[dict[str, Any]]) -> dict[str, float]:
    """What a job takes of a worker; memory only where every one of them counts it."""
    counted = list(workers)
    memory = bool(counted) and all("memory" in one["resources"] for one in counted)
    return {compiler: 1, "memory": MEMORY_EACH} if memory else {compiler: 1}


def _check_workers(client: Any, wanted: set[str]) -> int:
    """How many jobs the farm takes at once.

    Raises
    ------
    ConfigError
        If a compiler is missing, or a worker's max-build is another one.
    """
    able: dict[str, dict[str, Any]] = {}
    for compiler in sorted(wanted):
        found = _candidates(client, compiler)
        if not found:
            message = f"no worker of the farm declares the compiler `{compiler}`"
            hint = f'start one with `dask worker … --resources "{compiler}=2"`'
            raise ConfigError(message, hint=hint)
        able |= found
    try:
        said = client.run(describe, workers=list(able), on_error="return")
    except Exception as error:
        message = f"the farm cannot be asked what it has: {error}"
        raise ConfigError(message) from error
    problems = []
    for name, one in sorted(said.items()):
        if not isinstance(one, dict):
            problems.append(f"{name}: {one}")
        elif one["version"] != version():
            problems.append(f"{name} has max-build {one['version']}, this machine {version()}")
        else:
            declared = {c for c in wanted if able[name]["resources"].get(c, 0) >= 1}
            problems += [
                f"{name} declares `{compiler}`: {one['missing'][compiler]}"
                for compiler in sorted(declared & one["missing"].keys())
            ]
    if problems:
        message = "\n  ".join(["the farm's workers do not fit", *problems])
        hint = "install the same `max-build[cluster]`, and the compilers, on each of them"
        raise ConfigError(message, hint=hint)
    width = 0
    for one in able.values():
        slots = sum(int(one["resources"].get(compiler, 0)) for compiler in wanted)
        width += min(int(one["nthreads"]), slots)
    return max(1, width)
