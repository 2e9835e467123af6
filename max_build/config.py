"""`[tool.max-build]` → frozen settings; every wrong key, type or value is reported at once.

Precedence, strongest first: flag, environment, hook table, project table, user file, default.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from max_build import compilers, schema
from max_build.errors import ConfigError, TargetError, ToolchainError
from max_build.schema import Field
from max_build.store.settings import CacheSettings
from max_build.target import Target, parse

__all__ = ["Settings", "Unit", "cache_settings", "load_settings"]

Kind = Literal["graph", "kernel"]

TABLE = "tool.max-build"
# Keys of hatchling's own that stand in the hook's table beside ours.
_HATCHLING = frozenset(
    {
        "dependencies",
        "enable-by-default",
        "require-runtime-dependencies",
        "require-runtime-features",
    }
)
_USER_FILE_KEYS = ("cache", "compile-timeout", "executor", "jobs")
_FLAGS = "command line"
_AS_TEXT = ("CUDA_", "HOME", "MODULAR_", "TRITON_", "XDG_CACHE_HOME")
_UNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


_CONVERSIONS: dict[schema.Reader, Callable[[str], Any]] = {
    schema.count: int,
    schema.listed: lambda text: re.split(r"[,\s]+", text.strip()),
    schema.seconds: float,
}


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
        message = f"no unit `{name}` in [{TABLE}]; the project declares {_list(names)}"
        raise ConfigError(message, hint=_close(name, names))

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
        found: list[Unit] = []
        problems: dict[str, set[str]] = {}
        for unit in chosen:
            mine: list[str] = []
            accepted: list[str] = []
            for name in targets:
                accepted += _targets(_FLAGS, (name,), compilers.get(unit.compiler).accepts, mine)
                for problem in mine:
                    problems.setdefault(name, set()).add(problem)
                mine.clear()
            if accepted:
                found.append(msgspec.structs.replace(unit, targets=tuple(dict.fromkeys(accepted))))
        nowhere = [
            problem
            for name, told in problems.items()
            if units or not any(name in unit.targets for unit in found)
            for problem in sorted(told)
        ]
        if nowhere:
            raise ConfigError("\n  ".join(nowhere))
        return msgspec.structs.replace(self, units=tuple(found))


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
    if not _encodable(str(root)):
        shown = os.fsencode(root).decode(errors="backslashreplace")
        message = f"the project's directory `{shown}` has a path that is not UTF-8"
        raise ConfigError(message, hint="rename the directory")
    document = _read_toml(root / "pyproject.toml")
    user = _user_file(environ)
    # What compilers read, or paths are made of, goes into keys, records and requests as text.
    problems: list[str] = [
        f"environment variable `{name}` is not UTF-8"
        for name, value in sorted(environ.items())
        if name.startswith(_AS_TEXT) and not _encodable(value)
    ]
    tool = _table(document, ("tool", "max-build"), problems)
    layers: list[tuple[str, Mapping[str, Any]]] = [(TABLE, tool)]
    if hook:
        own = {name: value for name, value in hook.items() if name not in _HATCHLING}
        layers.append(("tool.hatch.build.targets.wheel.hooks.max-build", own))
    if flags:
        layers.append((_FLAGS, flags))
    project = _decode(schema.PROJECT, layers, problems, environ, user)
    cache_layers = [
        (f"{path}.cache", found) for path, table in layers if (found := _has(table, "cache"))
    ]
    cache = _decode(schema.CACHE, cache_layers, problems, environ, _has(user, "cache") or {})
    tables: tuple[tuple[Kind, Sequence[Field]], ...] = (
        ("graph", schema.GRAPH),
        ("kernel", schema.KERNEL),
    )
    units = [
        unit
        for kind, fields in tables
        for name, declared in project[f"{kind}s"].items()
        if (unit := _unit(kind, name, declared, fields, project, problems))
    ]
    _same_names(units, problems)
    if problems:
        message = f"{root.name}: " + (
            problems[0] if len(problems) == 1 else "\n  ".join(["settings are wrong", *problems])
        )
        raise ConfigError(message)
    metadata = document.get("project", {})
    name = metadata.get("name", "") if isinstance(metadata, dict) else ""
    return Settings(
        root=str(root),
        project=re.sub(r"[-_.]+", "-", str(name)).lower(),
        package=project["package"],
        units=tuple(units),
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
    user = _has(_user_file(environ), "cache") or {}
    values = _decode(schema.CACHE, [], problems, environ, user)
    if problems:
        raise ConfigError("\n  ".join(["settings of the cache are wrong", *problems]))
    return _cache(values, Path.cwd())


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        message = f"no `pyproject.toml` in `{path.parent}`"
        hint = "run max-build in the root of a model repo, or name it with `--project DIR`"
        raise ConfigError(message, hint=hint) from None
    except (OSError, ValueError, RecursionError) as error:
        # Besides its own errors, tomllib lets out those of a number or a nesting without end.
        message = f"`{path}` cannot be read: {error}"
        raise ConfigError(message) from error


def _user_file(environ: Mapping[str, str]) -> dict[str, Any]:
    home = environ.get("XDG_CONFIG_HOME") or (
        os.path.join(environ["HOME"], ".config") if environ.get("HOME") else ""
    )
    path = Path(home, "max-build", "config.toml")
    if not home or not path.is_file():
        return {}
    found = _read_toml(path)
    foreign = sorted(found.keys() - set(_USER_FILE_KEYS))
    if foreign:
        message = f"`{path}` may set {_list(_USER_FILE_KEYS)}, not {_list(foreign)}"
        raise ConfigError(message, hint=f"project settings belong into [{TABLE}]")
    return found


def _table(document: Mapping[str, Any], path: Sequence[str], problems: list[str]) -> dict[str, Any]:
    found: Any = document
    for depth, name in enumerate(path, 1):
        found = found.get(name, {})
        if not isinstance(found, dict):
            problems.append(f"`{'.'.join(path[:depth])}` must be a table, got {found!r}")
            return {}
    return dict(found)


def _has(layer: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = layer.get(name)
    return value if isinstance(value, dict) else None


def _decode(
    fields: Sequence[Field],
    layers: Sequence[tuple[str, Mapping[str, Any]]],
    problems: list[str],
    environ: Mapping[str, str],
    user: Mapping[str, Any],
) -> dict[str, Any]:
    """Decode one table from its layers, the last one strongest, then the environment."""
    values = {field.name: field.default for field in fields}
    by_name = {field.name: field for field in fields}
    for path, layer in [("user file", user), *layers]:
        for name, value in layer.items():
            field = by_name.get(name)
            if field is None:
                hint = _close(name, list(by_name))
                problems.append(f"`{path}.{name}` is unknown" + (f": {hint}" if hint else ""))
                continue
            _read(field, value, f"{path}.{name}", values, problems)
    flagged = {name for path, layer in layers if path.startswith(_FLAGS) for name in layer}
    for field in fields:
        if field.env and environ.get(field.env, "") != "" and field.name not in flagged:
            if not _encodable(environ[field.env]):
                problems.append(f"environment variable `{field.env}` is not UTF-8")
                continue
            try:
                value = _from_text(field, environ[field.env])
            except ValueError as error:
                problems.append(f"environment variable `{field.env}` {error}")
            else:
                _read(field, value, f"environment variable {field.env}", values, problems)
    return values


def _encodable(text: str) -> bool:
    """Whether text that came from the system is UTF-8, as what workers and records are told is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(field: Field, value: Any, path: str, values: dict[str, Any], problems: list[str]) -> None:
    try:
        values[field.name] = field.read(value)
    except ValueError as error:
        problems.append(f"`{path}` {error}")


