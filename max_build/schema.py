"""The keys of [tool.max-build] and its tables: name, type, default, variable and meaning, as data.

`max_build.config` decodes by this table and the README's table is printed from it
(`python -m max_build.schema`), so neither can say what the other does not. Variables that no key
stands for, `MAX_BUILD_STALE` and the like, are read where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from max_build.fields import (
    Field,
    choice,
    count,
    entry,
    executor,
    flag,
    number,
    path,
    public_keys,
    remote,
    seconds,
    size,
    strings,
    table,
    text,
    texts,
    truth,
    words,
)

__all__ = ["CACHE", "GRAPH", "KERNEL", "PROJECT", "TABLES", "markdown"]

PROJECT: tuple[Field, ...] = (
    Field(
        "targets",
        texts,
        "what every unit is compiled for: `cpu`, `sm_90a`, `gfx942`, … or `native`; the variable "
        "is in place of units' own, too, as `-t`: a unit that takes none of them is left out",
        (),
        "MAX_BUILD_TARGETS",
        parse=words,
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
        parse=truth,
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
        parse=number,
    ),
    Field(
        "executor",
        executor,
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
        parse=number,
    ),
    Field(
        "require-hit",
        flag,
        "a miss is an error and nothing compiles",
        False,
        "MAX_BUILD_REQUIRE_HIT",
        parse=truth,
    ),
    Field(
        "disable",
        flag,
        "builds do nothing, the hook's and `max-build build`: no artifact, no manifest",
        False,
        "MAX_BUILD_DISABLE",
        parse=truth,
    ),
    Field(
        "toolchain",
        strings,
        "versions of distributions that a machine without them takes as given, for hits",
        {},
    ),
    Field("graphs", table, "graphs by name: tables as below", {}),
    Field("kernels", table, "kernel modules by name: tables as below", {}),
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
    ),
    Field("targets", texts, "in place of the project's `targets`", (), shown="the project's"),
    Field("host", text, "in place of the project's `host`", "", shown="the project's"),
    Field(
        "rename",
        strings,
        'prefix of a name in the file → prefix in the graph, `{ "model." = "" }`; a key that '
        "starts with `^` is a regular expression",
        {},
    ),
    Field(
        "tied",
        strings,
        "weight of the graph → the weight whose tensor it shares where the file has none",
        {},
    ),
    Field(
        "transpose",
        texts,
        "patterns (`*`, `?`) of weights whose last two dimensions the file swaps",
        (),
    ),
    Field(
        "cast",
        strings,
        "pattern of weights → type they are converted to on load, from quantised types too",
        {},
    ),
    Field(
        "quantised",
        strings,
        "pattern of weights the graph takes as bytes → type of their blocks, "
        '`{ "*.ffn_up.weight" = "q4_k" }`; a file of another type is refused',
        {},
    ),
    Field("options", table, "options of the compiler: `tile-based-fusion`, `defines`", {}),
    Field("compiler", text, "adapter of the group `max_build.compilers`", "max"),
)

KERNEL: tuple[Field, ...] = (
    Field(
        "source", text, "`.cu`, `.cuh` or `.ptx` file, from the project root", "", shown="needed"
    ),
    Field("entry", entry, "`package.module:kernel` of a Triton kernel, in place of `source`", ""),
    Field("targets", texts, "in place of the project's `targets`", (), shown="the project's"),
    Field(
        "names",
        texts,
        "kernels by their source-level names, templates included",
        (),
        shown="every one in the cubin, by its symbol",
    ),
    Field("include-dirs", texts, "header directories, from the project root, in order", ()),
    Field("keep-ptx", flag, "ship the PTX too, for devices newer than every cubin", False),
    Field("options", table, "options of the compiler", {}),
    Field(
        "signature",
        strings,
        'Triton: argument → type, `{ x = "*fp32:16", n = "i32" }`; `:16` promises a multiple of 16',
        {},
    ),
    Field("constexprs", table, "Triton: argument → compile-time value", {}),
    Field("num-warps", count, "Triton: warps of a block", 4),
    Field("num-stages", count, "Triton: stages of software pipelining", 3),
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
    Field("shared", path, "the team's directory", "", "MAX_BUILD_SHARED"),
    Field(
        "shared-mode",
        choice("read", "read-write"),
        "whether this machine writes to it",
        "read-write",
        "MAX_BUILD_SHARED_MODE",
    ),
    Field(
        "remote",
        remote,
        "`s3://`, `gs://`, `az://`, `https://`, `http://` or `file://` URL",
        "",
        "MAX_BUILD_REMOTE",
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
    ),
    Field("remote-key", path, "file of its key", "", "MAX_BUILD_REMOTE_KEY"),
    Field(
        "shared-trust",
        choice("require", "warn", "off"),
        "what an unsigned record of the team's directory is: a miss, a warning, nothing",
        "off",
    ),
    Field("remote-trust", choice("require", "warn", "off"), "the same for the remote", "off"),
    Field("public-keys", public_keys, "Ed25519 keys whose signatures count", ()),
    Field(
        "signing-key",
        path,
        "file of the private key that signs what is published",
        "",
        "MAX_BUILD_SIGNING_KEY",
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
        parse=number,
    ),
    Field(
        "request-timeout",
        seconds,
        "seconds it gets to answer, or to move the next bytes",
        2.0,
        "MAX_BUILD_REQUEST_TIMEOUT",
        parse=number,
    ),
    Field(
        "budget",
        seconds,
        "seconds a build waits in vain for an outer tier, all in all, before doing without",
        3.0,
        "MAX_BUILD_BUDGET",
        parse=number,
    ),
    Field(
        "lease",
        seconds,
        "seconds without a sign of life after which another machine's compile is taken for dead",
        30.0,
        "MAX_BUILD_LEASE",
        parse=number,
    ),
    Field(
        "wait",
        seconds,
        "seconds to wait for another's compile of the same key before compiling here as well",
        1800.0,
        "MAX_BUILD_WAIT",
        parse=number,
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
    for position, (name, fields) in enumerate(TABLES.items()):
        if position:
            yield ""
        yield f"**`[{name}]`**"
        yield ""
        yield "| key | default | variable | meaning |"
        yield "|---|---|---|---|"
        for field in fields:
            default = field.shown or _default(field.default)
            variable = f"`{field.env}`" if field.env else ""
            yield f"| `{field.name}` | {default} | {variable} | {field.doc} |"


def _default(value: Any) -> str:
    """A default as TOML has it; one that is empty is none."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in ("", (), {}):
        return "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    print(markdown(), end="")
