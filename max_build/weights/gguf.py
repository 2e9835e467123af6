"""Read and validate GGUF headers: version 2 and 3, both byte orders, vocabularies unparsed.

Follows ggml's `docs/gguf.md` and what llama.cpp enforces beyond it: at most four dimensions,
unique names, whole blocks, and tensors laid end to end, each padded to the alignment.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from max_build.errors import WeightsError
from max_build.weights.dtypes import GGML
from max_build.weights.gguf_values import (
    ARRAY,
    BEYOND,
    READ_U32,
    READ_U64,
    SCALARS,
    STRING,
    TYPE_NAMES,
    U32,
    U64,
    Array,
    Cursor,
    Metadata,
)
from max_build.weights.header import Entry, Header

if TYPE_CHECKING:
    from max_build.weights.dtypes import DType
    from max_build.weights.pages import File

__all__ = ["MAGIC", "read"]

MAGIC = b"GGUF"
_ALIGNMENT = "general.alignment"
_MAX_KEY = 65535
_MAX_NAME = 64
_MAX_DIMS = 4


def read(file: File) -> Header:
    """Return what the header of `file` says.

    Raises
    ------
    WeightsError
        If any rule of the format is broken, or the version is not 2 or 3.
    """
    # The cyclic collector would walk the growing heap again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _read(file)
    finally:
        if collecting:
            gc.enable()


def _read(file: File) -> Header:
    start = file.read(0, min(file.size, 8))
    if start[:4] != MAGIC or len(start) < 8:
        message = f"`{file.path}` starts with {start!r}, not with {MAGIC!r} and a version"
        raise WeightsError(message, hint="the file is damaged or not GGUF")
    # No version needs its upper half yet, so one whose lower half is empty is swapped.
    order: Literal["<", ">"] = "<" if start[4] or start[5] else ">"
    cursor = Cursor(file, order, 4, file.size)
    version = cursor.scalar(U32, "the version")
    if version not in (2, 3):
        message = f"`{file.path}` is GGUF version {version}; 2 and 3 are supported"
        hint = "convert it with llama.cpp's `gguf-py`" if version == 1 else ""
        raise WeightsError(message, hint=hint)
    tensors, pairs = cursor.scalars(U64, 2, "the counts")
    # The shortest tensor takes 24 bytes (no name, no dimension), the shortest pair 13.
    if tensors * 24 + pairs * 13 > file.size:
        what = f"declares {tensors} tensors and {pairs} metadata pairs in {file.size} bytes"
        message = f"`{file.path}` {what}"
        raise WeightsError(message, hint="the file is damaged")
    values: dict[str, Any] = {}
    for number in range(1, pairs + 1):
        _pair(cursor, values, f"metadata pair {number} of {pairs}")
    alignment = _alignment(file, values)
    places = _places(cursor, tensors, alignment)
    data_start = -(-cursor.position // alignment) * alignment
    problems = _check_end(file, places, data_start)
    metadata = Metadata(values, file, order)
    return Header("gguf", _Entries(places, data_start), metadata, data_start, order, problems)


def _pair(cursor: Cursor, values: dict[str, Any], where: str) -> None:
    key = cursor.name(where, _MAX_KEY)
    if key in values:
        raise cursor.wrong(where, f"key {key!r} occurs twice")
    where = f"metadata {key!r}"
    kind = cursor.scalar(U32, where)
    if kind == ARRAY:
        item, count = cursor.array_type(where)
        begin = cursor.position
        cursor.skip(item, count, where)
        values[key] = Array(item, count, begin, cursor.position - begin)
    elif kind == STRING:
        values[key] = cursor.text(where)
    elif kind in SCALARS:
        values[key] = cursor.scalar(kind, where)
        if key == _ALIGNMENT and kind != U32:
            raise cursor.wrong(where, f"must be u32, is {TYPE_NAMES[kind]}")
    else:
        raise cursor.wrong(where, f"unknown value type {kind}")


def _alignment(file: File, values: dict[str, Any]) -> int:
    alignment = values.get(_ALIGNMENT, 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        message = f"`{file.path}`: {_ALIGNMENT} must be a power of two, is {alignment!r:.100}"
        raise WeightsError(message)
    return alignment


class _Kind(NamedTuple):
    """What tensors of one type and shape have in common."""

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    padded: int


class _Kinds(dict[bytes, _Kind]):
    """Kinds by the bytes that say them (dimension count, dimensions, type), decoded once each."""

    def __init__(self, order: str, alignment: int) -> None:
        self._order = order
        self._alignment = alignment

    def __missing__(self, key: bytes) -> _Kind:
        (count,) = READ_U32[self._order](key)
        if count > _MAX_DIMS:
            message = f"has {count} dimensions; the limit is {_MAX_DIMS}"
            raise ValueError(message)
        *dims, number = struct.unpack_from(f"{self._order}{count}QI", key, 4)
        if (dtype := GGML.get(number)) is None:
            message = f"is of unknown ggml type {number}"
            raise ValueError(message)
        shape = tuple(reversed(dims))
        nbytes = dtype.nbytes(shape)
        padded = -(-nbytes // self._alignment) * self._alignment
        self[key] = kind = _Kind(dtype, shape, nbytes, padded)
        return kind


_Places = dict[str, tuple[_Kind, int]]


def _places(cursor: Cursor, count: int, alignment: int) -> _Places:
    """Read tensor infos; return name to kind and offset from the data's start."""
    u32, u64 = READ_U32[cursor.order], READ_U64[cursor.order]
    kinds = _Kinds(cursor.order, alignment)
    found: _Places = {}
    expected, at = 0, cursor.at
    while len(found) < count:
        where = f"tensor {len(found) + 1} of {count}"
        _want_info(cursor, where)
        window, at = cursor.window, cursor.at
        begin = end = at
        try:
            while len(found) < count:
                begin = at + 8
                end = begin + u64(window, at)[0]
                stop = end + 8 + 8 * u32(window, end)[0]
                offset = u64(window, stop)[0]
                kind = kinds[window[end:stop]]
                place = (kind, offset)
                if found.setdefault(window[begin:end].decode(), place) is not place:
                    message = "occurs twice"
                    raise ValueError(message)
                if offset != expected:
                    message = f"is at {offset}, expected at {expected}: tensors lie end to end"
                    raise ValueError(message)
                if end - begin > _MAX_NAME:
                    message = f"has a name of {end - begin} bytes; the limit is {_MAX_NAME}"
                    raise ValueError(message)
                expected += kind.padded
                at = stop + 8
        except BEYOND:
            cursor.at = at
        except ValueError as error:
            cursor.at = at
            name = window[begin:end].decode(errors="backslashreplace")
            where = f"tensor {name!r:.200}"
            raise cursor.wrong(where, str(error)) from None
    cursor.at = at
    return found


