"""The graph of the sentence encoder all-MiniLM-L6-v2, in MAX graph operations.

A BERT encoder of six post-norm layers, mean pooling over the real tokens and L2 normalisation, in
float32. The architecture is that of `config.json`, `modules.json` and `1_Pooling/config.json` of
the published model; weights carry the names they have in its `model.safetensors`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops

# Added to the score of a padding token: exp() of what is left is exactly zero in float32.
MASKED = -1e9


@dataclass(frozen=True, slots=True)
class MiniLM:
    """The dimensions of the model."""

    vocabulary: int = 30522
    positions: int = 512
    token_types: int = 2
    hidden: int = 384
    intermediate: int = 1536
    heads: int = 12
    layers: int = 6
    norm_epsilon: float = 1e-12

    @property
    def head(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class Builder:
    """Adds the operations of the model to the graph being built, all on one device."""

    model: MiniLM
    device: DeviceRef

    def __call__(self, token_ids: TensorValue, mask: TensorValue) -> TensorValue:
        """Map ids and mask, both int64 `[batch, seq]`, to unit vectors `[batch, hidden]`."""
        mask = ops.cast(mask, DType.float32)
        # [batch, 1, 1, seq]: the same bias for every head and every query.
        bias = ops.unsqueeze(ops.unsqueeze((1.0 - mask) * MASKED, 1), 1)
        x = self.embed(token_ids)
        for layer in range(self.model.layers):
            x = self.layer(f"encoder.layer.{layer}", x, bias)
        return normalize(mean_pool(x, mask))

    def embed(self, token_ids: TensorValue) -> TensorValue:
        """Sum of word, position and token-type embeddings, normed: `[batch, seq, hidden]`."""
        model, seq = self.model, token_ids.shape[1]
        words = self.weight("embeddings.word_embeddings.weight", model.vocabulary, model.hidden)
        positions = self.weight(
            "embeddings.position_embeddings.weight", model.positions, model.hidden
        )
        types = self.weight(
            "embeddings.token_type_embeddings.weight", model.token_types, model.hidden
        )
        # A slice stops quietly at the end of the table, which would leave later tokens with
        # whatever lies behind it: the rebind checks at run time that it was long enough.
        position = positions[(slice(0, TensorValue(seq)), "in_table"), :].rebind(
            (seq, model.hidden), f"a sequence has at most {model.positions} tokens"
        )
        # One sentence at a time: every token is of the first type.
        x = ops.gather(words, token_ids, axis=0) + position + types[0]
        return self.norm("embeddings.LayerNorm", x)

    def layer(self, name: str, x: TensorValue, bias: TensorValue) -> TensorValue:
        """One encoder layer: attention and feed-forward, each with residual and norm."""
        hidden, intermediate = self.model.hidden, self.model.intermediate
        attended = self.attention(f"{name}.attention.self", x, bias)
        projected = self.linear(f"{name}.attention.output.dense", attended, hidden, hidden)
        x = self.norm(f"{name}.attention.output.LayerNorm", x + projected)
        inner = ops.gelu(self.linear(f"{name}.intermediate.dense", x, hidden, intermediate))
        outer = self.linear(f"{name}.output.dense", inner, intermediate, hidden)
        return self.norm(f"{name}.output.LayerNorm", x + outer)

    def attention(self, name: str, x: TensorValue, bias: TensorValue) -> TensorValue:
        """Multi-head self-attention, before its output projection: `[batch, seq, hidden]`."""
        model = self.model
        batch, seq, _ = x.shape

        def heads(part: str) -> TensorValue:
            """Project `x` and split it by head: `[batch, heads, seq, head]`."""
            y = self.linear(f"{name}.{part}", x, model.hidden, model.hidden)
            return ops.permute(y.reshape((batch, seq, model.heads, model.head)), [0, 2, 1, 3])

        query, key, value = heads("query"), heads("key"), heads("value")
        scores = query @ ops.transpose(key, -1, -2) / math.sqrt(model.head) + bias
        context = ops.softmax(scores) @ value
        return ops.permute(context, [0, 2, 1, 3]).reshape((batch, seq, model.hidden))

    def linear(self, name: str, x: TensorValue, inputs: int, outputs: int) -> TensorValue:
        """Apply `x @ weight.T + bias`; the file keeps weights as `[outputs, inputs]`."""
        weight = self.weight(f"{name}.weight", outputs, inputs)
        return x @ weight.T + self.weight(f"{name}.bias", outputs)

    def norm(self, name: str, x: TensorValue) -> TensorValue:
        """Layer normalisation over the hidden dimension."""
        gamma = self.weight(f"{name}.weight", self.model.hidden)
        beta = self.weight(f"{name}.bias", self.model.hidden)
        return ops.layer_norm(x, gamma, beta, self.model.norm_epsilon)

    def weight(self, name: str, *shape: int) -> Weight:
        """Name a float32 weight of the file; its values are given at load time."""
        return Weight(name, DType.float32, shape, self.device)


def mean_pool(x: TensorValue, mask: TensorValue) -> TensorValue:
    """Average `x` `[batch, seq, hidden]` over the tokens where `mask` is 1: `[batch, hidden]`."""
    total = ops.sum(x * ops.unsqueeze(mask, -1), axis=1)
    return ops.squeeze(total, 1) / ops.sum(mask, axis=1)


def normalize(x: TensorValue) -> TensorValue:
    """Scale the rows of `x` to unit length."""
    return x / ops.sqrt(ops.sum(x * x, axis=-1))


def build(target: object) -> Graph:
    """Build the encoder for a target.

    Parameters
    ----------
    target
        What the graph will be compiled for; `str(target)` is `cpu` or names a GPU architecture.

    Returns
    -------
    max.graph.Graph
        Inputs: token ids and attention mask (1 for a token, 0 for padding; at least one 1 a row),
        both int64 `[batch, seq]`. Running it fails if `seq` is above 512 or the two shapes differ.
        Output: float32 `[batch, 384]`, rows of unit length.
    """
    device = DeviceRef.CPU() if str(target) == "cpu" else DeviceRef.GPU()
    tokens = TensorType(DType.int64, ["batch", "seq"], device)
    with Graph("minilm", input_types=[tokens, tokens]) as graph:
        token_ids, mask = (value.tensor for value in graph.inputs)
        graph.output(Builder(MiniLM(), device)(token_ids, mask))
    return graph
