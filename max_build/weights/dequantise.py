"""Decode the commonest quantised blocks, as the `gguf` package does to the bit, but faster.

Blocks of 32 elements as ggml lays them out (`block_q4_0`, `block_q4_1` and `block_q8_0` of
ggml-common.h); of nibbles, the low ones are elements 0 to 15, the high ones 16 to 31:

    q4_0  f16 d         | 16 bytes of nibbles q   d * (q - 8)
    q4_1  f16 d | f16 m | 16 bytes of nibbles q   d * q + m
    q8_0  f16 d         | 32 int8 q               d * q
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from max_build.weights.tensor import Array

__all__ = ["KINDS", "decode"]

#: What `decode` knows, and the bytes of each type's block.
KINDS = {"q4_0": 18, "q4_1": 20, "q8_0": 34}

_ELEMENTS = 32
_BLOCKS = 2048  # decoded at a time: 256 KiB of results stay in the second-level cache
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F


def decode(raw: Array, kind: str) -> Array:
    """Return the values of blocks as a new, flat `float32` array.

    Parameters
    ----------
    raw
        Whole blocks as bytes, C-contiguous, of any shape.
    kind
        One of `KINDS`.
    """
    import numpy as np

    blocks = raw.reshape(-1, KINDS[kind])
    values = np.empty((len(blocks), _ELEMENTS), np.float32)
    scales = 2 if kind == "q4_1" else 1
    scratch = np.empty((min(len(blocks), _BLOCKS), 4), np.uint64)
    for begin in range(0, len(blocks), _BLOCKS):
        some, out = blocks[begin : begin + _BLOCKS], values[begin : begin + _BLOCKS]
        scale = some[:, : 2 * scales].view(np.float16).astype(np.float32)
        packed = some[:, 2 * scales :]
        if kind == "q8_0":
            np.copyto(out, packed.view(np.int8))
        else:
            nibbles, pairs = scratch[: len(some)], packed.view(np.uint64)
            np.bitwise_and(pairs, _LOW_NIBBLES, out=nibbles[:, :2])
            np.right_shift(pairs, 4, out=nibbles[:, 2:])
            nibbles[:, 2:] &= _LOW_NIBBLES
            np.copyto(out, nibbles.view(np.uint8))
        if kind == "q4_0":
            out -= 8
        out *= scale[:, :1]
        if kind == "q4_1":
            out += scale[:, 1:]
    return values.reshape(-1)
