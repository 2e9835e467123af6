"""Entries and their blobs as one file, to carry to where no tier reaches.

A tar file, zstd-compressed, with the names of a directory: `cas/<2>/<sha256>` (raw bytes) before
`ac/<2>/<key>` (entries as they are, signatures included). Nothing in it depends on time or place.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from shutil import copyfileobj
from typing import IO, Self

import msgspec

from max_build.atomic import replacing
from max_build.errors import StoreError
from max_build.record import Blob, decode
from max_build.store.base import CHUNK, ENTRY_LIMIT
from max_build.store.cache import Cache
from max_build.store.compress import open_packed
from max_build.store.entry import holds_recipes, unseal

__all__ = ["Carried", "pack", "unpack"]

_LONGEST_HEADER = 1 << 16
_MEMBER = re.compile(r"(ac|cas)/([0-9a-f]{2})/(\2[0-9a-f]{62})\Z")


class Carried(msgspec.Struct, frozen=True):
    """What a bundle holds, or what of it was taken; and why the rest was not."""

    entries: int
    blobs: int
    refused: tuple[str, ...] = ()


def pack(cache: Cache, keys: Iterable[str], path: Path) -> Carried:
    """Write the entries under `keys`, which the local tier has, into a new file.

    Raises
    ------
    StoreError
        If the file cannot be written, or the local tier lacks something.
    """
    entries: dict[str, bytes] = {}
    blobs: dict[str, Blob] = {}
    for key in sorted(set(keys)):
        data = cache.local.get_entry(key)
        if data is None:
            message = f"key {key[:12]} is not in the local cache"
            raise StoreError(message, kind="missing")
        payload = unseal(data).payload
        entries[key] = data
        if not holds_recipes(payload):
            blobs.update((blob.digest, blob) for blob in decode(payload, key).blobs)
    try:
        with (
            replacing(path) as packed,
            open_packed(packed, "wb") as out,
            tarfile.open(fileobj=out, mode="w|") as tar,
        ):
            for digest, blob in sorted(blobs.items()):
                with cache.path(blob).open("rb") as file:
                    _add(tar, f"cas/{digest[:2]}/{digest}", blob.size, file)
            for key, data in entries.items():
                _add(tar, f"ac/{key[:2]}/{key}", len(data), io.BytesIO(data))
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        message = f"bundle `{path}` cannot be written: {error.strerror or error}"
        raise StoreError(message) from error
    return Carried(len(entries), len(blobs))


def unpack(cache: Cache, path: Path) -> Carried:
    """Take what a bundle holds into the local tier.

    Every blob is checked against its name and every entry against its key; signatures count as
    they do for the remote.

    Raises
    ------
    StoreError
        If the file cannot be read as a bundle.
    """
    refused: list[str] = []
    taken = blobs = 0
    try:
        with (
            open_packed(path, "rb") as file,
            tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as tar,
        ):
            for member in tar:
                match = _MEMBER.match(member.name)
                plain = member.isreg() and not member.issparse()  # holes cost nothing to pack
                content = tar.extractfile(member) if match and plain else None
                if match is None or content is None:
                    refused.append(f"{member.name[:80]!r} is no name of a bundle")
                elif match[1] == "ac":
                    problem = cache.adopt(match[3], content.read(ENTRY_LIMIT))
                    taken += not problem
                    refused += [problem] if problem else []
                else:
                    blob = Blob(role="mef", digest=match[3], size=member.size)
                    try:
                        blobs += cache.local.keep(blob, partial(copyfileobj, content, length=CHUNK))
                    except StoreError as error:
                        refused.append(error.message)
    except (OSError, EOFError, ValueError, tarfile.TarError) as error:  # tarfile raises them all
        if isinstance(error, StoreError):
            raise
        message = f"bundle `{path}` cannot be read: {error}"
        raise StoreError(message, kind="corrupt") from error
    return Carried(taken, blobs, tuple(refused))


class _Member(tarfile.TarInfo):
    """A member whose header stays small, where tarfile would read any length of it into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if not member.isreg() and member.size > _LONGEST_HEADER:
            message = f"header of {member.size} bytes"
            raise tarfile.ReadError(message)
        return member


def _add(tar: tarfile.TarFile, name: str, size: int, file: IO[bytes]) -> None:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o444
    tar.addfile(info, file)
