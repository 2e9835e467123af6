"""Read and validate GGUF headers: version 2 and 3, both byte orders, vocabularies unparsed.

Follows ggml's `docs/gguf.md` and what llama.cpp enforces beyond it: at most four dimensions,
unique names, whole blocks, and tensors laid end to end, each padded to the alignment. Every
length is compared with what is left of the file before it is believed.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from max_build.errors import WeightsError
from max_build.weights.dtypes import GGML
from max_build.weights.header import Entry, Header

if TYPE_CHECKING:
    from max_build.weights.dtypes import DType
    from max_build.weights.pages import File

__all__ = ["MAGIC", "Array", "Metadata", "read"]

MAGIC = b"GGUF"
_ALIGNMENT = "general.alignment"
_STEP = 1 << 20  # bytes by which the header is read on
_MAX_KEY = 65535
_MAX_NAME = 64
_MAX_DIMS = 4
_MAX_DEPTH = 8
_MAX_TEXT = 64 << 20  # of one metadata string; a chat template takes 10 KB

_STRING, _ARRAY, _BOOL, _U64_TYPE = 8, 9, 7, 10
#: What unpacking beyond a buffer raises; the last two for positions beyond 64 bits.
_BEYOND = (struct.error, OverflowError, IndexError)
#: Value type to `struct` code.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_TYPE_NAMES = (
    "u8",
    "i8",
    "u16",
    "i16",
    "u32",
    "i32",
    "f32",
    "bool",
    "string",
    "array",
    "u64",
    "i64",
    "f64",
)


class Array(msgspec.Struct, frozen=True, array_like=True):
    """An array among the metadata, left where it is: `count` items in a stretch of the file."""

    type: int
    count: int
    offset: int
    nbytes: int


class Metadata(Mapping[str, Any]):
    """The key-value pairs; arrays are read and decoded each time they are asked for.

    Text that is not UTF-8 comes as `bytes`.
    """

    def __init__(self, values: dict[str, Any], file: File, order: Literal["<", ">"]) -> None:
        self.values_or_arrays = values
        self._file = file
        self._order = order

    def __getitem__(self, key: str) -> Any:
        value = self.values_or_arrays[key]
        if isinstance(value, Array):
            self._file.check()
            end = value.offset + value.nbytes
            cursor = _Cursor(self._file, self._order, value.offset, end)
            return cursor.items(value.type, value.count, f"metadata {key!r}")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_or_arrays)

    def __len__(self) -> int:
        return len(self.values_or_arrays)

    def __contains__(self, key: object) -> bool:
        return key in self.values_or_arrays


#: `struct` unpackers by byte order.
_U32 = {order: struct.Struct(f"{order}I").unpack_from for order in "<>"}
_U64 = {order: struct.Struct(f"{order}Q").unpack_from for order in "<>"}


class _Cursor:
    """A position in a file, and a window of about a megabyte that is read on as needed.

    Parameters
    ----------
    file, order
        What to read, and its byte order.
    start, limit
        Where to begin, and where whatever is read must have ended.
    """

    def __init__(self, file: File, order: Literal["<", ">"], start: int, limit: int) -> None:
        self.file = file
        self.order = order
        self.limit = limit
        self.base = start  # of `window` in the file
        self.window = b""
        self.at = 0  # in `window`; may lie beyond it

    @property
    def position(self) -> int:
        """Offset in the file."""
        return self.base + self.at

    def want(self, nbytes: int, where: str) -> None:
        """Have the window hold the next `nbytes`; its start may move."""
        if self.at + nbytes > len(self.window):
            begin = self.position
            self.fits(nbytes, where)
            self.window = self.file.read(begin, min(max(nbytes, _STEP), self.limit - begin))
            self.base, self.at = begin, 0

    def fits(self, nbytes: int, where: str) -> None:
        """Raise unless `nbytes` more can be there."""
        if (end := self.position + nbytes) > self.limit:
            ends = f"byte {end} is needed, {self.limit} are there"
            message = f"`{self.file.path}` ends inside {where}: {ends}"
            raise WeightsError(message, hint="the file is truncated or damaged; fetch it again")

    def wrong(self, where: str, what: str) -> WeightsError:
        """Return the error that says what is wrong here."""
        return WeightsError(f"`{self.file.path}`: {where} at offset {self.position}: {what}")

    def scalar(self, kind: int, where: str) -> Any:
        """Read one number or bool."""
        return self.scalars(kind, 1, where)[0]

    def scalars(self, kind: int, count: int, where: str) -> list[Any]:
        """Read `count` numbers or bools."""
        code = f"{self.order}{count}{_SCALARS[kind]}"
        size = struct.calcsize(code)
        self.want(size, where)
        found = struct.unpack_from(code, self.window, self.at)
        if kind == _BOOL and count and max(found) > 1:
            raise self.wrong(where, f"a bool must be 0 or 1, is {max(found)}")
        self.at += size
        return [bool(value) for value in found] if kind == _BOOL else list(found)

    def text(self, where: str, most: int = _MAX_TEXT) -> str | bytes:
        """Read a string; `bytes` if it is not UTF-8."""
        length = self.scalar(_U64_TYPE, where)
        if length > most:
            raise self.wrong(where, f"declares {length} bytes of text; the limit is {most}")
        self.want(length, where)
        raw = self.window[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def name(self, where: str, most: int) -> str:
        """Read a string that must be UTF-8."""
        value = self.text(where, most)
        if isinstance(value, bytes):
            raise self.wrong(where, f"the name {value!r:.100} is not UTF-8")
        return value

    def array_type(self, where: str) -> tuple[int, int]:
        """Read an array's item type and count."""
        kind, count = self.scalar(4, where), self.scalar(_U64_TYPE, where)
        if kind >= len(_TYPE_NAMES):
            raise self.wrong(where, f"unknown item type {kind}")
        if count > (left := self.limit - self.position) // _smallest(kind):
            what = f"declares {count} items of {_TYPE_NAMES[kind]}, but {left} bytes are left"
            raise self.wrong(where, what)
        return kind, count

    def skip(self, kind: int, count: int, where: str, depth: int = 1) -> None:
        """Pass over the items of an array, having checked that they are there."""
        if kind == _STRING:
            self._skip_strings(count, where)
        elif kind == _ARRAY:
            if depth >= _MAX_DEPTH:
                raise self.wrong(where, f"arrays nest deeper than {_MAX_DEPTH}")
            for _ in range(count):
                self.skip(*self.array_type(where), where, depth + 1)
        elif kind == _BOOL:
            for begin in range(0, count, _STEP):
                self.scalars(kind, min(_STEP, count - begin), where)
        else:
            size = count * _smallest(kind)
            self.fits(size, where)
            self.at += size

    def _skip_strings(self, count: int, where: str) -> None:
        # The hot loop: a vocabulary and its merges are 300,000 strings.
        u64 = _U64[self.order]
        while count:
            self.want(8, where)
            window, at = self.window, self.at
            try:
                while count:
                    at += 8 + u64(window, at)[0]
                    count -= 1
            except _BEYOND:
                pass
            self.at = at
        self.fits(0, where)

    def _texts(self, count: int, where: str) -> list[str | bytes]:
        u64 = _U64[self.order]
        found: list[str | bytes] = []
        while len(found) < count:
            found.append(self.text(where))  # by the careful way across a window's end
            window, at = self.window, self.at
            try:
                while len(found) < count:
                    begin = at + 8
                    end = begin + u64(window, at)[0]
                    if end > len(window):
                        break
                    found.append(window[begin:end].decode())
                    at = end
            except (*_BEYOND, UnicodeDecodeError):
                pass
            self.at = at
        return found

    def items(self, kind: int, count: int, where: str) -> list[Any]:
        """Read the items of an array."""
        if kind == _STRING:
            return self._texts(count, where)
        if kind == _ARRAY:
            return [self.items(*self.array_type(where), where) for _ in range(count)]
        return self.scalars(kind, count, where)


