"""Which distributions are installed, down to their files: the identity of a compiler.

A version alone is not enough: a rebuilt or nightly wheel carries the same one. The digest of a
distribution's RECORD covers every file that it installed.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import re
from importlib import metadata

__all__ = ["identities", "identity", "normalise"]

# What an installer adds to RECORD, or rewrites for the environment it installs into.
_INSTALLERS = re.compile(r"\.dist-info/(?!METADATA$)[^/]+$")


def normalise(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def identity(name: str) -> str | None:
    """`version+digest` of an installed distribution, None where it is not installed.

    The digest is 16 hex digits of SHA-256 over the sorted `path,hash` lines of RECORD that the
    wheel itself brought: what differs between two environments (scripts, bytecode, the
    installer's own notes) is left out, so that two machines with one wheel agree.
    """
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    text = found.read_text("RECORD") or ""
    rows = sorted(
        f"{row[0]},{row[1]}"
        for row in csv.reader(text.splitlines())
        if len(row) > 1
        and row[1]
        and not row[0].startswith("..")
        and not _INSTALLERS.search(row[0])
    )
    if not rows:
        return f"{found.version}+unrecorded"
    hashed = hashlib.sha256("\n".join(rows).encode(), usedforsecurity=False)
    return f"{found.version}+{hashed.hexdigest()[:16]}"


def identities(names: tuple[str, ...]) -> dict[str, str]:
    """Identity of each of `names` that is installed, by normalised name."""
    return {normalise(name): found for name in names if (found := identity(name))}
