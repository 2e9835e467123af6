"""Locks: a manifest as the list of what to move, from a file of its own or from a wheel."""

from __future__ import annotations

import argparse
import dataclasses
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from max_build import manifest as manifests
from max_build.atomic import replacing
from max_build.errors import LoadError, StoreError
from max_build.key import key_of
from max_build.manifest import Manifest
from max_build.record import Record

if TYPE_CHECKING:
    from max_build.config import Settings
    from max_build.outcomes import Build

__all__ = ["locked", "read", "write"]

_LIMIT = 64 << 20  # bytes of a manifest inside a wheel
_DAMAGED = (RuntimeError, EOFError, ValueError, zipfile.BadZipFile, zlib.error)
_HINT = "`max-build build --lock FILE` writes one, and wheels built with max-build have one"
_IN_WHEEL = (f"/{manifests.FOLDER}/{manifests.NAME}", f"/{manifests.METADATA_NAME}")


def write(path: Path, settings: Settings, result: Build) -> list[str]:
    """Write the lock of a build without failures: the same bytes for the same artifacts.

    Returns
    -------
    list[str]
        What the lock leaves out since no tier keeps it, a line each.

    Raises
    ------
    StoreError
        If the file cannot be written.
    """
    from max_build.packaging import manifest_of

    kept = tuple(one for one in result.outcomes if one.state != "uncached")
    package = settings.package or settings.project
    manifest = manifest_of(settings, dataclasses.replace(result, outcomes=kept), package)
    manifest = msgspec.structs.replace(manifest, embedded=False)
    text = msgspec.json.format(manifests.encode(manifest), indent=2) + b"\n"
    try:
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        message = f"lock `{path}` cannot be written: {error.strerror}"
        raise StoreError(message, hint="name another file with `--lock`") from error
    left = (one for one in result.outcomes if one.state == "uncached")
    return [f"`{one.unit.name}` × `{one.target}` is not in the lock: {one.reason}" for one in left]


def locked(path: Path, options: argparse.Namespace) -> dict[str, Record]:
    """Key → record of what a lock names, narrowed by the units, targets and keys of `options`.

    Raises
    ------
    StoreError
        If the file is no lock, or nothing in it fits.
    """
    rows = list(_rows(read(path)))
    found = {
        record.key: record
        for name, target, record in rows
        if (not options.units or name in options.units)
        and (not options.targets or target in options.targets)
        and (not options.keys or record.key.startswith(tuple(options.keys)))
    }
    if not found:
        message = f"lock `{path}` names nothing that fits"
        has = ", ".join(sorted(f"`{name}` × `{target}`" for name, target, _ in rows))
        raise StoreError(message, kind="missing", hint=f"it has {has or 'no units'}")
    return found


def read(path: Path) -> Manifest:
    """The manifest in a file: its own, or a wheel's.

    Raises
    ------
    StoreError
        If there is none, or it is damaged; it names the file.
    """
    try:
        data = _from_wheel(path) if zipfile.is_zipfile(path) else path.read_bytes()
        manifest = manifests.decode(data, str(path))
    except LoadError as error:
        raise StoreError(error.message, kind="corrupt", hint=_HINT) from error
    except (OSError, *_DAMAGED) as error:  # zipfile lets all of them out
        if isinstance(error, StoreError):
            raise
        why = getattr(error, "strerror", None) or error
        message = f"lock `{path}` cannot be read: {why}"
        raise StoreError(message, kind="missing", hint=_HINT) from error
    for name, target, record in _rows(manifest):
        if record.key != key_of(record.components):
            message = f"`{path}` is damaged: the key of `{name}` × `{target}` is not its own"
            raise StoreError(message, kind="corrupt", hint=_HINT)
    return manifest


def _from_wheel(path: Path) -> bytes:
    with zipfile.ZipFile(path) as wheel:
        for info in wheel.infolist():
            if info.filename.endswith(_IN_WHEEL):
                with wheel.open(info) as file:
                    return file.read(_LIMIT)
    message = f"wheel `{path}` carries no manifest: it was built without max-build"
    raise StoreError(message, kind="missing", hint=_HINT)


def _rows(manifest: Manifest) -> Iterator[tuple[str, str, Record]]:
    for name, unit in manifest.units.items():
        for target, record in unit.targets.items():
            yield name, target, record
