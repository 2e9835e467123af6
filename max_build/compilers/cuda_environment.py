"""Which environment variables reach NVRTC: none that are documented, but some that are there.

Found by watching what NVRTC 12.9 to 13.3 asks the environment for, and trying each.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["relevant"]

_READ = ("NV_NVVM_VERSION",)
# Together they add options, among them include directories.
_ADDED = ("NVRTCWIZ", "NVRTC_APPEND_FLAGS")


def relevant(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The variables that are part of the key, and why the unit cannot be keyed, or nothing."""
    found = {name: value for name in _READ if (value := environ.get(name))}
    if all(environ.get(name) for name in _ADDED):
        return found, f"`{_ADDED[1]}` is set, and what it brings in cannot be keyed"
    return found, ""
