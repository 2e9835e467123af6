"""Writers of weights files, right and wrong: every byte can be set, no library is asked."""

from __future__ import annotations

import json
import struct
from typing import Any

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8,
    "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64,
}  # fmt: skip


def payload(nbytes: int, seed: int = 1) -> bytes:
    """Bytes that differ from place to place; low enough to be bools, and finite as floats."""
    return bytes((seed * 7 + i * 3) % 2 for i in range(nbytes))


def safetensors(header: object, data: bytes = b"", *, pad: bytes = b"") -> bytes:
    """A file with `header` (JSON text, or what becomes it) before `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += pad
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], begin: int) -> tuple[dict[str, Any], int]:
    """A header entry, and where its data ends."""
    size = BITS[dtype]
    for dim in shape:
        size *= dim
    end = begin + size // 8
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}, end


def tensors(**specs: tuple[str, list[int]]) -> tuple[dict[str, Any], bytes]:
    """A valid header of the given tensors, end to end, and their data."""
    header, end = {}, 0
    for name, (dtype, shape) in specs.items():
        header[name], end = entry(dtype, shape, end)
    return header, payload(end)


# GGUF

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B",
          U64: "Q", I64: "q", F64: "d"}  # fmt: skip


class Gguf:
    """Builds a GGUF file field by field."""

    def __init__(self, version: int = 3, order: str = "<", alignment: int = 32) -> None:
        self.order = order
        self.version = version
        self.alignment = alignment
        self.pairs: list[bytes] = []
        self.infos: list[bytes] = []
        self.data = b""

    def pack(self, code: str, *values: Any) -> bytes:
        return struct.pack(self.order + code, *values)

    def text(self, value: str | bytes) -> bytes:
        raw = value if isinstance(value, bytes) else value.encode()
        return self.pack("Q", len(raw)) + raw

    def value(self, kind: int, value: Any) -> bytes:
        if kind == STRING:
            return self.text(value)
        if kind == ARRAY:
            item, values = value
            return self.pack("IQ", item, len(values)) + b"".join(
                self.value(item, one) for one in values
            )
        return self.pack(_CODES[kind], value)

    def pair(self, key: str | bytes, kind: int, value: Any) -> Gguf:
        self.pairs.append(self.text(key) + self.pack("I", kind) + self.value(kind, value))
        return self

    def info(
        self, name: str | bytes, dims: list[int], kind: int, offset: int, *, count: int = -1
    ) -> Gguf:
        """A tensor info as given, `dims` innermost first, without data."""
        rank = len(dims) if count < 0 else count
        self.infos.append(
            self.text(name)
            + self.pack("I", rank)
            + self.pack(f"{len(dims)}Q", *dims)
            + self.pack("IQ", kind, offset)
        )
        return self

    def tensor(self, name: str, dims: list[int], kind: int, data: bytes) -> Gguf:
        """A tensor behind those before it."""
        self.info(name, dims, kind, len(self.data))
        self.data += data + bytes(-len(data) % self.alignment)
        return self

    def head(self, tensors: int | None = None, pairs: int | None = None) -> bytes:
        counts = self.pack(
            "QQ",
            len(self.infos) if tensors is None else tensors,
            len(self.pairs) if pairs is None else pairs,
        )
        start = b"GGUF" + self.pack("I", self.version) + counts
        return start + b"".join(self.pairs) + b"".join(self.infos)

    def build(self, tensors: int | None = None, pairs: int | None = None) -> bytes:
        head = self.head(tensors, pairs)
        return head + bytes(-len(head) % self.alignment) + self.data
