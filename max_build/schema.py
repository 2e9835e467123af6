"""Every setting there is: name, type, default, variable and meaning, as data.

`max_build.config` decodes by this table and the README's table is printed from it
(`python -m max_build.schema`), so neither can say what the other does not.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from max_build.store.amounts import parse_size

__all__ = ["CACHE", "GRAPH", "KERNEL", "PROJECT", "Field", "markdown"]

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
        The environment variable that overrides it; its text is split or converted first.
    shown
        The default as the README shows it.
    """

    name: str
    read: Reader
    doc: str
    default: Any = None
    env: str = ""
    shown: str = ""


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


def listed(value: Any) -> tuple[str, ...]:
    """Read `texts`, where an environment variable may hold the items after commas or spaces."""
    return texts(value)


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


PROJECT: tuple[Field, ...] = (
    Field(
        "targets",
        listed,
        "what every unit is compiled for: `cpu`, `sm_90a`, `gfx942`, … or `native`",
        (),
        "MAX_BUILD_TARGETS",
        "none",
    ),
    Field("host", text, "CPU baseline of host code in graph artifacts", "x86-64-v3"),
    Field(
        "package",
        text,
        "import package that carries the artifacts in the wheel, under `_max_build/`",
        "",
        shown="the wheel's only package",
    ),
    Field(
        "embed",
        flag,
        "put the artifacts into the wheel; `false` ships the manifest alone",
        True,
        "MAX_BUILD_EMBED",
        "`true`",
    ),
    Field(
        "python-path",
        texts,
        "directories, from the project root, that `entry` is imported from",
        (),
        shown='`["src", "."]`, those that exist',
    ),
    Field(
        "jobs",
        count,
        "workers that derive and compile at once; 0 means min(CPUs, memory / 2 GiB)",
        0,
        "MAX_BUILD_JOBS",
        "`0`",
    ),
    Field(
        "executor",
        text,
        "who compiles what misses: `local` or a farm, `dask://HOST:PORT`",
        "local",
        "MAX_BUILD_EXECUTOR",
    ),
    Field(
        "compile-timeout",
        seconds,
        "seconds after which one compile is given up",
        3600.0,
        "MAX_BUILD_COMPILE_TIMEOUT",
        "`3600`",
    ),
    Field(
        "require-hit",
        flag,
        "a miss is an error and nothing compiles",
        False,
        "MAX_BUILD_REQUIRE_HIT",
        "`false`",
    ),
    Field(
        "disable",
        flag,
        "skip max-build altogether: no artifact, no manifest",
        False,
        "MAX_BUILD_DISABLE",
        "`false`",
    ),
    Field(
        "toolchain",
        strings,
        "versions of distributions that a machine without them takes as given, for hits",
        {},
        shown="none",
    ),
    Field("graphs", table, "graphs by name: tables as below", {}, shown="none"),
    Field("kernels", table, "kernel modules by name: tables as below", {}, shown="none"),
    Field("cache", table, "where artifacts are kept: a table as below", {}, shown="local only"),
)

GRAPH: tuple[Field, ...] = (
    Field(
        "entry", entry, "`package.module:function`, called as `function(target)`", shown="needed"
    ),
    Field(
        "weights",
        texts,
        "what `load` opens by default: paths from the project root or the package, or "
        "`package:path` inside an installed package; never hashed, never embedded",
        (),
        shown="none",
    ),
    Field("targets", listed, "in place of the project's `targets`", (), shown="the project's"),
    Field("host", text, "in place of the project's `host`", "", shown="the project's"),
    Field(
        "rename",
        strings,
        'prefix of a name in the file → prefix in the graph, `{ "model." = "" }`; a key that '
        "starts with `^` is a regular expression",
        {},
        shown="none",
    ),
    Field(
        "tied",
        strings,
        "weight of the graph → the weight whose tensor it shares where the file has none",
        {},
        shown="none",
    ),
    Field(
        "transpose",
        texts,
        "patterns (`*`, `?`) of weights whose last two dimensions the file swaps",
        (),
        shown="none",
    ),
    Field(
        "cast",
        strings,
        "pattern of weights → type they are converted to on load, from quantised types too",
        {},
        shown="none",
    ),
    Field(
        "quantised",
        strings,
        "pattern of weights the graph takes as bytes → type of their blocks, "
        '`{ "*.ffn_up.weight" = "q4_k" }`; a file of another type is refused',
        {},
        shown="none",
    ),
    Field(
        "options",
        table,
        "options of the compiler: `tile-based-fusion`, `defines`",
        {},
        shown="none",
    ),
    Field("compiler", text, "adapter of the group `max_build.compilers`", "max"),
)