def _truth(value: str) -> bool:
    return value.strip().lower() in {"1", "true", "yes", "on"}


def _from_text(field: Field, value: str) -> Any:
    """Turn a variable's text into the TOML value that the field reads."""
    convert = _CONVERSIONS.get(field.read, str)
    if field.read is schema.flag:
        if not _truth(value) and value.strip().lower() not in {"0", "false", "no", "off"}:
            message = f"must be `1` or `0`, got {value!r}"
            raise ValueError(message)
        return _truth(value)
    try:
        return convert(value)
    except ValueError:
        message = f"must be a number, got {value!r}"
        raise ValueError(message) from None


def _endless(path: str, value: Any) -> Iterator[str]:
    """What is wrong with the floats in a value: JSON, as workers are told it, has finite ones."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _endless(f"{path}.{name}", one)
    elif isinstance(value, list):
        for position, one in enumerate(value):
            yield from _endless(f"{path}[{position}]", one)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"`{path}` must be a finite number, got {value!r}"


def _unit(
    kind: Kind,
    name: str,
    table: Any,
    fields: Sequence[Field],
    project: Mapping[str, Any],
    problems: list[str],
) -> Unit | None:
    where = f"{TABLE}.{kind}s.{name}"
    before = len(problems)
    if not isinstance(table, dict):
        problems.append(f"`{where}` must be a table, got {table!r}")
        return None
    if not _UNIT_NAME.fullmatch(name):
        problems.append(f"`{where}`: a unit's name is made of letters, digits, `.`, `_` and `-`")
    problems.extend(_endless(where, table))
    declared = _decode(fields, [(where, table)], problems, {}, {})
    compiler = declared.pop("compiler") or _compiler_of(where, declared, problems)
    if kind == "graph" and not declared["entry"] and "entry" not in table:
        problems.append(f"`{where}.entry` is missing: it names the function that builds the graph")
    host = declared.pop("host", "") or project["host"]
    names = declared.pop("targets") or project["targets"]
    if len(problems) > before:
        return None
    try:
        adapter = compilers.get(compiler)
    except ToolchainError as error:
        problems.append(f"`{where}.compiler`: {error}")
        return None
    if not compilers.takes(adapter, kind):
        fitting = _list(_compilers_for(kind))
        problems.append(f"`{where}.compiler` must be one of {fitting}, got {compiler!r}")
        return None
    targets = _targets(where, names, adapter.accepts, problems)
    unit = Unit(
        name=name,
        kind=kind,
        compiler=compiler,
        targets=targets,
        host=host,
        declared=declared,
    )
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
    where: str, names: Sequence[str], accepted: tuple[Target, ...], problems: list[str]
) -> tuple[str, ...]:
    if not names:
        problems.append(
            f"`{where}` has no targets: set `targets` there or in [{TABLE}], "
            'for example `targets = ["cpu"]`'
        )
    found: dict[str, None] = {}
    for name in names:
        try:
            found[str(parse(name, accepted=accepted))] = None
        except TargetError as error:
            problems.append(
                f"`{where}.targets`: {error.message}" + (f"; {error.hint}" if error.hint else "")
            )
    return tuple(found)


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


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _close(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=2)
    return f"did you mean {' or '.join(f'`{one}`' for one in close)}?" if close else ""
