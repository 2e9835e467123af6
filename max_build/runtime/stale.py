"""Whether the artifacts of an editable install are those of its sources as they are now."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from max_build.errors import LoadError, MaxBuildError, ToolchainError
from max_build.record import Record
from max_build.runtime.locate import Installed, is_project

if TYPE_CHECKING:
    from max_build.config import Settings, Unit
    from max_build.key import Components
    from max_build.runtime.select import Choice
    from max_build.store import Cache
    from max_build.target import Target

__all__ = ["VARIABLE", "StaleWarning", "current", "refreshed"]

VARIABLE = "MAX_BUILD_STALE"
"""`error`, `warn` (the default), `build` or `ignore`."""

_MODES = ("error", "warn", "build", "ignore")
_NO_RECIPE = (
    "no recipe says what it was compiled from, as the unit is declared now, in this environment "
    "and with this max-build"
)


class StaleWarning(UserWarning):
    """An artifact that is loaded was compiled from other sources than lie there now."""


def refreshed(installed: Installed, unit: str, choice: Choice) -> Choice:
    """What was chosen, with the record to load: see `current`."""
    if installed.project is None:
        return choice
    record = current(installed.project, unit, str(choice.target), choice.record)
    return dataclasses.replace(choice, record=record)


def current(project: Path, unit: str, target: str, record: Record) -> Record:
    """The record to load for a unit of an editable install: `record`, or one built just now.

    A cheap look at what the record was derived from: no project code runs and nothing compiles,
    unless `MAX_BUILD_STALE=build` asks for it.

    Raises
    ------
    LoadError
        If the artifact is stale and `MAX_BUILD_STALE=error`, or the variable has no known value.
    MaxBuildError
        If the build that was asked for fails.
    """
    mode = os.environ.get(VARIABLE) or "warn"
    if mode not in _MODES:
        message = f"`{VARIABLE}` must be one of {', '.join(_MODES)}, got {mode!r}"
        raise LoadError(message)
    if mode == "ignore" or not is_project(project):
        return record
    from max_build.config import load_settings
    from max_build.store import open_cache

    settings = load_settings(project)
    if unit not in {one.name for one in settings.units}:
        why = "the project declares no such unit any more"
        return _told(mode, project, unit, target, why, record)
    with open_cache(settings.cache) as cache:
        why = _why(settings, cache, settings.unit(unit), target, record)
    if not why:
        return record
    if mode == "build":
        return _built(settings, unit, target)
    return _told(mode, project, unit, target, why, record)


def _told(mode: str, project: Path, unit: str, target: str, why: str, record: Record) -> Record:
    message = f"the artifact of `{unit}` for `{target}` is stale: {why}"
    if why == _NO_RECIPE:
        message = f"the artifact of `{unit}` for `{target}` may be stale: {why}"
    hint = f"run `max-build build` in `{project}` and install it again, or set `{VARIABLE}=build`"
    if mode == "error":
        raise LoadError(message, hint=hint)
    # at the call of `load` or `load_kernels`, which goes through `refreshed` and `current`
    warnings.warn(f"{message}\n\nhint: {hint}", StaleWarning, stacklevel=5)
    return record


def _why(settings: Settings, cache: Cache, unit: Unit, target_name: str, record: Record) -> str:
    """Which input changed, `_NO_RECIPE` if that cannot be told; empty if none did.

    Empty too where nothing can be known of the inputs: without the compiler.
    """
    from max_build import compilers
    from max_build.recipes.recall import Recall
    from max_build.target import Target

    target = Target(target_name)
    if not compilers.get(unit.compiler).runs_user_code:
        return _derived_otherwise(settings, cache, unit, target, record)
    recall = Recall(settings, cache)
    if not recall.lookup_key(unit, target):
        return ""
    key = recall.key(unit, target)
    if key:
        return "" if key == record.key else _difference(cache, key, record)
    # Declaration, environment and max-build are what recipes are looked up by.
    return recall.stale(unit, target) or _NO_RECIPE


def _derived_otherwise(
    settings: Settings, cache: Cache, unit: Unit, target: Target, record: Record
) -> str:
    """What is different in a unit whose derivation runs no project code; empty if nothing is."""
    try:
        components = _derived(settings, unit, target)
    except ToolchainError:
        return ""
    except MaxBuildError as error:
        return str(error.message)
    if components is None:
        return ""
    from max_build.explain import compare

    return ", ".join(compare(cache, record, components).words)


def _difference(cache: Cache, key: str, record: Record) -> str:
    from max_build.explain import compare, ir_of
    from max_build.store import Hit

    found = cache.lookup(key)
    if not isinstance(found, Hit):
        return "it was built from other sources"
    now = found.record
    return ", ".join(compare(cache, record, now.components, ir_of(cache, now)).words)


def _derived(settings: Settings, unit: Unit, target: Target) -> Components | None:
    import tempfile

    from max_build import compilers
    from max_build.compilers import Job

    with tempfile.TemporaryDirectory(prefix="max-build-") as scratch:
        job = Job(unit, target, Path(settings.root), settings.python_path, Path(scratch))
        derivation = compilers.get(unit.compiler).derive(job)
    return None if derivation.uncacheable else derivation.components


def _built(settings: Settings, unit: str, target: str) -> Record:
    from max_build.pipeline import build
    from max_build.runtime.kept import opened

    with opened(settings.cache) as cache:  # its artifact is asked for next
        (outcome,) = build(settings.narrowed((unit,), (target,)), cache).outcomes
    if outcome.error is not None:
        raise outcome.error
    assert outcome.record is not None, outcome
    return outcome.record
