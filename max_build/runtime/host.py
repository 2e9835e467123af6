"""What this machine's CPU is, and whether it runs host code compiled for a baseline."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

from max_build.key import digest

__all__ = ["missing_features", "processor"]

# x86-64 psABI, "Micro-Architecture Levels", in the names of /proc/cpuinfo; each includes the last.
_V2 = frozenset("cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3".split())
_V3 = _V2 | frozenset("abm avx avx2 bmi1 bmi2 f16c fma movbe xsave".split())
_V4 = _V3 | frozenset("avx512bw avx512cd avx512dq avx512f avx512vl".split())
_LEVELS = {"x86-64": frozenset[str](), "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}
# What tells one CPU from another, in the names of /proc/cpuinfo on x86-64 and on ARM.
_TELLS = (
    "vendor_id",
    "cpu family",
    "model",
    "flags",
    "cpu implementer",
    "cpu part",
    "features",
)


@functools.cache
def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Digest of what this machine's CPU is and can do; empty where that cannot be told."""
    rows: dict[str, str] = {}
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() in _TELLS:
            rows.setdefault(name.strip().lower(), " ".join(sorted(value.split())))
    return digest(repr(sorted(rows.items())).encode())[:16] if rows else ""


@functools.cache
def _flags(cpuinfo: Path) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.split()[2:]) for line in lines if line.startswith("flags")), frozenset()
    )


def missing_features(host: str, *, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Why this machine cannot run code for baseline `host`; empty when it can, or none is known.

    Code for a baseline that the CPU lacks ends in SIGILL in the middle of a model, so it is
    refused before it is loaded.
    """
    if host not in _LEVELS:
        return ""
    if platform.machine() != "x86_64":
        return f"its host code is for {host}, this machine is {platform.machine()}"
    found = _flags(cpuinfo)
    lacking = sorted(_LEVELS[host] - found) if found else []
    return f"its host code is for {host}, this CPU lacks {', '.join(lacking)}" if lacking else ""
