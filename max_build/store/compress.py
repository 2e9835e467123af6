"""Zstandard, as blobs rest and travel outside the local tier.

The standard library has it from Python 3.14 on; `backports.zstd` is that very module for the
versions before, so the one that is there is used and nothing changes when the backport goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from max_build.errors import StoreError
from max_build.store.base import CHUNK, Output, Sink

__all__ = ["Inflater", "deflate", "deflated", "open_packed"]

# MAX artifacts shrink tenfold at level 3; higher ones cost more time than they save bytes.
_LEVEL = 3


def deflate(source: BinaryIO, target: Output) -> None:
    """Write `source` to `target` as one zstd frame, a chunk at a time."""
    zstd = _zstd()
    packer = zstd.ZstdCompressor(level=_LEVEL)
    while chunk := source.read(CHUNK):
        target.write(packer.compress(chunk))
    target.write(packer.flush())


def deflated(source: BinaryIO, part: int) -> Iterator[bytes]:
    """The zstd frame of `source` in pieces of at least `part` bytes, but for the last."""
    zstd = _zstd()
    packer = zstd.ZstdCompressor(level=_LEVEL)
    held = bytearray()
    while chunk := source.read(CHUNK):
        held += packer.compress(chunk)
        if len(held) >= part:
            yield bytes(held)
            held.clear()
    held += packer.flush()
    yield bytes(held)


class Inflater:
    """Unpacks one zstd frame into a sink as it arrives, never more than a chunk ahead of it."""

    def __init__(self, sink: Sink) -> None:
        zstd = _zstd()
        self._error = zstd.ZstdError
        self._frame = zstd.ZstdDecompressor()
        self._sink = sink

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the frame.

        Raises
        ------
        StoreError
            `corrupt`, if they are not zstd, or follow its end.
        """
        try:
            while True:
                if self._frame.eof:
                    if data:
                        message = "blob goes on after the end of its zstd frame"
                        raise StoreError(message, kind="corrupt")
                    return
                raw = self._frame.decompress(data, CHUNK)
                if raw:
                    self._sink.write(raw)
                data = self._frame.unused_data if self._frame.eof else b""
                if not raw and not self._frame.eof:
                    return
        except self._error as error:
            message = f"blob is not zstd: {error}"
            raise StoreError(message, kind="corrupt") from error

    def finish(self) -> None:
        """Check that the frame is complete.

        Raises
        ------
        StoreError
            `corrupt`, if it was cut.
        """
        if not self._frame.eof:
            message = "blob ends before its zstd frame does"
            raise StoreError(message, kind="corrupt")


@contextlib.contextmanager
def open_packed(file: Path | BinaryIO, mode: Literal["rb", "wb"]) -> Iterator[BinaryIO]:
    """Open a zstd-compressed file, given by its path or open already, and then left so.

    Raises
    ------
    StoreError
        `corrupt`, as soon as something is read that is not zstd.
    """
    zstd = _zstd()
    try:
        with zstd.open(file, mode) as content:
            yield content
    except zstd.ZstdError as error:
        message = f"`{getattr(file, 'name', file)}` cannot be read as zstd: {error}"
        raise StoreError(message, kind="corrupt") from error


def _zstd() -> Any:  # a module, under either name
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        from backports import zstd  # type: ignore[no-redef, unused-ignore]
    return zstd
