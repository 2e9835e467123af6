"""Which environment variables reach NVRTC: none that are documented, but some that are there.

Found by watching what NVRTC 12.9 to 13.3 asks the environment for, and trying each.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["relevant"]

_READ = "NV_NVVM_VERSION"
# With the first set, the second adds options, among them include directories.
_UNLOCKS, _ADDS = "NVRTCWIZ", "NVRTC_APPEND_FLAGS"


def relevant(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The variables that are part of the key, and why the unit cannot be keyed, or nothing."""
    version = environ.get(_READ)
    found = {_READ: version} if version else {}
    if environ.get(_UNLOCKS) and environ.get(_ADDS):
        return found, f"`{_ADDS}` is set, and what it brings in cannot be keyed"
    return found, ""
