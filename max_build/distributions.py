"""Which distributions are installed, down to their files: the identity of a compiler.

A version alone is not enough: a rebuilt or nightly wheel carries the same one. The digest of a
distribution's RECORD covers every file that it installed.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata

__all__ = ["foreign", "identities", "identity", "normalise", "places"]

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
    found = _distribution(name)
    if found is None:
        return None
    rows = sorted(
        f"{row[0]},{row[1]}"
        for row in _record(found)
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


def foreign(names: tuple[str, ...], packages: tuple[str, ...]) -> str:
    """Why `identities(names)` does not tell what was imported; empty if it does.

    A checkout on PYTHONPATH comes before the wheel that is installed, whose metadata say nothing
    of it; neither do those of an editable install tell of its edits. So each module of `packages`
    that is loaded has to be the very file that one of the distributions lists.
    """
    listed = _listed(names)
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] not in packages or not file:
            continue  # a namespace, or a part of an extension module, has no file of its own
        if file == getattr(sys.modules.get(name.rpartition(".")[0]), "__file__", None):
            continue  # a part that names the file of the whole
        inside, file = _source(name, file, hasattr(module, "__path__"))
        place = str(listed[inside].locate_file(inside)) if inside in listed else ""
        if file == place or (place and os.path.realpath(file) == os.path.realpath(place)):
            continue
        if place:
            return f"`{name}` was imported from `{file}`, and is installed at `{place}`"
        return f"`{name}` was imported from `{file}`, of whose edits no installed metadata tell"
    return ""


def _source(name: str, file: str, package: bool) -> tuple[str, str]:
    """What a module was made of: its name below a directory of `sys.path`, and its whole path."""
    if ".hash-" in os.path.basename(file):  # what MAX's importer of Mojo keeps beside a source
        for end in (f"{os.sep}__init__.mojo", ".mojo"):
            inside = name.replace(".", os.sep) + end
            for place in sys.path:
                if os.path.isfile(source := os.path.join(place, inside)):
                    return inside, source
    depth = name.count(".") + 1 + package
    return "/".join(file.split(os.sep)[-depth:]), file


@functools.cache
def _listed(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Each file that the distributions list."""
    found = [one for name in names if (one := _distribution(name))]
    return {row[0]: one for one in found for row in _record(one) if row}


def places(names: tuple[str, ...], package: str) -> frozenset[str]:
    """Where the distributions that are installed have, or would have, a package."""
    found = [one for name in names if (one := _distribution(name))]
    return frozenset(str(one.locate_file(package)) for one in found)


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _record(distribution: metadata.Distribution) -> Iterator[list[str]]:
    return csv.reader((distribution.read_text("RECORD") or "").splitlines())
