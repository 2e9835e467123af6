"""The values of a GGUF header: numbers, strings and arrays, read a window at a time.

Every length is compared with what is left of the file before it is believed, and arrays are
passed over: their items are only made when somebody asks for them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from max_build.errors import WeightsError

if TYPE_CHECKING:
    from max_build.weights.pages import File

__all__ = ["Array", "Cursor", "Metadata"]

STEP = 1 << 20  # bytes by which the header is read on
_MAX_DEPTH = 8
_MAX_TEXT = 64 << 20  # of one metadata string; a chat template takes 10 KB

#: Value types that are more than a number.
BOOL, STRING, ARRAY = 7, 8, 9
U32, U64 = 4, 10
#: Value type to `struct` code.
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
TYPE_NAMES = (
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64",
)  # fmt: skip
#: What unpacking beyond a buffer raises; the last two for positions beyond 64 bits.
BEYOND = (struct.error, OverflowError, IndexError)


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
            cursor = Cursor(self._file, self._order, value.offset, end)
            return cursor.items(value.type, value.count, f"metadata {key!r}")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_or_arrays)

    def __len__(self) -> int:
        return len(self.values_or_arrays)

    def __contains__(self, key: object) -> bool:
        return key in self.values_or_arrays


#: `struct` unpackers by byte order.
READ_U32 = {order: struct.Struct(f"{order}I").unpack_from for order in "<>"}
READ_U64 = {order: struct.Struct(f"{order}Q").unpack_from for order in "<>"}


class Cursor:
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
            self.window = self.file.read(begin, min(max(nbytes, STEP), self.limit - begin))
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
        code = f"{self.order}{count}{SCALARS[kind]}"
        size = struct.calcsize(code)
        self.want(size, where)
        found = struct.unpack_from(code, self.window, self.at)
        if kind == BOOL and count and max(found) > 1:
            raise self.wrong(where, f"a bool must be 0 or 1, is {max(found)}")
        self.at += size
        return [bool(value) for value in found] if kind == BOOL else list(found)

    def text(self, where: str, most: int = _MAX_TEXT) -> str | bytes:
        """Read a string; `bytes` if it is not UTF-8."""
        length = self.scalar(U64, where)
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
        kind, count = self.scalar(U32, where), self.scalar(U64, where)
        if kind >= len(TYPE_NAMES):
            raise self.wrong(where, f"unknown item type {kind}")
        if count > (left := self.limit - self.position) // _smallest(kind):
            what = f"declares {count} items of {TYPE_NAMES[kind]}, but {left} bytes are left"
            raise self.wrong(where, what)
        return kind, count

    def skip(self, kind: int, count: int, where: str, depth: int = 1) -> None:
        """Pass over the items of an array, having checked that they are there."""
        if kind == STRING:
            self._skip_strings(count, where)
        elif kind == ARRAY:
            if depth >= _MAX_DEPTH:
                raise self.wrong(where, f"arrays nest deeper than {_MAX_DEPTH}")
            for _ in range(count):
                self.skip(*self.array_type(where), where, depth + 1)
        elif kind == BOOL:
            for begin in range(0, count, STEP):
                self.scalars(kind, min(STEP, count - begin), where)
        else:
            size = count * _smallest(kind)
            self.fits(size, where)
            self.at += size

    def _skip_strings(self, count: int, where: str) -> None:
        # The hot loop: a vocabulary and its merges are 300,000 strings.
        u64 = READ_U64[self.order]
        while count:
            self.want(8, where)
            window, at = self.window, self.at
            try:
                while count:
                    at += 8 + u64(window, at)[0]
                    count -= 1
            except BEYOND:
                pass
            self.at = at
        self.fits(0, where)

    def _texts(self, count: int, where: str) -> list[str | bytes]:
        u64 = READ_U64[self.order]
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
            except (*BEYOND, UnicodeDecodeError):
                pass
            self.at = at
        return found

    def items(self, kind: int, count: int, where: str) -> list[Any]:
        """Read the items of an array."""
        if kind == STRING:
            return self._texts(count, where)
        if kind == ARRAY:
            return [self.items(*self.array_type(where), where) for _ in range(count)]
        return self.scalars(kind, count, where)


def _smallest(kind: int) -> int:
    """Return the fewest bytes that an item of an array can take."""
    if kind in SCALARS:
        return struct.calcsize(SCALARS[kind])
    return 8 if kind == STRING else 12
