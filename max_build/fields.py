"""One key of one table of the settings: how its value is read from TOML and from a variable."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from max_build.store.amounts import parse_size
from max_build.store.settings import remote_fault
from max_build.store.trust import FORM, public_key

__all__ = [
    "Field",
    "Reader",
    "choice",
    "count",
    "entry",
    "executor",
    "flag",
    "number",
    "path",
    "public_keys",
    "remote",
    "seconds",
    "size",
    "strings",
    "table",
    "text",
    "texts",
    "truth",
    "words",
]

Reader = Callable[[Any], Any]
"""Returns the decoded value, or raises ValueError with the rest of "`path` must be …"."""


@dataclass(frozen=True, slots=True)
class Field:
    """One key of one table.

    Parameters
    ----------
    name
        The TOML key.
    read
        Decodes the TOML value.
    doc
        One sentence for the README.
    default
        The decoded value where the key is absent.
    env
        The environment variable that overrides it.
    shown
        The default as the README shows it, where that is not the value itself.
    parse
        Turns the variable's text into the TOML value; what it raises is as a reader's.
    """

    name: str
    read: Reader
    doc: str
    default: Any = None
    env: str = ""
    shown: str = ""
    parse: Callable[[str], Any] = str


def _got(value: Any) -> str:
    names: dict[type, str] = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "float",
        list: "array",
        dict: "table",
    }
    return f"got {names.get(type(value), type(value).__name__)} {value!r}"


def _filled(value: Any) -> bool:
    """Whether a value is a string with something in it, and nothing that no path may hold."""
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


def text(value: Any) -> str:
    """Read a non-empty string."""
    if not _filled(value):
        message = f"must be a non-empty string, {_got(value)}"
        raise ValueError(message)
    return str(value)


def path(value: Any) -> str:
    """Read a path, whose `~` is replaced."""
    found = os.path.expanduser(text(value))
    if found.startswith("~"):
        message = f"must be a path, and nobody has the home directory of {value!r}"
        raise ValueError(message)
    return found


def texts(value: Any) -> tuple[str, ...]:
    """Read an array of non-empty strings; a lone string is an array of one."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        message = f"must be an array of strings, {_got(value)}"
        raise ValueError(message)
    for position, one in enumerate(value, 1):
        if not _filled(one):
            message = f"must be an array of non-empty strings; item {position} is {one!r}"
            raise ValueError(message)
    if len(set(value)) != len(value):
        twice = sorted({one for one in value if value.count(one) > 1})
        message = f"names {', '.join(f'`{one}`' for one in twice)} twice"
        raise ValueError(message)
    return tuple(value)


def flag(value: Any) -> bool:
    """Read a boolean."""
    if not isinstance(value, bool):
        message = f"must be a boolean, {_got(value)}"
        raise ValueError(message)
    return value


def count(value: Any) -> int:
    """Read a whole number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        message = f"must be a whole number of at least 0, {_got(value)}"
        raise ValueError(message)
    return value


def seconds(value: Any) -> float:
    """Read a positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        message = f"must be a positive number of seconds, {_got(value)}"
        raise ValueError(message)
    return float(value)


def size(value: Any) -> int:
    """Read a number of bytes: an integer, or a string such as `"20 GiB"` or `"200G"`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return parse_size(value)
    message = f'must be a size such as "20 GiB", {_got(value)}'
    raise ValueError(message)


def choice(*allowed: str) -> Reader:
    """Read one of the given strings."""

    def read(value: Any) -> str:
        if value not in allowed or not isinstance(value, str):
            message = f"must be one of {', '.join(f'`{one}`' for one in allowed)}, {_got(value)}"
            raise ValueError(message)
        return value

    return read


def table(value: Any) -> dict[str, Any]:
    """Read a table, whose keys its own reader checks."""
    if not isinstance(value, dict):
        message = f"must be a table, {_got(value)}"
        raise ValueError(message)
    return dict(value)


def strings(value: Any) -> dict[str, str]:
    """Read a table of strings."""
    found = table(value)
    for key, one in found.items():
        if not isinstance(one, str):
            message = f"must be a table of strings; `{key}` is {one!r}"
            raise ValueError(message)
    return found


_ENTRY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def entry(value: Any) -> str:
    """Read `package.module:function`."""
    if not _ENTRY.fullmatch(text(value)):
        message = f"must be of the form `package.module:function`, got {value!r}"
        raise ValueError(message)
    return str(value)


_FARM = re.compile(r"dask://(?:\[[^\s/@\[\]]+\]|[^\s/:@\[\]]+):(\d{1,5})/?")
_LAST_PORT = 65535


def executor(value: Any) -> str:
    """Read who compiles."""
    farm = _FARM.fullmatch(text(value))
    if value != "local" and (farm is None or int(farm[1]) > _LAST_PORT):
        message = f"must be `local` or `dask://HOST:PORT`, got {value!r}"
        raise ValueError(message)
    return str(value)


def remote(value: Any) -> str:
    """Read the URL of a remote."""
    if fault := remote_fault(text(value)):
        raise ValueError(fault)
    return str(value)


def public_keys(value: Any) -> tuple[str, ...]:
    """Read public keys."""
    found = texts(value)
    for position, one in enumerate(found, 1):
        if not public_key(one)[1]:
            message = f"must have {FORM}, as `max-build key new` prints; item {position} is {one!r}"
            raise ValueError(message)
    return found


def words(value: str) -> list[str]:
    """Parse the items of an array, after commas or spaces."""
    return re.split(r"[,\s]+", value.strip())


def truth(value: str) -> bool:
    """Parse a boolean."""
    found = value.strip().lower()
    if found not in {"1", "true", "yes", "on", "0", "false", "no", "off"}:
        message = f"must be `1` or `0`, got {value!r}"
        raise ValueError(message)
    return found in {"1", "true", "yes", "on"}


def number(value: str) -> int | float:
    """Parse a number, whole where it is written so."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    message = f"must be a number, got {value!r}"
    raise ValueError(message)
