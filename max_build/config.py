"""`[tool.max-build]` → frozen settings; every wrong key, type or value is reported at once.

Precedence, strongest first: flag, environment, hook table, project table, user file, default.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from max_build import compilers, schema
from max_build.distributions import normalise
from max_build.errors import ConfigError, TargetError, ToolchainError
from max_build.fields import Field
from max_build.key import encodable
from max_build.layers import (
    FLAGS,
    TABLE,
    close,
    decode,
    endless,
    quoted,
    read_toml,
    table_at,
    table_of,
    user_file,
    variable,
)
from max_build.manifest import Kind
from max_build.store.settings import CacheSettings
from max_build.target import Target, parse

__all__ = [
    "Settings",
    "Unit",
    "cache_of",
    "cache_settings",
    "load_settings",
    "oddities",
    "strangers",
]

# Keys of hatchling's own that stand in the hook's table beside ours.
_HATCHLING = frozenset(
    {
        "dependencies",
        "enable-by-default",
        "require-runtime-dependencies",
        "require-runtime-features",
    }
)
_TARGETS = "MAX_BUILD_TARGETS"
# Variables that are read where they are used, and not by the table of settings.
_OTHERS = ("GDS", "REMOTE_TOKEN", "RUN_HOST", "RUN_PROJECT", "RUN_VERBOSE", "STALE")
_AS_TEXT = ("CUDA_", "HOME", "MODULAR_", "TRITON_", "XDG_CACHE_HOME")
_UNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One declared graph or kernel module, as its table says, decoded.

    Parameters
    ----------
    name
        The key of its table.
    kind
        Which table it stands in.
    compiler
        Name of the adapter that turns it into artifacts.
    targets
        Exact target strings, without repetition, in the order declared.
    host
        Baseline of host code.
    declared
        The other keys of its table, decoded, defaults filled in.
    """

    name: str
    kind: Kind
    compiler: str
    targets: tuple[str, ...]
    host: str
    declared: dict[str, Any]

    @property
    def where(self) -> str:
        """The full TOML path of its table."""
        return f"{TABLE}.{self.kind}s.{self.name}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What one build of one project works by.

    Parameters
    ----------
    root
        The project's directory, absolute.
    project
        The distribution's name, normalised; empty where the project declares none.
    package
        Import package that carries the artifacts; empty where the wheel builder has to say.
    python_path
        Directories that entries are imported from, absolute, in order.
    jobs
        Workers at once; 0 means as many as the machine carries.
    executor
        Who compiles: `local`, or the address of a farm.
    compile_timeout
        Seconds that one compile may take.
    """

    root: str
    project: str
    package: str
    units: tuple[Unit, ...]
    cache: CacheSettings
    python_path: tuple[str, ...]
    jobs: int
    executor: str
    compile_timeout: float
    embed: bool
    require_hit: bool
    disable: bool
    toolchain: dict[str, str]

    def unit(self, name: str) -> Unit:
        """The unit of that name.

        Raises
        ------
        ConfigError
            If the project declares none; the message lists those it does.
        """
        for unit in self.units:
            if unit.name == name:
                return unit
        names = sorted(unit.name for unit in self.units)
        message = f"no unit `{name}` in [{TABLE}]; the project declares {quoted(names)}"
        raise ConfigError(message, hint=close(name, names))

    def narrowed(self, units: Sequence[str], targets: Sequence[str]) -> Settings:
        """The same settings with `units` alone, compiled for `targets` in place of their own.

        Empty means all units, or the targets declared. Without `units`, those whose compiler
        knows none of the targets are left out.

        Raises
        ------
        ConfigError
            If a unit is not declared, or nothing accepts one of the targets.
        """
        chosen = [self.unit(name) for name in units] if units else list(self.units)
        if not targets:
            return msgspec.structs.replace(self, units=tuple(chosen))
        problems: list[str] = []
        found = _for_targets(chosen, targets, "`--target`", problems, all_units=bool(units))
        if problems:
            raise ConfigError("\n  ".join(problems))
        return msgspec.structs.replace(self, units=found)


def _for_targets(
    units: Sequence[Unit],
    targets: Sequence[str],
    origin: str,
    problems: list[str],
    *,
    all_units: bool = False,
) -> tuple[Unit, ...]:
    """The units that take some of the targets, with those in place of their own.

    A target that none of them takes is a problem; with `all_units`, one that some do not.
    """
    found: list[Unit] = []
    refused: dict[str, dict[str, None]] = {}
    for name in targets:
        refused[name] = {}
    taken: set[str] = set()
    for unit in units:
        accepted: dict[str, None] = {}
        for name in targets:
            try:
                target = parse(name, accepted=compilers.get(unit.compiler).accepts)
            except TargetError as error:
                refused[name][_told(error)] = None
            else:
                accepted[str(target)] = None
                taken.add(name)
        if accepted:
            found.append(msgspec.structs.replace(unit, targets=tuple(accepted)))
    for name, told in refused.items():
        if all_units or name not in taken:
            problems.extend(f"{origin}: {one}" for one in sorted(told))
    return tuple(found)


def load_settings(
    root: Path,
    *,
    hook: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Read the settings of the project at `root`.

    Parameters
    ----------
    root
        Directory of the project's `pyproject.toml`.
    hook
        The hook's own table, as hatchling hands it over.
    environ
        Where the `MAX_BUILD_…` variables are looked up.
    flags
        Keys of `[tool.max-build]` set on the command line, decoded TOML values.

    Raises
    ------
    ConfigError
        With every finding, each by its full path.
    """
    root = root.resolve()
    if not encodable(str(root)):
        shown = os.fsencode(root).decode(errors="backslashreplace")
        message = f"the project's directory `{shown}` has a path that is not UTF-8"
        raise ConfigError(message, hint="rename the directory")
    path = root / "pyproject.toml"
    document = read_toml(path)
    user, own = user_file(environ)
    # What compilers read, or paths are made of, goes into keys, records and requests as text.
    problems: list[str] = [
        f"{variable(name)} is not UTF-8"
        for name, value in sorted(environ.items())
        if name.startswith(_AS_TEXT) and not encodable(value)
    ]
    layers = [(f"{user}: ", own), *_layers(document, hook or {}, flags or {}, problems)]
    origins: dict[str, str] = {}
    project = decode(schema.PROJECT, layers, problems, environ, origins)
    tables = [
        (f"{before}cache.", found) for before, one in layers if (found := table_of(one, "cache"))
    ]
    cache = decode(schema.CACHE, tables, problems, environ)
    units = _units(project, origins.get("targets", ""), problems)
    if problems:
        told = problems if len(problems) == 1 else [f"settings of `{path}` are wrong:", *problems]
        raise ConfigError("\n  ".join(told))
    return Settings(
        root=str(root),
        project=_project_name(document),
        package=project["package"],
        units=units,
        cache=_cache(cache, root),
        python_path=_python_path(root, project["python-path"]),
        jobs=project["jobs"],
        executor=project["executor"],
        compile_timeout=project["compile-timeout"],
        embed=project["embed"],
        require_hit=project["require-hit"],
        disable=project["disable"],
        toolchain=project["toolchain"],
    )


