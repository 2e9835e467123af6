"""Layers of settings: files of TOML, flags and variables, read and merged by a table of fields."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from max_build.errors import ConfigError
from max_build.fields import Field
from max_build.key import encodable

__all__ = [
    "FLAGS",
    "TABLE",
    "close",
    "decode",
    "endless",
    "project_at",
    "quoted",
    "read_toml",
    "table_at",
    "table_of",
    "user_file",
    "variable",
]

TABLE = "tool.max-build"
FLAGS = "command line."
"""What stands before a key of the layer of flags, which alone is stronger than the environment."""

_USER_FILE_KEYS = ("cache", "compile-timeout", "executor", "jobs")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of settings.

    Raises
    ------
    ConfigError
        If there is none, or it is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # an editor's BOM does no harm
    except FileNotFoundError:
        message = f"no `pyproject.toml` in `{path.parent}`"
        hint = "run max-build inside of a model repo, or name it with `--project DIR`"
        raise ConfigError(message, hint=hint) from None
    except (OSError, ValueError, RecursionError) as error:
        # Besides its own errors, tomllib lets out those of a number or a nesting without end.
        message = f"`{path}` cannot be read: {error}"
        raise ConfigError(message) from error


def project_at(start: Path) -> Path:
    """The project that a directory lies in: the nearest one above with our table, else the nearest.

    It is the directory itself where there is no `pyproject.toml` up to the root.
    """
    found = [one for one in (start, *start.parents) if os.path.isfile(one / "pyproject.toml")]
    return next((one for one in found if _is_ours(one)), found[0] if found else start)


def _is_ours(folder: Path) -> bool:
    try:
        document = read_toml(folder / "pyproject.toml")
    except ConfigError:
        return True  # whoever reads it next tells what is wrong
    return "max-build" in (table_of(document, "tool") or {})


def user_file(environ: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    """The user's own file: where it is, and what it sets, which is nothing where there is none.

    Raises
    ------
    ConfigError
        If it is no TOML, or sets what is a project's to set.
    """
    home = environ.get("XDG_CONFIG_HOME") or (
        os.path.join(environ["HOME"], ".config") if environ.get("HOME") else ""
    )
    path = Path(home, "max-build", "config.toml")
    if not home or not path.is_file():
        return path, {}
    found = read_toml(path)
    foreign = sorted(found.keys() - set(_USER_FILE_KEYS))
    if foreign:
        message = f"`{path}` may set {quoted(_USER_FILE_KEYS)}, not {quoted(foreign)}"
        raise ConfigError(message, hint=f"project settings belong into [{TABLE}]")
    return path, found


def table_at(
    document: Mapping[str, Any], path: Sequence[str], problems: list[str]
) -> dict[str, Any]:
    """The table at that path, empty where there is none."""
    found: Any = document
    for depth, name in enumerate(path, 1):
        found = found.get(name, {})
        if not isinstance(found, dict):
            problems.append(f"`{'.'.join(path[:depth])}` must be a table, got {found!r}")
            return {}
    return dict(found)


def table_of(layer: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The table of that name, where it is one."""
    value = layer.get(name)
    return value if isinstance(value, dict) else None


def decode(
    fields: Sequence[Field],
    layers: Sequence[tuple[str, Mapping[str, Any]]],
    problems: list[str],
    environ: Mapping[str, str],
    origins: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Decode one table from its layers, the last one strongest, then the environment.

    Parameters
    ----------
    layers
        (what a message puts before a key, keys) of what sets something, the weakest first.
    origins
        Filled: key → what set it, as a message names that.
    """
    values = {field.name: field.default for field in fields}
    by_name = {field.name: field for field in fields}
    origins = {} if origins is None else origins

    def read(field: Field, value: Any, origin: str) -> None:
        origins[field.name] = origin
        try:
            values[field.name] = field.read(value)
        except ValueError as error:
            problems.append(f"{origin} {error}")

    for path, layer in layers:
        for name, value in layer.items():
            field = by_name.get(name)
            if field is None:
                hint = close(name, list(by_name))
                problems.append(f"`{path}{name}` is unknown" + (f": {hint}" if hint else ""))
                continue
            read(field, value, f"`{path}{name}`")
    flagged = {name for path, layer in layers if path.startswith(FLAGS) for name in layer}
    for field in fields:
        if field.env and environ.get(field.env, "") != "" and field.name not in flagged:
            if not encodable(environ[field.env]):
                problems.append(f"environment variable `{field.env}` is not UTF-8")
                continue
            try:
                value = field.parse(environ[field.env])
            except ValueError as error:
                problems.append(f"{variable(field.env)} {error}")
            else:
                read(field, value, variable(field.env))
    return values


def variable(name: str) -> str:
    """An environment variable as a message names it."""
    return f"environment variable `{name}`"


def endless(path: str, value: Any) -> Iterator[str]:
    """What is wrong with the floats in a value: JSON, as workers are told it, has finite ones."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from endless(f"{path}.{name}", one)
    elif isinstance(value, list):
        for position, one in enumerate(value):
            yield from endless(f"{path}[{position}]", one)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"`{path}` must be a finite number, got {value!r}"


def quoted(names: Sequence[str]) -> str:
    """Names as a message lists them."""
    return ", ".join(f"`{name}`" for name in names) or "none"


def close(name: str, names: Sequence[str]) -> str:
    """A question for a name that is nearly one of `names`; empty where it is not."""
    import difflib  # not where nothing is wrong

    found = difflib.get_close_matches(name, names, n=2)
    return f"did you mean {' or '.join(f'`{one}`' for one in found)}?" if found else ""
