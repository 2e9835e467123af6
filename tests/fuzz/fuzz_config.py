"""Settings and target strings: whatever a `pyproject.toml` or a variable says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
from forms import JSON, TOML
from harness import Target, scratch

from max_build import target
from max_build.config import Settings, cache_settings, load_settings
from max_build.errors import ConfigError, TargetError
from max_build.store import open_cache
from max_build.store.settings import CacheSettings, without_secrets

__all__ = ["TARGETS"]

_PROJECT = """
[project]
name = "Toy_Repo"

[tool.max-build]
targets = ["cpu", "sm_90a"]
host = "x86-64-v3"
toolchain = { max = "26.7.0" }

[tool.max-build.graphs.encoder]
entry = "toy.graph:build"
weights = ["model.safetensors"]
rename = { "model." = "", "^h\\\\.(\\\\d+)" = "layer.\\\\1" }
cast = { "*.weight" = "float32" }
options = { tile-based-fusion = true, defines = { N = 4 } }

[tool.max-build.kernels.saxpy]
source = "kernels/saxpy.cu"
targets = ["sm_80", "sm_100f"]
names = ["saxpy", "axpby<float>"]
include-dirs = ["include"]
keep-ptx = true
options = { std = "c++20", defines = { N = 4, M = "x" }, extra = ["-w"], maxrregcount = 64 }

[tool.max-build.kernels.add]
entry = "toy.kernels:add"
targets = ["sm_90a"]
signature = { x = "*fp32:16", n = "i32" }
constexprs = { BLOCK = 128 }
specialisations = { wide = { constexprs = { BLOCK = 256 }, num-warps = 8 } }

[tool.max-build.kernels.old]
source = "kernels/old.ptx"
targets = ["sm_90"]

[tool.max-build.cache]
dir = ".cache"
remote = "https://ci:secret@cache.team/max-build"
remote-trust = "warn"
public-keys = ["ci:MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqo="]
max-size = "20 GiB"
budget = 3
"""
_USER = """
jobs = 2
[cache]
shared = "/nowhere"
remote = "s3://team/x"
max-size = 1000
connect-timeout = 0.25
"""
_VARIABLES = {
    "MAX_BUILD_TARGETS": "cpu, sm_90a",
    "MAX_BUILD_JOBS": "3",
    "MAX_BUILD_EMBED": "no",
    "MAX_BUILD_COMPILE_TIMEOUT": "60.5",
    "MAX_BUILD_REMOTE": "http://user@host:8080/p",
    "MAX_BUILD_REMOTE_MODE": "read",
    "MAX_BUILD_MAX_SIZE": "2 GiB",
    "MAX_BUILD_BUDGET": "1e1",
    "XDG_CACHE_HOME": "/nowhere",
}


def _project(data: bytes) -> Path:
    root = scratch("config") / "project"
    root.mkdir(exist_ok=True)
    (root / "pyproject.toml").write_bytes(data)
    return root


def _consistent(settings: Settings) -> None:
    """What is accepted can be told to a worker, names known targets, and opens a cache."""
    told = msgspec.json.encode(settings)
    assert msgspec.json.encode(msgspec.json.decode(told, type=Settings)) == told
    for unit in settings.units:
        assert unit.targets
        assert all(str(target.parse(one)) == one for one in unit.targets)
        assert settings.unit(unit.name) is unit
    _opens(settings.cache)


def _opens(found: CacheSettings) -> None:
    """Its tiers can be opened, or why not is told; nothing is written to where it points."""
    without_secrets(found.remote)
    own = str(scratch("config") / "cache")
    kept = msgspec.structs.replace(found, dir=own, shared="", remote_mode="read")
    if not kept.remote.startswith("file:"):
        open_cache(kept).close()


def _config(data: bytes) -> bool:
    root = _project(data)
    try:
        settings = load_settings(root, environ={})
        _consistent(settings)
    except ConfigError as error:
        assert str(error).strip()
        return False
    assert msgspec.json.encode(load_settings(root, environ={})) == msgspec.json.encode(settings)
    return True


def _user_file(data: bytes) -> bool:
    folder = scratch("config") / "max-build"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_bytes(data)
    try:
        _opens(cache_settings({"XDG_CONFIG_HOME": str(folder.parent)}))
    except ConfigError:
        return False
    return True


def _environment(data: bytes) -> bool:
    try:
        found = json.loads(data)
        environ = {
            os.fsdecode(os.fsencode(k)): os.fsdecode(os.fsencode(v)) for k, v in found.items()
        }
    except (AttributeError, RecursionError, TypeError, ValueError):
        return False
    if any("\0" in text for pair in environ.items() for text in pair):
        return False  # no process has such a one
    try:
        _consistent(load_settings(_project(_PROJECT.encode()), environ=environ))
    except ConfigError:
        return False
    return True


def _target(data: bytes) -> bool:
    text = data.decode("utf-8", "surrogateescape")
    if text == "native":  # asks the devices
        return True
    try:
        found = target.parse(text)
    except TargetError as error:
        assert error.hint or "it accepts cpu, sm_50" in error.message
        return False
    assert str(found) == text
    assert found in target.KNOWN_TARGETS
    if found.api == "cuda":
        major, minor = found.capability
        assert f"sm_{major}{minor}{found.suffix}" == text
    else:
        assert found.is_cpu or text.startswith("gfx")
    return True


TARGETS = (
    Target(
        "config",
        _config,
        lambda: {
            "good-project": _PROJECT.encode(),
            "bad-depth": b"[tool.max-build]\ntargets = " + b"[" * 2000 + b"]" * 2000,
            "bad-number": b"[tool.max-build]\njobs = " + b"9" * 5000,
            "bad-size": b'[tool.max-build.cache]\nmax-size = "' + b"9" * 400 + b'"',
            "bad-home": b'[tool.max-build.cache]\nshared = "~no-such-user/x"',
            "bad-null": b'[tool.max-build]\npython-path = "\\u0000"',
            "bad-url": b'[tool.max-build.cache]\nremote = "http://[x"',
        },
        (TOML,),
        (b"[tool.max-build.", b"]\n", b'"', b"'", b"'''", b"= ", b"{", b"}", b"1979-05-27", b"inf"),
        weight=6,
    ),
    Target("user-file", _user_file, lambda: {"good-user": _USER.encode()}, (TOML,), weight=4),
    Target(
        "environment",
        _environment,
        lambda: {
            "good-variables": json.dumps(_VARIABLES).encode(),
            "bad-infinite": b'{"MAX_BUILD_BUDGET": "inf", "MAX_BUILD_JOBS": "\xef\xbc\x91"}',
        },
        (JSON,),
        weight=6,
    ),
    Target(
        "target",
        _target,
        lambda: {
            **{f"good-{name}": name.encode() for name in ("cpu", "sm_90a", "sm_100f", "gfx90a")},
            "bad-digits": "sm_٩٠".encode(),
            "bad-line": b"sm_90a\n",
        },
        tokens=(b"sm_", b"gfx", b"a", b"f", b"90", b"\n"),
    ),
)
