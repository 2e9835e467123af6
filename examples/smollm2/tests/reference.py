"""SmolLM2 in float64 NumPy, written apart from the graph it checks.

Follows the Llama decoder of Touvron et al. (2023) with the dimensions of the GGUF file's own
metadata, and llama.cpp's convention that a file of architecture `llama` keeps the two components
which a rotary embedding turns side by side. Weights come through the `gguf` package's reader and
decoder, widened from float32. The whole sequence goes in at once: there is no cache of keys and
values, so that a mistake in the graph's would show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[np.float64]


class Reference:
    """The model over the weights of one GGUF file."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self._weights = {
            tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
        }

        def number(name: str) -> float:
            return float(reader.fields[f"llama.{name}"].contents())

        self._layers = int(number("block_count"))
        self._heads = int(number("attention.head_count"))
        self._groups = int(number("attention.head_count_kv"))
        self._epsilon = number("attention.layer_norm_rms_epsilon")
        self._base = number("rope.freq_base")

    def logits(self, token_ids: Sequence[int]) -> Array:
        """Logits after each token: `[len(token_ids), vocabulary]`."""
        x = self._weights["token_embd.weight"][list(token_ids)].astype(np.float64)
        for layer in range(self._layers):
            name = f"blk.{layer}"
            y = self._norm(f"{name}.attn_norm", x)
            x = x + self._dense(f"{name}.attn_output", self._attention(name, y))
            y = self._norm(f"{name}.ffn_norm", x)
            gate = self._dense(f"{name}.ffn_gate", y)
            gate = gate / (1.0 + np.exp(-gate))
            x = x + self._dense(f"{name}.ffn_down", gate * self._dense(f"{name}.ffn_up", y))
        return self._dense("token_embd", self._norm("output_norm", x))

    def _attention(self, name: str, x: Array) -> Array:
        query, key, value = (
            np.split(self._dense(f"{name}.attn_{part}", x), count, axis=1)
            for part, count in (("q", self._heads), ("k", self._groups), ("v", self._groups))
        )
        future = np.triu(np.full((len(x), len(x)), -np.inf), 1)
        heads = []
        for head in range(self._heads):
            group = head * self._groups // self._heads
            q, k = self._turned(query[head]), self._turned(key[group])
            scores = q @ k.T / np.sqrt(q.shape[1]) + future
            heads.append(_softmax(scores) @ value[group])
        return np.concatenate(heads, axis=1)

    def _turned(self, x: Array) -> Array:
        """Turn each pair of neighbours, as one complex number, by its angle at each position."""
        length, width = x.shape
        frequencies = self._base ** (-np.arange(0, width, 2) / width)
        turns = np.exp(1j * np.outer(np.arange(length), frequencies))
        turned = np.ascontiguousarray(x).view(np.complex128) * turns
        return turned.view(np.float64)

    def _dense(self, name: str, x: Array) -> Array:
        result: Array = x @ self._weights[f"{name}.weight"].astype(np.float64).T
        return result

    def _norm(self, name: str, x: Array) -> Array:
        mean = np.square(x).mean(axis=1, keepdims=True)
        scaled: Array = x / np.sqrt(mean + self._epsilon) * self._weights[f"{name}.weight"]
        return scaled


def _softmax(scores: Array) -> Array:
    exps: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    exps /= exps.sum(axis=1, keepdims=True)
    return exps