KERNEL: tuple[Field, ...] = (
    Field(
        "source", text, "`.cu`, `.cuh` or `.ptx` file, from the project root", "", shown="needed"
    ),
    Field(
        "entry",
        entry,
        "`package.module:kernel` of a Triton kernel, in place of `source`",
        "",
        shown="none",
    ),
    Field("targets", listed, "in place of the project's `targets`", (), shown="the project's"),
    Field(
        "names",
        texts,
        "kernels by their source-level names, templates included",
        (),
        shown="every one in the cubin, by its symbol",
    ),
    Field(
        "include-dirs",
        texts,
        "header directories, from the project root, in order",
        (),
        shown="none",
    ),
    Field(
        "keep-ptx",
        flag,
        "ship the PTX too, for devices newer than every cubin",
        False,
        shown="`false`",
    ),
    Field("options", table, "options of the compiler", {}, shown="none"),
    Field(
        "signature",
        strings,
        'Triton: argument → type, `{ x = "*fp32:16", n = "i32" }`; `:16` promises a multiple of 16',
        {},
        shown="none",
    ),
    Field("constexprs", table, "Triton: argument → compile-time value", {}, shown="none"),
    Field("num-warps", count, "Triton: warps of a block", 4, shown="`4`"),
    Field("num-stages", count, "Triton: stages of software pipelining", 3, shown="`3`"),
    Field(
        "specialisations",
        table,
        "Triton: name → table of the five keys above, where they differ",
        {},
        shown="one, named after the unit",
    ),
    Field(
        "compiler", text, "adapter of the group `max_build.compilers`", "", shown="by the suffix"
    ),
)

CACHE: tuple[Field, ...] = (
    Field(
        "dir",
        path,
        "the developer's own directory",
        "",
        "MAX_BUILD_CACHE_DIR",
        "`$XDG_CACHE_HOME/max-build`",
    ),
    Field("shared", path, "the team's directory", "", "MAX_BUILD_SHARED", "none"),
    Field(
        "shared-mode",
        choice("read", "read-write"),
        "whether this machine writes to it",
        "read-write",
        "MAX_BUILD_SHARED_MODE",
    ),
    Field(
        "remote",
        text,
        "`s3://`, `gs://`, `az://`, `https://`, `http://` or `file://` URL",
        "",
        "MAX_BUILD_REMOTE",
        "none",
    ),
    Field(
        "remote-mode",
        choice("read", "read-write"),
        "whether this machine writes to it",
        "read",
        "MAX_BUILD_REMOTE_MODE",
    ),
    Field(
        "remote-ca",
        path,
        "file of the certificate authority to trust besides the system's",
        "",
        "MAX_BUILD_REMOTE_CA",
        "the system's",
    ),
    Field(
        "remote-cert",
        path,
        "file of this client's certificate, for `https://`",
        "",
        "MAX_BUILD_REMOTE_CERT",
        "none",
    ),
    Field("remote-key", path, "file of its key", "", "MAX_BUILD_REMOTE_KEY", "none"),
    Field(
        "shared-trust",
        choice("require", "warn", "off"),
        "what an unsigned record of the team's directory is: a miss, a warning, nothing",
        "off",
    ),
    Field(
        "remote-trust",
        choice("require", "warn", "off"),
        "the same for the remote",
        "off",
    ),
    Field("public-keys", texts, "Ed25519 keys whose signatures count", (), shown="none"),
    Field(
        "signing-key",
        path,
        "file of the private key that signs what is published",
        "",
        "MAX_BUILD_SIGNING_KEY",
        "none",
    ),
    Field(
        "max-size",
        size,
        "what the local directory may hold",
        20 << 30,
        "MAX_BUILD_MAX_SIZE",
        '`"20 GiB"`',
    ),
    Field(
        "connect-timeout",
        seconds,
        "seconds an outer tier gets to connect",
        0.5,
        "MAX_BUILD_CONNECT_TIMEOUT",
        "`0.5`",
    ),
    Field(
        "request-timeout",
        seconds,
        "seconds it gets to answer, or to move the next bytes",
        2.0,
        "MAX_BUILD_REQUEST_TIMEOUT",
        "`2`",
    ),
    Field(
        "budget",
        seconds,
        "seconds a build waits in vain for an outer tier, all in all, before doing without",
        3.0,
        "MAX_BUILD_BUDGET",
        "`3`",
    ),
    Field(
        "lease",
        seconds,
        "seconds without a sign of life after which another machine's compile is taken for dead",
        30.0,
        "MAX_BUILD_LEASE",
        "`30`",
    ),
    Field(
        "wait",
        seconds,
        "seconds to wait for another's compile of the same key before compiling here as well",
        1800.0,
        "MAX_BUILD_WAIT",
        "`1800`",
    ),
)

TABLES: Mapping[str, tuple[Field, ...]] = {
    "tool.max-build": PROJECT,
    "tool.max-build.graphs.NAME": GRAPH,
    "tool.max-build.kernels.NAME": KERNEL,
    "tool.max-build.cache": CACHE,
}


def markdown() -> str:
    """The settings as Markdown tables, one per TOML table."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for position, (path, fields) in enumerate(TABLES.items()):
        if position:
            yield ""
        yield f"**`[{path}]`**"
        yield ""
        yield "| key | default | variable | meaning |"
        yield "|---|---|---|---|"
        for field in fields:
            default = field.shown or f"`{field.default}`"
            variable = f"`{field.env}`" if field.env else ""
            yield f"| `{field.name}` | {default} | {variable} | {field.doc} |"


if __name__ == "__main__":
    print(markdown(), end="")
