"""What SmolLM2-135M is: numbers the graph is built from, and a weights file has to match."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MODEL", "SmolLM2"]


@dataclass(frozen=True, slots=True)
class SmolLM2:
    """The dimensions and constants of the model."""

    vocabulary: int = 49152
    context: int = 8192
    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    groups: int = 3
    layers: int = 30
    norm_epsilon: float = 1e-5
    rope_base: float = 100_000.0

    @property
    def head(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def row(self) -> tuple[int, int, int]:
        """Shape of what a layer remembers of one token: keys and values of every group."""
        return (2, self.groups, self.head)

    @property
    def layer_weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's weights by the last part of their names."""
        hidden, inner, shared = self.hidden, self.intermediate, self.groups * self.head
        return {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (shared, hidden),
            "attn_v": (shared, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }

    def check(self, metadata: Mapping[str, Any]) -> None:
        """Compare with the metadata of a GGUF file.

        Names and shapes of the weights do not tell models apart: SmolLM-135M has the same, and
        another base of its rotary angles.

        Raises
        ------
        ValueError
            That lists every number the file has otherwise, or lacks.
        """
        expected = {
            "vocab_size": self.vocabulary,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.intermediate,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.groups,
            "block_count": self.layers,
            "attention.layer_norm_rms_epsilon": self.norm_epsilon,
            "rope.freq_base": self.rope_base,
            "rope.dimension_count": self.head,
        }
        wrong = [
            f"`llama.{key}` must be {value}, is {metadata.get(f'llama.{key}', 'not there')}"
            for key, value in expected.items()
            # The file keeps numbers as float32.
            if not math.isclose(metadata.get(f"llama.{key}", math.nan), value, rel_tol=1e-6)
        ]
        if wrong:
            message = f"the weights are of another model than SmolLM2-135M: {'; '.join(wrong)}"
            raise ValueError(message)


MODEL = SmolLM2()
