"""Headers seen before, as flat indexes in a folder: the next open maps one and parses nothing.

An index lies under the digest of its header, and once more (a hard link) under the file's
stamp, so that an unchanged file is not even hashed. Everything here may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from typing import TYPE_CHECKING

from max_build.atomic import replacing
from max_build.stamp import settled, stamp_of
from max_build.weights import index
from max_build.weights.pages import identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from max_build.weights.header import Header
    from max_build.weights.pages import File

__all__ = ["Remembered", "default_folder"]

#: Shorter headers are parsed sooner than an index is found.
_WORTH = 64 << 10
#: Files kept, two for each header; those used longest ago go first.
_MOST = 128


def default_folder(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder for indexes in the local cache's directory; None if there is none.

    The directory is the one of `MAX_BUILD_CACHE_DIR`, else of XDG and HOME, and only if it is
    already there and nobody else may write to it. No settings file is read for it: that would
    take longer than an index saves.
    """
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", ""), ".cache")
    root = environ.get("MAX_BUILD_CACHE_DIR") or os.path.join(base, "max-build")
    try:
        status = os.stat(root)
    except OSError:
        return None
    own = os.path.isabs(root) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return os.path.join(root, "weights") if own else None


class Remembered:
    """A folder of indexes; absent or broken, it remembers nothing. No method raises for it.

    Parameters
    ----------
    folder
        Where; made when something is first put there.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def by_stamp(self, file: File) -> Header | None:
        """Return the header of a file that has not changed since it was remembered."""
        name = _stamp(file)
        return self._load(name, file) if name else None

    def by_header(self, file: File, header: bytes | bytearray) -> Header | None:
        """Return the header of a file that begins as one that was remembered."""
        if len(header) < _WORTH:
            return None
        digest = index.digest(header, file.size)
        found = self._load(digest, file)
        if found is not None and (name := _stamp(file)):
            self._link(digest, name)
        return found

    def put(self, file: File, header: Header) -> None:
        """Remember `header`, which was read from `file`."""
        if header.data_start < _WORTH:
            return
        # What precedes the JSON text is its length, which the text's own length says again.
        start = 8 if header.format == "safetensors" else 0
        raw = file.read(start, min(header.data_start, file.size) - start)
        digest = index.digest(raw, file.size)
        if not (name := _stamp(file)):
            return
        with contextlib.suppress(OSError):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            with replacing(os.path.join(self._folder, digest), 0o600) as stream:
                stream.write(index.encode(header, file))
            self._link(digest, name)
            self._prune()

    def _load(self, name: str, file: File) -> Header | None:
        try:
            with open(os.path.join(self._folder, name), "rb") as stream:
                data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                with contextlib.suppress(OSError):
                    os.utime(stream.fileno())
        except (OSError, ValueError):
            return None
        return index.decode(memoryview(data), file)

    def _link(self, digest: str, name: str) -> None:
        with contextlib.suppress(OSError):
            target = os.path.join(self._folder, name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)
            os.link(os.path.join(self._folder, digest), target)

    def _prune(self) -> None:
        with os.scandir(self._folder) as found:
            files = sorted(found, key=lambda entry: entry.stat().st_mtime)
        for entry in files[: max(0, len(files) - _MOST)]:
            os.unlink(entry.path)


def _stamp(file: File) -> str:
    """Return a name for the file as it was since it was opened.

    Nothing if it has changed meanwhile, or may change without its stamp showing it.
    """
    status = os.fstat(file.descriptor)
    if identity(status) != file.identity:
        return ""
    if not settled(status, file.opened):
        return ""
    text = repr(("max-build weights stamp 2", *stamp_of(status)))
    return hashlib.sha256(text.encode()).hexdigest()
