"""all-MiniLM-L6-v2 in float64 NumPy, written apart from the graph it checks.

Follows the BERT encoder of Devlin et al. (2019) with the published model's `config.json`, then the
mean pooling and normalisation of its `modules.json`. One sentence at a time, without padding, so
that it shares neither masking nor batching with the graph.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

LAYERS, HEADS, EPSILON = 6, 12, 1e-12

_erf = np.vectorize(math.erf, otypes=[np.float64])


class Reference:
    """The model over the weights of one `model.safetensors`."""

    def __init__(self, weights: Path) -> None:
        self._weights = {
            name: tensor.astype(np.float64)
            for name, tensor in load_file(weights).items()
            if tensor.dtype == np.float32
        }

    def embed(self, token_ids: Sequence[int]) -> Array:
        """Embed one unpadded sentence: unit vector `[384]`."""
        x = self._weights["embeddings.word_embeddings.weight"][list(token_ids)]
        x = x + self._weights["embeddings.position_embeddings.weight"][: len(token_ids)]
        x = x + self._weights["embeddings.token_type_embeddings.weight"][0]
        x = self._norm("embeddings.LayerNorm", x)
        for layer in range(LAYERS):
            name = f"encoder.layer.{layer}"
            attended = self._dense(f"{name}.attention.output.dense", self._attention(name, x))
            x = self._norm(f"{name}.attention.output.LayerNorm", x + attended)
            inner = self._dense(f"{name}.intermediate.dense", x)
            inner = inner * 0.5 * (1.0 + _erf(inner / math.sqrt(2.0)))
            x = self._norm(
                f"{name}.output.LayerNorm", x + self._dense(f"{name}.output.dense", inner)
            )
        mean: Array = x.mean(axis=0)
        return mean / np.linalg.norm(mean)

    def _attention(self, name: str, x: Array) -> Array:
        query, key, value = (
            np.split(self._dense(f"{name}.attention.self.{part}", x), HEADS, axis=1)
            for part in ("query", "key", "value")
        )
        return np.concatenate(
            [
                _softmax(q @ k.T / math.sqrt(q.shape[1])) @ v
                for q, k, v in zip(query, key, value, strict=True)
            ],
            axis=1,
        )

    def _dense(self, name: str, x: Array) -> Array:
        result: Array = x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
        return result

    def _norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(axis=1, keepdims=True)
        variance = np.square(centred).mean(axis=1, keepdims=True)
        scaled: Array = centred / np.sqrt(variance + EPSILON)
        return scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]


def _softmax(scores: Array) -> Array:
    exps: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    exps /= exps.sum(axis=1, keepdims=True)
    return exps
