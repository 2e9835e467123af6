"""A header as a flat binary index, so that the next open need not parse it.

For a memo on one machine, in that machine's byte order. The columns stay where they are mapped,
and the names are decoded when the first is asked for.

    magic 8 | XXH3-64 of all that follows | u64 tensors, names, extra: sizes
    u64 offset[n] | u32 kind[n] | names | extra

`kind` points into a table, in `extra`, of the distinct (type, shape, bytes); `names` is a
MessagePack array of text.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from max_build.weights.dtypes import BY_NAME
from max_build.weights.gguf_values import Array, Metadata
from max_build.weights.header import Entry, Header

if TYPE_CHECKING:
    from max_build.weights.pages import File

__all__ = ["decode", "digest", "encode"]

_MAGIC = b"MBWIDX2" + sys.byteorder[:1].encode()
_HEAD = struct.Struct("=8sQQQQ")


class _Extra(msgspec.Struct, array_like=True, frozen=True):
    format: Literal["safetensors", "gguf"]
    order: Literal["<", ">"]
    size: int  # of the file
    data_start: int
    problems: tuple[str, ...]
    kinds: list[tuple[str, tuple[int, ...], int]]
    metadata: dict[str, Any]


def digest(header: bytes | bytearray, size: int) -> str:
    """Return the key of an index: SHA-256 of the header's bytes and the file's size, in hex."""
    from hashlib import sha256

    state = sha256(b"max-build weights index 1\0" + size.to_bytes(8, "little"))
    state.update(header)
    return state.hexdigest()


def encode(header: Header, file: File) -> bytes:
    """Return `header`, which is that of `file`, as a flat index."""
    import xxhash

    kinds: dict[tuple[str, tuple[int, ...], int], int] = {}
    offsets, numbers = array("Q"), array("I")
    for dtype, shape, offset, nbytes in header.entries.values():
        offsets.append(offset)
        numbers.append(kinds.setdefault((dtype.name, shape, nbytes), len(kinds)))
    names = msgspec.msgpack.encode(list(header.entries))
    metadata = header.metadata
    values = metadata.values_or_arrays if isinstance(metadata, Metadata) else dict(metadata)
    extra = msgspec.msgpack.encode(
        _Extra(
            header.format,
            header.order,
            file.size,
            header.data_start,
            header.problems,
            list(kinds),
            values,
        )
    )
    body = b"".join((offsets.tobytes(), numbers.tobytes(), names, extra))
    sizes = struct.pack("=QQQ", len(offsets), len(names), len(extra))
    return _MAGIC + xxhash.xxh3_64_intdigest(sizes + body).to_bytes(8, sys.byteorder) + sizes + body


def decode(data: bytes | memoryview, file: File) -> Header | None:
    """Return the header that `data` holds for `file`; None if it is damaged or of another file."""
    import xxhash

    view = memoryview(data)
    if len(view) < _HEAD.size:
        return None
    magic, check, count, names, extra_size = _HEAD.unpack_from(view)
    if magic != _MAGIC or len(view) != _HEAD.size + 12 * count + names + extra_size:
        return None
    if xxhash.xxh3_64_intdigest(view[16:]) != check:
        return None
    try:
        extra = msgspec.msgpack.decode(view[len(view) - extra_size :], type=_Extra)
        kinds = [(BY_NAME[name], shape, nbytes) for name, shape, nbytes in extra.kinds]
    except (msgspec.MsgspecError, KeyError, ValueError):
        return None
    if extra.size != file.size:
        return None
    entries = _Entries(view, count, names, kinds)
    metadata: Mapping[str, Any] = Header.frozen(extra.metadata)
    if extra.format == "gguf":
        # No value is a list but those that stand for an array.
        values = {k: Array(*v) if isinstance(v, list) else v for k, v in extra.metadata.items()}
        metadata = Metadata(values, file, extra.order)
    return Header(extra.format, entries, metadata, extra.data_start, extra.order, extra.problems)


class _Entries(Mapping[str, Entry]):
    def __init__(self, view: memoryview, count: int, names: int, kinds: list[Any]) -> None:
        self._count = count
        self._kinds = kinds
        ends = [_HEAD.size + count * width for width in (0, 8, 12)]
        self._offsets = view[ends[0] : ends[1]].cast("Q")
        self._numbers = view[ends[1] : ends[2]].cast("I")
        self._encoded = view[ends[2] : ends[2] + names]

    @cached_property
    def _places(self) -> dict[str, int]:
        names = msgspec.msgpack.decode(self._encoded, type=list[str])
        return dict(zip(names, range(self._count), strict=True))

    def __getitem__(self, name: str) -> Entry:
        number = self._places[name]
        dtype, shape, nbytes = self._kinds[self._numbers[number]]
        return Entry(dtype, shape, self._offsets[number], nbytes)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return self._count
