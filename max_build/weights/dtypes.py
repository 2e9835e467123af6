"""Element types of weights files: one row each, under the names MAX uses (`max.dtype.DType`).

Quantised GGUF types carry their ggml name in lower case (`q4_k`). Transport never interprets
bytes: a type NumPy lacks is still a width, and its values are somebody else's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

__all__ = ["BY_NAME", "GGML", "SAFETENSORS", "DType"]


@dataclass(frozen=True, slots=True)
class DType:
    """How a tensor's elements lie in bytes.

    Parameters
    ----------
    name
        `float32`, `bfloat16`, `float8_e4m3fn`, `q4_k`, …
    bits
        Width of one element; for quantised types of one whole block.
    raw
        NumPy code of the array that holds the bytes: the type itself where NumPy has it, an
        unsigned integer of its width where not, `u1` for packed and quantised types.
    native
        NumPy has this very type.
    block
        Elements in one quantisation block, along the last dimension; 1 for plain types.
    dlpack
        DLPack type code and bits, where DLPack can say it.
    """

    name: str
    bits: int
    raw: str = "u1"
    native: bool = False
    block: int = 1
    dlpack: tuple[int, int] | None = None

    @property
    def packed(self) -> bool:
        """An element is not a whole number of bytes: raw views are bytes, not elements."""
        return self.block > 1 or self.bits % 8 != 0

    @property
    def is_complex(self) -> bool:
        """An element has an imaginary part."""
        return self.raw[0] == "c"

    @property
    def itemsize(self) -> int:
        """Bytes of one item of the raw array, which is also the alignment it wants."""
        return int(self.raw[1:])

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor of `shape`.

        Raises
        ------
        ValueError
            If the shape is not a whole number of bytes or blocks, or not below 2**63 bits.
        """
        # Zero dimensions are left out so that `[0, 2**40, 2**40]` cannot hide an overflow.
        if prod(dim for dim in shape if dim) * self.bits >= 1 << 63:
            message = f"shape {list(shape)} of {self.name} overflows 64 bits"
            raise ValueError(message)
        if self.block > 1 and (not shape or shape[-1] % self.block):
            rows = f"last dimension of {list(shape)}"
            message = f"{rows} is not a multiple of the {self.block}-element {self.name} block"
            raise ValueError(message)
        bits = prod(shape) // self.block * self.bits
        if bits % 8:
            message = f"shape {list(shape)} of {self.name} is not a whole number of bytes"
            raise ValueError(message)
        return bits // 8

    def raw_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the raw array: `shape`, or for packed types rows of bytes."""
        if not self.packed:
            return shape
        bits = (shape[-1] if shape else 1) // self.block * self.bits
        return (*shape[:-1], bits // 8) if shape and bits % 8 == 0 else (self.nbytes(shape),)


def _plain(name: str, raw: str, code: int) -> DType:
    bits = int(raw[1:]) * 8
    return DType(name, bits, raw, native=True, dlpack=(code, bits))


# DLPack codes: 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool, 10–14 the 8-bit floats.
_PLAIN = (
    DType("bool", 8, "b1", native=True, dlpack=(6, 8)),
    *(_plain(f"int{8 * n}", f"i{n}", 0) for n in (1, 2, 4, 8)),
    *(_plain(f"uint{8 * n}", f"u{n}", 1) for n in (1, 2, 4, 8)),
    *(_plain(f"float{8 * n}", f"f{n}", 2) for n in (2, 4, 8)),
    DType("complex64", 64, "c8", native=True, dlpack=(5, 64)),
    DType("bfloat16", 16, "u2", dlpack=(4, 16)),
    DType("float8_e4m3fn", 8, dlpack=(10, 8)),
    DType("float8_e4m3fnuz", 8, dlpack=(11, 8)),
    DType("float8_e5m2", 8, dlpack=(12, 8)),
    DType("float8_e5m2fnuz", 8, dlpack=(13, 8)),
    DType("float8_e8m0fnu", 8, dlpack=(14, 8)),
    DType("float6_e2m3fn", 6),
    DType("float6_e3m2fn", 6),
    DType("float4_e2m1fn", 4),
)

# ggml type number, name, elements per block, bytes per block. Numbers 4, 5, 31–33 and 36–38
# were taken out of the format. Q8_1 (9) is left out: it is an intermediate that no file
# stores, and its size is 36 bytes to ggml but 40 to the `gguf` package.
_QUANTISED = (
    (2, "q4_0", 32, 18),
    (3, "q4_1", 32, 20),
    (6, "q5_0", 32, 22),
    (7, "q5_1", 32, 24),
    (8, "q8_0", 32, 34),
    (10, "q2_k", 256, 84),
    (11, "q3_k", 256, 110),
    (12, "q4_k", 256, 144),
    (13, "q5_k", 256, 176),
    (14, "q6_k", 256, 210),
    (15, "q8_k", 256, 292),
    (16, "iq2_xxs", 256, 66),
    (17, "iq2_xs", 256, 74),
    (18, "iq3_xxs", 256, 98),
    (19, "iq1_s", 256, 50),
    (20, "iq4_nl", 32, 18),
    (21, "iq3_s", 256, 110),
    (22, "iq2_s", 256, 82),
    (23, "iq4_xs", 256, 136),
    (29, "iq1_m", 256, 56),
    (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66),
    (39, "mxfp4", 32, 17),
    (40, "nvfp4", 64, 36),
    (41, "q1_0", 128, 18),
)

BY_NAME = {dtype.name: dtype for dtype in _PLAIN}

#: safetensors' names.
SAFETENSORS = {
    "BOOL": BY_NAME["bool"],
    "F4": BY_NAME["float4_e2m1fn"],
    "F6_E2M3": BY_NAME["float6_e2m3fn"],
    "F6_E3M2": BY_NAME["float6_e3m2fn"],
    "U8": BY_NAME["uint8"],
    "I8": BY_NAME["int8"],
    "F8_E5M2": BY_NAME["float8_e5m2"],
    "F8_E4M3": BY_NAME["float8_e4m3fn"],
    "F8_E8M0": BY_NAME["float8_e8m0fnu"],
    "F8_E4M3FNUZ": BY_NAME["float8_e4m3fnuz"],
    "F8_E5M2FNUZ": BY_NAME["float8_e5m2fnuz"],
    "I16": BY_NAME["int16"],
    "U16": BY_NAME["uint16"],
    "F16": BY_NAME["float16"],
    "BF16": BY_NAME["bfloat16"],
    "I32": BY_NAME["int32"],
    "U32": BY_NAME["uint32"],
    "F32": BY_NAME["float32"],
    "C64": BY_NAME["complex64"],
    "F64": BY_NAME["float64"],
    "I64": BY_NAME["int64"],
    "U64": BY_NAME["uint64"],
}

#: ggml's type numbers.
GGML = {
    0: BY_NAME["float32"],
    1: BY_NAME["float16"],
    24: BY_NAME["int8"],
    25: BY_NAME["int16"],
    26: BY_NAME["int32"],
    27: BY_NAME["int64"],
    28: BY_NAME["float64"],
    30: BY_NAME["bfloat16"],
    **{number: DType(name, size * 8, block=block) for number, name, block, size in _QUANTISED},
}

BY_NAME |= {dtype.name: dtype for dtype in GGML.values()}
