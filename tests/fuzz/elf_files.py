"""Small ELFs, written field by field: cubins, AMD code objects, host code, and MEFs of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

__all__ = ["Part", "code_object", "cubin", "elf", "host_code", "mef", "notes"]

_CUDA, _AMDGPU, _X86_64 = 190, 224, 62
_PROGBITS, _SYMTAB, _STRTAB, _NOTE, _NOBITS, _DYNSYM = 1, 2, 3, 7, 8, 11


@dataclass(frozen=True, slots=True)
class Part:
    """One section: `size` is that of a section without bytes in the file."""

    name: str
    kind: int
    content: bytes = b""
    link: int = 0
    info: int = 0
    size: int = 0


def elf(machine: int, parts: list[Part], *, kind: int = 2, abi: int = 0, flags: int = 0) -> bytes:
    """An ELF of these sections, after the empty one and the table of their names."""
    names = b"\0.shstrtab\0"
    rows = [(0, Part("", 0))]
    for part in parts:
        rows.append((len(names), part))
        names += part.name.encode() + b"\0"
    rows.append((1, Part(".shstrtab", _STRTAB, names)))
    body, table = b"", b""
    start = 64 + 64 * len(rows)
    for name, part in rows:
        offset, size = start + len(body), part.size or len(part.content)
        table += struct.pack(
            "<IIQQQQIIQQ", name, part.kind, 0, 0, offset, size, part.link, part.info, 1, 0
        )
        body += part.content
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01\x00" + bytes([abi]) + bytes(7),
        *(kind, machine, 1, 0, 0, 64, flags, 64, 56, 0, 64, len(rows), len(rows) - 1),
    )
    return header + table + body


def _symbols(*symbols: tuple[int, int, int, int]) -> bytes:
    """Of name, type and binding, section, and size; the empty one first."""
    rows = ((0, 0, 0, 0), *symbols)
    return b"".join(struct.pack("<IBBHQQ", n, i, 0, s, 0, size) for n, i, s, size in rows)


def cubin(arch: int = 90, *, accelerated: bool = True) -> bytes:
    """Code of the kernels `k` and `mul` for one architecture, in the layout of tools 13."""
    attributes = b"".join(
        struct.pack("<BBHII", 4, number, 8, function, value)
        for number, function, value in (
            (0x2F, 1, 24), (0x11, 1, 0), (0x12, 1, 16), (0x2F, 2, 32), (0x12, 2, 0xFFFF_FFFF),
        )
    )  # fmt: skip
    compat = struct.pack("<BBHBBH", 2, 9, 1, 3, 1, 5) if accelerated else b""
    note = b"-arch sm_100f -O3\0"
    return elf(
        _CUDA,
        [
            Part(".strtab", _STRTAB, b"\0k\0mul\0helper\0"),
            Part(".symtab", _SYMTAB, _symbols((1, 18, 4, 64), (3, 18, 6, 32), (7, 2, 4, 8)), 1, 2),
            Part(".nv.info", 0x7000_0000, attributes),
            Part(".text.k", _PROGBITS, bytes(64), 2, 24 << 24),
            Part(".nv.constant0.k", _PROGBITS, bytes(32)),
            Part(".text.mul", _PROGBITS, bytes(32), 2, 32 << 24),
            Part(".nv.constant0.mul", _PROGBITS, bytes(16)),
            Part(".nv.shared.k", _NOBITS, size=1024),
            Part(".nv.constant3", _PROGBITS, bytes(256)),
            Part(".nv.compat", 0x7000_0086, compat),
            Part(".note.nv.tkinfo", _NOTE, _note(b"NVIDIA Corp\0", 2000, note)),
        ],
        abi=8,
        flags=arch << 8,
    )


def _note(owner: bytes, kind: int, text: bytes) -> bytes:
    padded = owner + bytes(-len(owner) % 4)
    return struct.pack("<III", len(owner), len(text), kind) + padded + text + bytes(-len(text) % 4)


def code_object(target: str = "amdgcn-amd-amdhsa--gfx942:sramecc+") -> bytes:
    """Code of the kernel `k` for an AMD processor."""
    kernel = {
        ".name": "k", ".symbol": "k.kd", ".vgpr_count": 12, ".group_segment_fixed_size": 64,
        ".private_segment_fixed_size": 0, ".kernarg_segment_size": 24,
    }  # fmt: skip
    metadata = msgspec.msgpack.encode({"amdhsa.target": target, "amdhsa.kernels": [kernel]})
    return elf(
        _AMDGPU,
        [
            Part(".note", _NOTE, _note(b"AMDGPU\0", 32, metadata)),
            Part(".dynstr", _STRTAB, b"\0k\0"),
            Part(".dynsym", _DYNSYM, _symbols((1, 18, 4, 48)), 2, 1),
            Part(".text", _PROGBITS, bytes(48)),
        ],
        kind=3,
    )


def notes(count: int, size: int) -> bytes:
    """An AMD code object that has one long section of empty notes, named many times over."""
    part = Part(".note", _NOTE, bytes(size))
    once = bytearray(elf(_AMDGPU, [part, *[Part("", _NOTE, size=size)] * (count - 1)]))
    for row in range(2, count + 1):
        at = 64 + 64 * row + 24
        once[at : at + 8] = once[64 + 64 + 24 : 64 + 64 + 32]
    return bytes(once)


def host_code(*images: bytes) -> bytes:
    """Host code with device code in its read-only data."""
    rodata = b"".join(b"\xcb" * 16 + image for image in images)
    return elf(_X86_64, [Part(".text", _PROGBITS, bytes(32)), Part(".rodata", _PROGBITS, rodata)])


def mef(*images: bytes) -> bytes:
    """Bytes around host code, as in a MEF."""
    return b"\xee\xf0\x03\x83" + bytes(60) + host_code(*images) + b"\x05(\r\x01"
