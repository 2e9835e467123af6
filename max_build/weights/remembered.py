"""Headers seen before, as flat indexes in a folder: the next open maps one and parses nothing.

An index lies under the digest of its header, and once more (a hard link) under the file's
stamp, so that an unchanged file is not even hashed. Everything here may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import tempfile
import time
from typing import TYPE_CHECKING

from max_build.weights import index

if TYPE_CHECKING:
    from max_build.weights.header import Header
    from max_build.weights.pages import File

__all__ = ["Remembered"]

#: A file changed in the last seconds may change again without its stamp showing it.
_RACY = 2.0
#: Shorter headers are parsed sooner than an index is found.
_WORTH = 64 << 10


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
        if header.data_start < _WORTH or not (name := _stamp(file)):
            return
        # What precedes the JSON text is its length, which the text's own length says again.
        start = 8 if header.format == "safetensors" else 0
        raw = file.read(start, min(header.data_start, file.size) - start)
        digest = index.digest(raw, file.size)
        with contextlib.suppress(OSError):
            os.makedirs(self._folder, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(index.encode(header, file))
                os.replace(temporary, os.path.join(self._folder, digest))
            except BaseException:
                os.unlink(temporary)
                raise
            self._link(digest, name)

    def _load(self, name: str, file: File) -> Header | None:
        try:
            with open(os.path.join(self._folder, name), "rb") as stream:
                data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None
        return index.decode(memoryview(data), file)

    def _link(self, digest: str, name: str) -> None:
        with contextlib.suppress(OSError):
            target = os.path.join(self._folder, name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)
            os.link(os.path.join(self._folder, digest), target)


def _stamp(file: File) -> str:
    """Return a name for the file as it is now; nothing if a change may yet go unseen."""
    status = os.fstat(file.descriptor)
    if time.time() - max(status.st_mtime, status.st_ctime) <= _RACY:
        return ""
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return hashlib.sha256(repr(("max-build weights stamp 1", *stamp)).encode()).hexdigest()