def _want_info(cursor: Cursor, where: str) -> None:
    """Have the window hold the whole tensor info that begins here."""
    cursor.want(8, where)
    (length,) = READ_U64[cursor.order](cursor.window, cursor.at)
    if length > _MAX_NAME:
        raise cursor.wrong(where, f"declares a name of {length} bytes; the limit is {_MAX_NAME}")
    cursor.want(8 + length + 4, where)
    (dims,) = READ_U32[cursor.order](cursor.window, cursor.at + 8 + length)
    if dims > _MAX_DIMS:
        raise cursor.wrong(where, f"has {dims} dimensions; the limit is {_MAX_DIMS}")
    cursor.want(8 + length + 4 + 8 * dims + 12, where)


def _check_end(file: File, places: _Places, data_start: int) -> tuple[str, ...]:
    """Raise unless all tensors lie inside the file; return what is odd about its end."""
    last = next((place for place in reversed(places.values()) if place[0].nbytes), None)
    if last is None:
        return ()
    end = data_start + last[1] + last[0].nbytes
    if end > file.size:
        name, (kind, offset) = next(
            (name, place)
            for name, place in places.items()
            if data_start + place[1] + place[0].nbytes > file.size
        )
        ends = f"ends at byte {data_start + offset + kind.nbytes}, the file at {file.size}"
        message = f"`{file.path}`: tensor {name!r} {ends}"
        raise WeightsError(message, hint="the file is truncated; fetch it again")
    extra = file.size - data_start - last[1] - last[0].padded
    return (f"{extra} bytes follow the last tensor",) if extra > 0 else ()


class _Entries(Mapping[str, Entry]):
    """Entries made on request."""

    def __init__(self, places: _Places, data_start: int) -> None:
        self._places = places
        self._start = data_start

    def __getitem__(self, name: str) -> Entry:
        kind, offset = self._places[name]
        return Entry(kind.dtype, kind.shape, self._start + offset, kind.nbytes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places
