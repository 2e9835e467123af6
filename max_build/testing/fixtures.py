"""Behind the pytest plugin: a project's artifacts by unit and target, each brought up once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from max_build import compilers
from max_build.config import Settings, load_settings
from max_build.errors import ConfigError, MaxBuildError, NotBuiltError, TargetError
from max_build.manifest import WeightRules
from max_build.outcomes import Mode, State
from max_build.pipeline import build
from max_build.record import Record
from max_build.runtime.graph import Model
from max_build.runtime.locate import check_kind
from max_build.store import open_cache
from max_build.target import Target, parse

if TYPE_CHECKING:
    from max_build.runtime.load import WeightFiles
    from max_build.runtime.module import Kernels

__all__ = ["Artifact", "Artifacts"]


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _plainly(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let an expected failure be shown at the test's own line, without max-build's source."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        __tracebackhide__ = True
        try:
            return method(*args, **kwargs)
        except MaxBuildError as error:
            raise error.with_traceback(None) from None

    return call


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled unit: its record, and its files with verified bytes.

    Parameters
    ----------
    files
        Role → file; the first one where a kernel module has several cubins.
    blobs
        Digest → file of every blob.
    """

    unit: str
    target: str
    record: Record
    files: dict[str, Path]
    blobs: dict[str, Path]

    def cubins(self) -> tuple[Path, ...]:
        """Every cubin of a kernel module."""
        return tuple(self.blobs[one.digest] for one in self.record.blobs if one.role == "cubin")


class Artifacts:
    """The artifacts of one project.

    Parameters
    ----------
    project
        The project's directory.
    to_compile
        Options that pytest would need to compile what no tier holds: without them that is an
        error which names them and the build command.
    cache_dir
        The cache's local directory, in place of the project's or the user's.
    told
        Called with the state of each unit that was looked up, and the seconds it took.
    """

    def __init__(
        self,
        project: str | Path,
        *,
        to_compile: Sequence[str],
        cache_dir: str = "",
        told: Callable[[State, float], None] = lambda _state, _seconds: None,
    ) -> None:
        self._project = Path(project)
        flags = {"cache": {"dir": os.path.abspath(cache_dir)}} if cache_dir else None
        self._settings = load_settings(self._project, flags=flags)
        self._told = told
        self._cache = open_cache(self._settings.cache)
        self._to_compile = to_compile
        self._found: dict[tuple[str, str], Artifact] = {}

    @_plainly
    def artifact(self, unit: str, target: str = "cpu") -> Artifact:
        """The artifact of a unit for one target.

        Raises
        ------
        ConfigError
            If the project declares no such unit, or its compiler no such target.
        NotBuiltError
            If no tier holds it and compiling was not asked for.
        CompileError, ToolchainError
            If it cannot be derived or compiled.
        """
        if (unit, target) not in self._found:
            self._found[unit, target] = self._bring_up(unit, target)
        return self._found[unit, target]

    @_plainly
    def model(
        self,
        unit: str,
        target: str = "cpu",
        weights: WeightFiles | None = None,
    ) -> Model:
        """The graph of a unit, initialised with its weights.

        Raises
        ------
        LoadError
            If this machine cannot run it, or it is a kernel module.
        WeightsError
            If the weights are missing or do not fit.
        """
        from max_build.runtime.load import bring_up, listed
        from max_build.runtime.select import choose, this_machine

        artifact = self.artifact(unit, target)
        declared = self._settings.unit(unit)
        check_kind(unit, declared.kind, "graph")
        rules = WeightRules.declared(declared.declared)
        if weights is not None:
            rules = msgspec.structs.replace(rules, files=listed(weights))
        device = "cpu" if target == "cpu" else "gpu"
        choice = choose(unit, {target: artifact.record}, this_machine(), device)
        return bring_up(unit, choice, artifact.files["mef"], rules, (self._project,))

    @_plainly
    def kernels(self, unit: str, target: str) -> Kernels:
        """The kernels of a module, by their source-level names.

        On a machine without that device all but the launch works.

        Raises
        ------
        LoadError
            If the unit is a graph, or the device of this machine is another one.
        """
        from max_build.runtime.module import Kernels
        from max_build.runtime.select import Choice, choose, this_machine

        artifact = self.artifact(unit, target)
        check_kind(unit, self._settings.unit(unit).kind, "kernel")
        machine = this_machine()
        choice = (
            choose(unit, {target: artifact.record}, machine, "gpu")
            if machine.gpus
            else Choice(Target(target), artifact.record, 0)
        )
        return Kernels(unit, choice, "cubin", artifact.blobs)

    def close(self) -> None:
        """Close the cache."""
        self._cache.close()

    def _narrowed(self, unit: str, target: str) -> Settings:
        declared = self._settings.unit(unit)
        try:
            parse(target, accepted=compilers.get(declared.compiler).accepts)
        except TargetError as error:
            message = f"`{declared.where}`: {error.message}"
            raise ConfigError(message, hint=error.hint) from error
        return self._settings.narrowed((unit,), (target,))

    def _bring_up(self, unit: str, target: str) -> Artifact:
        settings = self._narrowed(unit, target)
        mode: Mode = "require-hit" if self._to_compile else "build"
        result = build(settings, self._cache, mode=mode)
        (outcome,) = result.outcomes
        self._told(outcome.state, outcome.seconds)
        if outcome.error is not None:
            raise outcome.error
        if outcome.record is None:
            message = f"`{unit}` × `{target}` is not in the cache: {outcome.reason}"
            command = f"max-build build {unit} --target {target}"
            hint = f"run `{command}`, or pytest {' '.join(self._to_compile)}"
            raise NotBuiltError(message, hint=hint)
        record = outcome.record
        blobs = {blob.digest: self._cache.path(blob) for blob in record.blobs}
        files = {str(blob.role): blobs[blob.digest] for blob in reversed(record.blobs)}
        return Artifact(unit, target, record, files, blobs)
