"""Names in a cache directory that do not last: what makes them, and how gc knows them for ours."""

from __future__ import annotations

import os
import re

__all__ = ["FARM", "LEFTOVERS", "aside", "new_folder", "temporary"]

FARM = "farm-"
"""What `tempfile` puts before the names of a farm's folders below `tmp/`."""

_DAY = 86400.0
_KEY = "[0-9a-f]{64}"

LEFTOVERS = {
    ".": (re.compile(r"new-[0-9a-f]{16}"), _DAY),
    "tmp": (re.compile(rf"[0-9a-f]{{16}}|{FARM}[a-z0-9_]{{8}}"), _DAY),
    "lock": (re.compile(_KEY), _DAY),
    "lease": (re.compile(_KEY), _DAY),
    "quarantine": (re.compile(r"(ac|cas|lease)-[0-9a-f]{16}-[0-9a-f]{8}"), 7 * _DAY),
}
"""Folder → the names below it that the store makes, and seconds after which nobody comes back."""


def temporary() -> str:
    """A name below `tmp/`."""
    return os.urandom(8).hex()


def new_folder() -> str:
    """A name beside the folders, for one that is being made."""
    return f"new-{os.urandom(8).hex()}"


def aside(kind: str, name: str) -> str:
    """A name below `quarantine/` for what stood under `name`."""
    return f"{kind}-{name[:16]}-{os.urandom(4).hex()}"
