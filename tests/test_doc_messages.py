"""Every message that a page quotes is one of max-build, and many are told here for real.

A message stands in two backticks, with `…` for what is filled in.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import max_build
from doc_pages import messages, pages, plain
from max_build.config import cache_settings, load_settings
from max_build.errors import MaxBuildError

PAGES = {page.name: page for page in pages()}


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("cache/")])
def test_every_message_that_is_quoted_is_one_of_max_build(name: str) -> None:
    known = messages()
    for quoted in PAGES[name].spans(quoted=True):
        words = plain(quoted).strip("… ")
        assert len(words) > 5, quoted
        assert any(words in one for one in known), f"{name}: {quoted}"


def matches(quoted: str, told: str) -> bool:
    """Whether a message as it was told is one that a page quotes."""
    pattern = ".*".join(re.escape(part) for part in plain(quoted).strip("… ").split("…"))
    return re.search(pattern, plain(told)) is not None


def settings(text: str) -> Callable[[Path], object]:
    def provoke(folder: Path) -> object:
        (folder / "pyproject.toml").write_text(text)
        return load_settings(folder, environ={})

    return provoke


def kernel(table: str, source: str = "") -> Callable[[Path], object]:
    """What a build says of one unit, `k`."""

    def provoke(folder: Path) -> object:
        from max_build.pipeline import build
        from max_build.store import open_cache

        head = '[tool.max-build]\ntargets = ["sm_90a"]\n[tool.max-build.kernels.k]\n'
        (folder / "pyproject.toml").write_text(head + table)
        (folder / "k.cu").write_text(source)
        (folder / "k.ptx").write_text(source)
        found = load_settings(folder)
        with open_cache(found.cache) as cache:
            (outcome,) = build(found, cache).outcomes
        if outcome.error:
            raise outcome.error
        return outcome.reason

    return provoke


def cache(**variables: str) -> Callable[[Path], object]:
    """What the cache warns of, when a key is looked up."""

    def provoke(folder: Path) -> object:
        from max_build.store import open_cache

        (folder / "open").mkdir(mode=0o777)
        (folder / "open").chmod(0o777)
        values = {name: value.format(folder=folder) for name, value in variables.items()}
        with open_cache(cache_settings({"HOME": str(folder), **values})) as opened:
            opened.lookup("0" * 64)
            return "\n".join(opened.warnings)

    return provoke


def runtime(device: str, target: str) -> Callable[[Path], object]:
    """Why a machine with a GPU of that capability does not run an artifact."""

    def provoke(_: Path) -> object:
        from max_build.runtime.select import Machine, why_not
        from max_build.target import Target

        found = re.fullmatch(r"(\d+)\.(\d)", device)
        cuda = ((int(found[1]), int(found[2])),) if found else ()
        return why_not(Target(target), Machine(cuda=cuda), 0 if cuda else None)

    return provoke


def loading(package: str) -> Callable[[Path], object]:
    return lambda _: max_build.load(package)


def weights(name: str, data: bytes) -> Callable[[Path], object]:
    def provoke(folder: Path) -> object:
        (folder / name).write_bytes(data)
        return max_build.open_weights(folder / name)

    return provoke


K = 'source = "k.cu"\n'
KERNEL = '[tool.max-build]\ntargets = ["cpu"]\n[tool.max-build.kernels.k]\n'
PROVOKED: dict[str, Callable[[Path], object]] = {
    "`…` is unknown": settings("[tool.max-build]\ntarget = []"),
    "must be a boolean, …": settings("[tool.max-build]\nembed = 1"),
    "`….entry` is missing: it names the function that builds the graph": settings(
        "[tool.max-build.graphs.g]"
    ),
    "`….source` is missing: it names the kernel's file": settings("[tool.max-build.kernels.k]"),
    "`…` has both `source` and `entry`; a unit has one of them": settings(
        KERNEL + K + 'entry = "a:b"'
    ),
    "`….source` must end in `.cu`, `.cuh` or `.ptx`, got …": settings(KERNEL + 'source = "k.c"'),
    "`…` has no targets: set `targets` there or in [tool.max-build]": settings(
        "[tool.max-build.kernels.k]\n" + K
    ),
    "an unknown target": settings(KERNEL + K + 'targets = ["sm_91"]'),
    "not a target of this compiler": settings(KERNEL + K + 'targets = ["cpu"]'),
    "… cannot be compiled for `…`: set `targets` there": settings(KERNEL + K),
    "must be `local` or `dask://HOST:PORT`, got …": settings('[tool.max-build]\nexecutor = "x"'),
    "must not have `…`: …": settings(KERNEL + K + 'options = { extra = ["-I/usr/include"] }'),
    "must not use `…`, which differs in every compile": settings(
        KERNEL + K + 'options = { defines = { T = "__TIME__" } }'
    ),
    "no compiler `…`; there are …": settings(KERNEL + K + 'compiler = "nvcc"'),
    "no `pyproject.toml` in `…`": load_settings,
    "there is no file `…`": kernel('source = "other.cu"'),
    "NVRTC cannot compile `…` for `…`:": kernel(K, "nonsense"),
    "the cubin holds no kernel": kernel(K, "__device__ int x;"),
    "uses `…`": kernel(K, "__global__ void k(char* x) { *x = __TIME__[0]; }"),
    "has a computed `…`": kernel(K, "#if 0\n#include H\n#endif\n__global__ void k() {}"),
    "`…` is not PTX: it has no `…` directive": kernel('source = "k.ptx"'),
    "… cache directory `…` is left out: …": cache(MAX_BUILD_SHARED="{folder}/open"),
    "cache directory `…` is not used: …": cache(MAX_BUILD_CACHE_DIR="{folder}/open"),
    "must start with one of …": cache(MAX_BUILD_REMOTE="ftp://host"),
    "names no host or bucket, got …": cache(MAX_BUILD_REMOTE="s3:///x"),
    "must have three slashes, an absolute path, …": cache(MAX_BUILD_REMOTE="file://srv"),
    "has a host or port that cannot be read": cache(MAX_BUILD_REMOTE="http://host:port"),
    "it runs on … alone, and the device is …": runtime("10.0", "sm_90a"),
    "it runs on the family of …, and the device is …": runtime("12.0", "sm_100f"),
    "it runs on ….x devices, and the device is …": runtime("9.0", "sm_80"),
    "it needs … or later, and the device is …": runtime("8.0", "sm_86"),
    "it needs a GPU, and this machine has none": runtime("", "sm_80"),
    "package `…` is not installed": loading("nobody_has_this"),
    "manifest `…` cannot be read: …": loading("/nowhere/manifest.json"),
    "`…` declares a header of … bytes, but …": weights("a.safetensors", b"\xff" + bytes(8)),
    "`…` is …: opening it could run code": weights("a.bin", b"PK\3\4" + bytes(64)),
}


@pytest.mark.parametrize("quoted", PROVOKED)
def test_messages_are_told_where_the_page_says(quoted: str, tmp_path: Path) -> None:
    if quoted.startswith(("NVRTC", "the cubin", "uses", "has a computed", "`…` is not PTX")):
        pytest.importorskip("cuda.core", reason="`cuda.core` is not installed")
    try:
        told = str(PROVOKED[quoted](tmp_path))
    except MaxBuildError as error:
        told = error.message
    assert matches(quoted, told), told


def test_what_is_provoked_is_what_the_pages_quote() -> None:
    quoted = {
        plain(one)
        for name in ("keys", "errors")
        for one in PAGES[f"cache/{name}.md"].spans(quoted=True)
    }
    assert {plain(one) for one in PROVOKED} <= quoted
