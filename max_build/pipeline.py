"""The pipeline: units × targets → key → record → blobs, compiling only what no tier holds.

One direction, one orchestrator. A job that is keyed without running code is looked up at once;
the others get a worker each, which derives and, on a miss, compiles. A fault of one job is told
and the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from max_build import compilers
from max_build.compilers import Job
from max_build.config import Settings, Unit
from max_build.errors import CompileError, MaxBuildError
from max_build.executor import Executor, LocalPool, open_executor
from max_build.key import digest, key_of
from max_build.messages import Compile, Compiled, Derive, Derived
from max_build.outcomes import Build, Event, Mode, Outcome, Reporter
from max_build.recipes.recall import Recall
from max_build.record import Blob, Record, Role
from max_build.store import Cache, Hit
from max_build.target import Target
from max_build.workers import Worker, Workers

if TYPE_CHECKING:
    from max_build.explain import Explanation

__all__ = ["build"]


def build(
    settings: Settings,
    cache: Cache,
    *,
    mode: Mode = "build",
    report: Reporter = lambda _: None,
) -> Build:
    """Bring every unit × target to its artifact.

    A fault of one job is in its outcome; the others finish. The artifacts are then in the cache,
    or held by it for this process where no tier would take them.
    """
    started = time.monotonic()
    todo = [(unit, Target(target)) for unit in settings.units for target in unit.targets]
    with _Session(settings, cache, mode, report) as session:
        outcomes = session.run(todo)
    return Build(outcomes=outcomes, seconds=time.monotonic() - started)


class _Session:
    """One build's workers and scratch directory."""

    def __init__(self, settings: Settings, cache: Cache, mode: Mode, report: Reporter) -> None:
        self._settings = settings
        self._root = Path(settings.root)
        self._cache = cache
        self._mode = mode
        self._report = report
        self._workers = Workers(self._root)
        self._recall = Recall(settings, cache)
        self._scratch = Path(tempfile.mkdtemp(prefix="max-build-"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._workers.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def run(self, todo: Sequence[tuple[Unit, Target]]) -> tuple[Outcome, ...]:
        found: dict[int, Outcome] = {}
        rest: list[int] = []
        for position, (unit, target) in enumerate(todo):
            outcome = self.look(unit, target)
            if outcome is None:
                rest.append(position)
            else:
                found[position] = self._done(outcome)
        if rest:
            with contextlib.closing(self._executor()) as executor:
                found.update(self._run(executor, {one: todo[one] for one in rest}))
        return tuple(found[position] for position in range(len(todo)))

    def _run(
        self, executor: Executor, jobs: Mapping[int, tuple[Unit, Target]]
    ) -> dict[int, Outcome]:
        from concurrent.futures import ThreadPoolExecutor, as_completed  # not where all hits

        def one(unit: Unit, target: Target) -> Outcome:
            return self._done(executor.run(unit, target, self))

        pool = ThreadPoolExecutor(min(len(jobs), executor.width), thread_name_prefix="max-build")
        try:
            futures = {pool.submit(one, *job): position for position, job in jobs.items()}
            return {futures[future]: future.result() for future in as_completed(futures)}
        except BaseException:
            executor.close()
            self._workers.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _executor(self) -> Executor:
        if self._mode == "build":
            return open_executor(self._settings, self._cache, self._report)
        return LocalPool(self._settings.jobs)

    def look(self, unit: Unit, target: Target) -> Outcome | None:
        """Look up a unit whose key is known without its code or a compiler; None leaves it over."""
        started = time.monotonic()
        adapter = compilers.get(unit.compiler)
        if adapter.runs_user_code:
            key = self._recall.key(unit, target)
        else:
            try:
                derivation = adapter.derive(self._job(unit, target, self._scratch))
            except MaxBuildError as error:
                took = time.monotonic() - started
                return Outcome(unit, target, "failed", error=error, seconds=took)
            key = "" if derivation.uncacheable else key_of(derivation.components)
        if not key:
            return None
        found = self._cache.lookup(key, fetch=self._mode != "look", count_miss=False)
        if not isinstance(found, Hit):
            return None
        return _hit(unit, target, found, time.monotonic() - started)

    def work(self, unit: Unit, target: Target) -> Outcome:
        """Derive in a worker, look up, and compile what misses."""
        started = time.monotonic()
        try:
            with self._workers.worker(unit.compiler) as worker, self._own_scratch() as scratch:
                outcome = self._derive(worker, self._job(unit, target, scratch))
        except MaxBuildError as error:
            if stale := self._recall.stale(unit, target):
                error.add_note(f"it had to be derived anew: {stale}")
            outcome = Outcome(unit, target, "failed", error=error)
        return dataclasses.replace(outcome, seconds=time.monotonic() - started)

    def _derive(self, worker: Worker, job: Job) -> Outcome:
        """Derive; then look up, compile, and keep the recipe of what came of it."""
        self._tell("deriving", job)
        answer = worker.ask(
            Derive(
                job.unit,
                str(job.target),
                str(job.root),
                job.python_path,
                str(job.scratch),
                str(self._cache.memo.folder or ""),
            ),
            Derived,
            timeout=self._settings.compile_timeout,
        )
        outcome = self._find_or_make(worker, job, answer)
        if answer.recipe and outcome.state in ("cached", "compiled") and self._mode != "look":
            self._recall.remember(job.unit, job.target, answer.recipe)
        return dataclasses.replace(outcome, always=answer.always)

    def _find_or_make(self, worker: Worker, job: Job, derived: Derived) -> Outcome:
        """Look it up; compile what misses, unless the mode forbids it."""
        key = key_of(derived.components)
        building = self._mode == "build"
        if derived.uncacheable:
            if not building:
                return _miss(job, key, derived.uncacheable)
            return self._make(worker, job, derived, key, derived.uncacheable)
        found = self._cache.lookup(key, fetch=self._mode != "look", count_miss=not building)
        if isinstance(found, Hit):
            return _hit(job.unit, job.target, found)
        from max_build.explain import explain_miss

        reason, explanation = explain_miss(
            self._cache,
            job.unit.name,
            derived.components,
            Path(derived.ir) if derived.ir else None,
            found,
            self._recall.stale(job.unit, job.target),
        )
        if not building:
            return _miss(job, key, reason, explanation)
        self._tell("waiting", job)
        with self._cache.single_flight(key) as waited:
            if waited:
                found = self._cache.lookup(key)
                if isinstance(found, Hit):
                    return _hit(job.unit, job.target, found)
            else:
                self._cache.stats.miss(found.reason)
            return self._make(worker, job, derived, key, reason)

    def _make(self, worker: Worker, job: Job, derived: Derived, key: str, reason: str) -> Outcome:
        """Compile, and publish what can be kept."""
        unit, target = job.unit, job.target
        name = f"{unit.name}:{target}"
        last = self._cache.memo.get("seconds", name)
        self._tell("compiling", job, reason, float(last) if last else 0.0)
        compiling = time.monotonic()
        try:
            answer = worker.ask(Compile(), Compiled, timeout=self._settings.compile_timeout)
        except MaxBuildError as error:
            log = worker.take_log()
            if log and log not in error.message:
                error.add_note(log)
            raise
        took = time.monotonic() - compiling
        record, files = _record(unit.name, key, derived, answer, worker.take_log(), took)
        uncacheable = derived.uncacheable or answer.uncacheable
        if uncacheable:
            self._cache.hold(record, files)
        else:
            self._cache.publish(record, files)
        self._cache.memo.set("seconds", name, f"{took:.3f}".encode())
        return Outcome(
            unit,
            target,
            "uncached" if uncacheable else "compiled",
            key,
            record,
            reason=uncacheable or reason,
        )

    def _job(self, unit: Unit, target: Target, scratch: Path) -> Job:
        paths, memory = self._settings.python_path, self._cache.memo
        return Job(unit, target, self._root, paths, scratch, memory)

    @contextlib.contextmanager
    def _own_scratch(self) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _tell(
        self,
        what: Literal["deriving", "compiling", "waiting"],
        job: Job,
        reason: str = "",
        expected: float = 0.0,
    ) -> None:
        self._report(Event(what, job.unit.name, str(job.target), reason, expected))

    def _done(self, outcome: Outcome) -> Outcome:
        unit, target = outcome.unit.name, str(outcome.target)
        self._report(Event("done", unit, target, outcome.reason, outcome=outcome))
        return outcome


def _record(
    unit: str, key: str, derived: Derived, compiled: Compiled, log: str, seconds: float
) -> tuple[Record, dict[str, Path | bytes]]:
    """The record of a finished compile, and its blobs by digest.

    Raises
    ------
    CompileError
        If a file that the worker named cannot be read or is empty, or a cubin is not what the
        target asks for: an adapter of somebody else's may not have looked.
    """
    from max_build.compilers.cubin import check_cubin

    blobs: list[Blob] = []
    files: dict[str, Path | bytes] = {}
    named: list[tuple[Role, str]] = [
        (role, name) for role, names in compiled.files.items() for name in names
    ]
    if derived.ir:
        named.append(("ir", derived.ir))
    for role, name in named:
        try:
            data = Path(name).read_bytes()
        except OSError as error:
            message = f"the compiler's {role} cannot be read: {error.strerror}"
            raise CompileError(message) from error
        if not data:
            message = f"the compiler left an empty {role}"
            raise CompileError(message)
        if role == "cubin":
            check_cubin(data, derived.components.target)
        blob = Blob(role=role, digest=digest(data), size=len(data))
        if blob not in blobs:
            blobs.append(blob)
            files[blob.digest] = Path(name)
    record = Record(
        key=key,
        unit=unit,
        components=derived.components,
        blobs=tuple(blobs),
        arch=compiled.arch,
        kernels=compiled.kernels,
        inputs=compiled.inputs,
        outputs=compiled.outputs,
        weights=compiled.weights,
        log=log,
        seconds=round(seconds, 3),
    )
    return record, files


def _hit(unit: Unit, target: Target, found: Hit, seconds: float = 0.0) -> Outcome:
    record = found.record
    return Outcome(unit, target, "cached", record.key, record, tier=found.tier, seconds=seconds)


def _miss(job: Job, key: str, reason: str, explanation: Explanation | None = None) -> Outcome:
    return Outcome(job.unit, job.target, "missed", key, reason=reason, explanation=explanation)