def cache_settings(environ: Mapping[str, str] = os.environ) -> CacheSettings:
    """Where the cache is for a program that runs outside any project: environment and user file.

    Raises
    ------
    ConfigError
        With every finding, each by its variable or path.
    """
    problems: list[str] = []
    user, own = user_file(environ)
    layers = [(f"{user}: cache.", table_of(own, "cache") or {})]
    values = decode(schema.CACHE, layers, problems, environ)
    if problems:
        raise ConfigError("\n  ".join(["settings of the cache are wrong", *problems]))
    return _cache(values, Path.cwd())


def cache_of(project: Path | None) -> CacheSettings:
    """The project's cache where there is a project in that directory, else the user's.

    Raises
    ------
    ConfigError
        If the settings are wrong.
    """
    if project is not None and (project / "pyproject.toml").is_file():
        return load_settings(project).cache
    return cache_settings()


def strangers(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line for each `MAX_BUILD_…` variable that is none of ours: a slip, which does nothing."""
    ours = {f"MAX_BUILD_{name}" for name in _OTHERS}
    ours |= {field.env for table in schema.TABLES.values() for field in table}
    found = []
    for name in sorted(environ):
        if name.startswith("MAX_BUILD_") and name not in ours:
            # What all begin with makes none of them alike.
            hint = close(name[10:], [one[10:] for one in sorted(ours) if one])
            hint = hint.replace(" `", " `MAX_BUILD_")
            found.append(f"{variable(name)} is unknown" + (f": {hint}" if hint else ""))
    return found


def oddities(settings: Settings, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is no error and yet hardly meant, a line each."""
    root = Path(settings.root)
    named = [(f"{TABLE}.python-path", one) for one in settings.python_path]
    for unit in settings.units:
        where = f"{unit.where}.include-dirs"
        named += [(where, one) for one in unit.declared.get("include-dirs", ())]
    missing = [
        f"`{where}` names `{one}`, which is no directory"
        for where, one in named
        if not os.path.isdir(root / one)
    ]
    return strangers(environ) + missing


def _layers(
    document: Mapping[str, Any],
    hook: Mapping[str, Any],
    flags: Mapping[str, Any],
    problems: list[str],
) -> list[tuple[str, Mapping[str, Any]]]:
    """(what a message puts before a key, keys) of what a project sets, the weakest first."""
    own = {name: value for name, value in hook.items() if name not in _HATCHLING}
    return [
        (f"{TABLE}.", table_at(document, ("tool", "max-build"), problems)),
        ("tool.hatch.build.targets.wheel.hooks.max-build.", own),
        (FLAGS, flags),
    ]


def _project_name(document: Mapping[str, Any]) -> str:
    project = document.get("project", {})
    return normalise(str(project.get("name", ""))) if isinstance(project, dict) else ""


def _units(project: Mapping[str, Any], origin: str, problems: list[str]) -> tuple[Unit, ...]:
    """Every unit that is declared rightly; graphs come before kernels.

    `origin` is what set the targets of the project: an environment variable sets those of units
    that have their own, too.
    """
    tables: tuple[tuple[Kind, Sequence[Field]], ...] = (
        ("graph", schema.GRAPH),
        ("kernel", schema.KERNEL),
    )
    misfits: dict[str, list[str]] = {}
    units = tuple(
        unit
        for kind, fields in tables
        for name, declared in project[f"{kind}s"].items()
        if (unit := _unit(kind, name, declared, fields, project, problems, misfits))
    )
    _same_names(units, problems)
    if origin == variable(_TARGETS):
        return _for_targets(units, project["targets"], origin, problems)
    for name, wheres in misfits.items():
        try:
            told = f"{quoted(wheres)} cannot be compiled for `{parse(name)}`: set `targets` there"
        except TargetError as error:
            told = _told(error)
        problems.append(f"{origin}: {told}")
    return units


def _unit(
    kind: Kind,
    name: str,
    table: Any,
    fields: Sequence[Field],
    project: Mapping[str, Any],
    problems: list[str],
    misfits: dict[str, list[str]],
) -> Unit | None:
    """The unit; what is wrong goes to `problems`, what it cannot inherit to `misfits`.

    `misfits` is target of the project → the units whose compilers do not take it.
    """
    where = f"{TABLE}.{kind}s.{name}"
    before = len(problems)
    if not isinstance(table, dict):
        problems.append(f"`{where}` must be a table, got {table!r}")
        return None
    if not _UNIT_NAME.fullmatch(name):
        problems.append(f"`{where}`: a unit's name is made of letters, digits, `.`, `_` and `-`")
    problems.extend(endless(where, table))
    declared = decode(fields, [(f"{where}.", table)], problems, {})
    compiler = declared.pop("compiler") or _compiler_of(where, declared, problems)
    if kind == "graph" and not declared["entry"] and "entry" not in table:
        problems.append(f"`{where}.entry` is missing: it names the function that builds the graph")
    host = declared.pop("host", "") or project["host"]
    own, inherited = declared.pop("targets"), project["targets"]
    if not compiler:
        return None
    unknown = table.keys() - {field.name for field in fields}
    sound = len(problems) - before <= len(unknown)
    try:
        adapter = compilers.get(compiler)
    except ToolchainError as error:
        problems.append(f"`{where}.compiler`: {error}")
        return None
    if not compilers.takes(adapter, kind):
        fitting = quoted(_compilers_for(kind))
        problems.append(f"`{where}.compiler` must be one of {fitting}, got {compiler!r}")
        return None
    targets = _targets(where, own, inherited, adapter.accepts, problems, misfits)
    unit = Unit(
        name=name,
        kind=kind,
        compiler=compiler,
        targets=targets,
        host=host,
        declared=declared,
    )
    if sound:
        problems.extend(f"`{where}.{path}` {text}" for path, text in adapter.problems(unit))
    return unit


def _compilers_for(kind: Kind) -> list[str]:
    found = []
    for name in compilers.names():
        with contextlib.suppress(ToolchainError):  # of a third party, and not the one asked for
            if compilers.takes(compilers.get(name), kind):
                found.append(name)
    return found


def _compiler_of(where: str, declared: Mapping[str, Any], problems: list[str]) -> str:
    if declared.get("entry"):
        if declared.get("source"):
            problems.append(f"`{where}` has both `source` and `entry`; a unit has one of them")
        return "triton"
    source = declared.get("source", "")
    if not source:
        problems.append(f"`{where}.source` is missing: it names the kernel's file")
        return ""
    suffix = Path(source).suffix
    found = {".cu": "cuda", ".cuh": "cuda", ".ptx": "ptx"}.get(suffix, "")
    if not found:
        problems.append(f"`{where}.source` must end in `.cu`, `.cuh` or `.ptx`, got {source!r}")
    return found


def _targets(
    where: str,
    own: Sequence[str],
    inherited: Sequence[str],
    accepted: tuple[Target, ...],
    problems: list[str],
    misfits: dict[str, list[str]],
) -> tuple[str, ...]:
    if not own and not inherited:
        problems.append(
            f"`{where}` has no targets: set `targets` there or in [{TABLE}], "
            'for example `targets = ["cpu"]`'
        )
    found: dict[str, None] = {}
    for name in own or inherited:
        try:
            found[str(parse(name, accepted=accepted))] = None
        except TargetError as error:
            if own:
                problems.append(f"`{where}.targets`: {_told(error)}")
            else:
                misfits.setdefault(name, []).append(where)
    return tuple(found)


def _told(error: TargetError) -> str:
    return error.message + (f"; {error.hint}" if error.hint else "")


def _same_names(units: Sequence[Unit], problems: list[str]) -> None:
    seen: dict[str, Unit] = {}
    for unit in units:
        if unit.name in seen:
            problems.append(f"`{unit.where}` has the name of `{seen[unit.name].where}`")
        seen[unit.name] = unit


def _python_path(root: Path, declared: Sequence[str]) -> tuple[str, ...]:
    if declared:
        return tuple(str(root / one) for one in declared)
    try:
        return tuple(str(root / one) for one in ("src", ".") if (root / one).is_dir())
    except OSError as error:
        message = f"`{root}` cannot be looked at: {error.strerror}"
        raise ConfigError(message) from error


def _cache(values: Mapping[str, Any], root: Path) -> CacheSettings:
    fields = {name.replace("-", "_"): value for name, value in values.items()}
    for name in ("dir", "shared", "signing_key", "remote_ca", "remote_cert", "remote_key"):
        if fields[name]:
            fields[name] = str(root / fields[name])
    return CacheSettings(**fields)