def _smallest(kind: int) -> int:
    """Return the fewest bytes that an item of an array can take."""
    if kind in _SCALARS:
        return struct.calcsize(_SCALARS[kind])
    return 8 if kind == _STRING else 12


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
    cursor = _Cursor(file, order, 4, file.size)
    version = cursor.scalar(4, "the version")
    if version not in (2, 3):
        message = f"`{file.path}` is GGUF version {version}; 2 and 3 are supported"
        hint = "convert it with llama.cpp's `gguf-py`" if version == 1 else ""
        raise WeightsError(message, hint=hint)
    tensors, pairs = cursor.scalars(_U64_TYPE, 2, "the counts")
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


def _pair(cursor: _Cursor, values: dict[str, Any], where: str) -> None:
    key = cursor.name(where, _MAX_KEY)
    if key in values:
        raise cursor.wrong(where, f"key {key!r} occurs twice")
    where = f"metadata {key!r}"
    kind = cursor.scalar(4, where)
    if kind == _ARRAY:
        item, count = cursor.array_type(where)
        begin = cursor.position
        cursor.skip(item, count, where)
        values[key] = Array(item, count, begin, cursor.position - begin)
    elif kind == _STRING:
        values[key] = cursor.text(where)
    elif kind in _SCALARS:
        values[key] = cursor.scalar(kind, where)
        if key == _ALIGNMENT and kind != 4:
            raise cursor.wrong(where, f"must be u32, is {_TYPE_NAMES[kind]}")
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
        (count,) = _U32[self._order](key)
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


def _places(cursor: _Cursor, count: int, alignment: int) -> _Places:
    """Read tensor infos; return name to kind and offset from the data's start."""
    u32, u64 = _U32[cursor.order], _U64[cursor.order]
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
        except _BEYOND:
            cursor.at = at
        except ValueError as error:
            cursor.at = at
            name = window[begin:end].decode(errors="backslashreplace")
            where = f"tensor {name!r:.200}"
            raise cursor.wrong(where, str(error)) from None
    cursor.at = at
    return found


def _want_info(cursor: _Cursor, where: str) -> None:
    """Have the window hold the whole tensor info that begins here."""
    cursor.want(8, where)
    (length,) = _U64[cursor.order](cursor.window, cursor.at)
    if length > _MAX_NAME:
        raise cursor.wrong(where, f"declares a name of {length} bytes; the limit is {_MAX_NAME}")
    cursor.want(8 + length + 4, where)
    (dims,) = _U32[cursor.order](cursor.window, cursor.at + 8 + length)
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
