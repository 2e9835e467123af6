"""The headers of one ELF among other bytes, every offset checked before it is followed.

Follows the ELF-64 specification (System V gABI, chapters 4 and 5). Input may be damaged or hostile:
whatever it says, reading ends in `DamagedError` or in an answer, in time and memory linear in the
size of the ELF.

Written with `struct` and not with `pyelftools`: a MEF holds about a hundred device ELFs and all
of them are read on every publish, damaged input must end in one kind of error within a bounded
time, and neither the notes nor `.nv.info` are known to that library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = [
    "AARCH64",
    "AMDGPU",
    "CUDA",
    "DYNAMIC_SYMBOLS",
    "FUNCTION",
    "HEADER_SIZE",
    "MAGIC",
    "NOTE",
    "SYMBOLS",
    "X86_64",
    "DamagedError",
    "Elf",
    "Section",
    "Symbol",
]

MAGIC: Final = b"\x7fELF\x02\x01\x01"
"""How every ELF that an artifact may hold begins: 64-bit, little-endian, version 1."""

X86_64: Final = 62
AARCH64: Final = 183
CUDA: Final = 190
AMDGPU: Final = 224
"""`e_machine` of the four kinds of code an artifact may hold."""

NOTE: Final = 7
SYMBOLS: Final = 2
DYNAMIC_SYMBOLS: Final = 11
"""Kinds of section (`sh_type`) that are read here."""

FUNCTION: Final = 2
"""Kind of symbol (`STT_FUNC`)."""

HEADER_SIZE: Final = 64

_BARE: Final = (0, 8)
"""Kinds of section without bytes in the file, whatever their offset says: unused, and NOBITS."""

_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_NOTE: Final = struct.Struct("<III")
_LONGEST_NAME: Final = 1 << 16


class DamagedError(Exception):
    """What is wrong with an ELF; its caller says which."""


class Section(NamedTuple):
    """A row of the section table; `name` is an offset into the table of section names."""

    name: int
    kind: int
    offset: int
    size: int
    link: int
    info: int


class Symbol(NamedTuple):
    """A row of a symbol table; `name` is an offset into the string table that goes with it."""

    name: int
    kind: int
    binding: int
    size: int


class Elf:
    """The headers of the ELF at `base` in `data`, every offset checked against the end.

    Only what is asked for is read, and in time linear in the size of the ELF.
    """

    def __init__(self, data: bytes, base: int = 0) -> None:
        self.data = data
        self.base = base
        self.limit = len(data) - base
        if not data:
            message = "is empty"
            raise DamagedError(message)
        if data[base : base + 4] != b"\x7fELF":
            message = f"is not an ELF file: starts with {bytes(data[base : base + 8])!r}"
            raise DamagedError(message)
        if data[base : base + 7] != MAGIC:
            message = "is not a 64-bit little-endian ELF of version 1"
            raise DamagedError(message)
        if self.limit < HEADER_SIZE:
            message = f"is truncated: {self.limit} bytes, and the header takes {HEADER_SIZE}"
            raise DamagedError(message)
        (
            ident, self.type, self.machine, version, _entry, phoff, shoff, self.flags,
            ehsize, phentsize, phnum, shentsize, shnum, self._shstrndx,
        ) = _HEADER.unpack_from(data, base)  # fmt: skip
        self.abi = ident[8]
        # Tools up to 12.9 write their own version (such as 129) in place of EV_CURRENT.
        if not version or ehsize != HEADER_SIZE:
            message = f"has a damaged header: version {version}, {ehsize} bytes"
            raise DamagedError(message)
        if shnum and shentsize != _SECTION.size:
            message = f"has a damaged header: sections of {shentsize} bytes"
            raise DamagedError(message)
        if phnum and phentsize != _SEGMENT.size:
            message = f"has a damaged header: segments of {phentsize} bytes"
            raise DamagedError(message)
        self.extent = max(
            self._inside("segment table", phoff if phnum else 0, phnum * _SEGMENT.size),
            self._inside("section table", shoff if shnum else 0, shnum * _SECTION.size),
            HEADER_SIZE,
        )
        self.sections = [
            Section(name, kind, offset, size, link, info)
            for name, kind, _flags, _addr, offset, size, link, info, _align, _entsize in (
                _SECTION.iter_unpack(data[base + shoff : base + shoff + shnum * _SECTION.size])
            )
        ]
        for index, section in enumerate(self.sections):
            if section.kind not in _BARE:
                stop = self._inside(f"section {index}", section.offset, section.size)
                self.extent = max(self.extent, stop)
        for index in range(phnum):
            _, _, offset, _, _, filesz, _, _ = _SEGMENT.unpack_from(
                data, base + phoff + index * _SEGMENT.size
            )
            self.extent = max(self.extent, self._inside(f"segment {index}", offset, filesz))
        # Names and sections may share bytes: a damaged table could have one long name spelled, or
        # one long section read, a thousand times.
        self._budget = 8 * self.extent + _LONGEST_NAME

    def _inside(self, what: str, offset: int, size: int) -> int:
        if offset + size > self.limit:
            message = (
                f"is truncated or damaged: its {what} ends at byte {offset + size}, "
                f"the data at byte {self.limit}"
            )
            raise DamagedError(message)
        return offset + size

    def _spend(self, size: int, what: str) -> None:
        self._budget -= size
        if self._budget < 0:
            message = f"is damaged: more {what} than it has bytes for"
            raise DamagedError(message)

    def content(self, section: Section) -> bytes:
        """The bytes of a section in the file."""
        if section.kind in _BARE:
            return b""
        self._spend(section.size, "sections")
        start = self.base + section.offset
        return bytes(self.data[start : start + section.size])

    def name(self, table: int, offset: int) -> str:
        """The string at `offset` of the string table in section `table`."""
        if table >= len(self.sections):
            message = f"is damaged: string table {table} of {len(self.sections)} sections"
            raise DamagedError(message)
        strings = self.sections[table]
        start = self.base + strings.offset + offset
        stop = self.base + strings.offset + strings.size
        end = self.data.find(b"\0", start, min(stop, start + _LONGEST_NAME))
        if strings.kind in _BARE or not start <= end < stop:
            message = f"is damaged: no name at byte {offset} of string table {table}"
            raise DamagedError(message)
        self._spend(end - start, "names")
        return str(self.data[start:end], "utf-8", "backslashreplace")

    def section_names(self) -> list[str]:
        """The name of each section, in the order of `sections`."""
        if not self.sections:
            return []
        return [self.name(self._shstrndx, section.name) for section in self.sections]

    def symbols(self, kind: int) -> Iterator[tuple[Symbol, int]]:
        """Yield each symbol of the first table of that kind, with its string table."""
        table = next((section for section in self.sections if section.kind == kind), None)
        if table is None:
            return
        whole = table.size - table.size % _SYMBOL.size
        for name, info, _other, _section, _value, size in _SYMBOL.iter_unpack(
            self.content(table)[:whole]
        ):
            yield Symbol(name, info & 15, info >> 4, size), table.link

    def notes(self, section: Section) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield owner, type and description of each note."""
        data = self.content(section)
        at = 0
        while at + _NOTE.size <= len(data):
            namesz, descsz, kind = _NOTE.unpack_from(data, at)
            owner = at + _NOTE.size
            description = owner + (namesz + 3 & ~3)
            at = description + (descsz + 3 & ~3)
            if description + descsz > len(data):
                message = "is damaged: a note passes the end of its section"
                raise DamagedError(message)
            yield (
                data[owner : owner + namesz].rstrip(b"\0"),
                kind,
                data[description : description + descsz],
            )
