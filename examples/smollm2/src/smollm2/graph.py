"""SmolLM2 as a MAX graph: a Llama decoder that takes new tokens and what it remembers of old ones.

The model is SmolLM2-135M-Instruct; weights have the names that its GGUF file gives them. One graph
serves the prompt and every token after it: the cache of keys and values goes in as a tensor and
comes out as the rows to append to it, so the graph changes nothing and never outgrows a buffer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, Weight, ops

__all__ = ["SmolLM2", "build"]

# Added to the score of a position yet to come: exp() of what is left is exactly zero in float32.
MASKED = -1e9


@dataclass(frozen=True, slots=True)
class SmolLM2:
    """The dimensions of the model, and its two constants."""

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
    def row(self) -> tuple[int, int, int, int]:
        """What is remembered of one token: keys and values of every layer and group."""
        return (self.layers, 2, self.groups, self.head)


def build(target: object) -> Graph:
    """Build the decoder for a target; see the notes in the module."""
    return Builder(SmolLM2(), DeviceRef.CPU()).graph()


@dataclass(frozen=True, slots=True)
class Builder:
    model: SmolLM2
    device: DeviceRef
    sub: bool = True
    transposed: bool = False

    def graph(self) -> Graph:
        model = self.model
        tokens = TensorType(DType.int64, ["seq"], self.device)
        past = TensorType(DType.float32, ["past", *model.row], self.device)
        with Graph("smollm2", input_types=[tokens, past]) as graph:
            graph.output(*self(graph, *(value.tensor for value in graph.inputs)))
        return graph

    def __call__(self, graph, token_ids, past):
        model = self.model
        embedding = self.weight("token_embd.weight", model.vocabulary, model.hidden)
        x = ops.gather(embedding, token_ids, axis=0)
        cos, sin, mask = self.positions(token_ids, past)
        lw = [self.layer_weights(n) for n in range(model.layers)]
        if self.sub:
            layer_past = TensorType(DType.float32, ["past", 2, model.groups, model.head], self.device)
            weights = lw[0]
            block = graph.add_subgraph(
                "block",
                input_types=[v.type for v in (x, cos, sin, mask)] + [layer_past] + [w.type for w in weights],
            )
            with block:
                block.output(*self.layer(*(v.tensor for v in block.inputs)))
        rows = []
        for number in range(model.layers):
            args = [x, cos, sin, mask, past[:, number], *lw[number]]
            x, row = (v.tensor for v in ops.call(block, *args)) if self.sub else self.layer(*args)
            rows.append(row)
        x = self.norm(x[-1:], self.weight("output_norm.weight", model.hidden))
        logits = x @ embedding.T
        return logits.reshape((model.vocabulary,)), ops.stack(rows, axis=1)

    def positions(self, token_ids, past):
        model = self.model
        seq, old = token_ids.shape[0], past.shape[0]
        here = ops.range(0, TensorValue(seq), 1, out_dim=seq, dtype=DType.int64, device=self.device) + TensorValue(old)
        frequencies = model.rope_base ** -(
            [2 * i / model.head for i in range(model.head // 2)] and
            __import__("numpy").arange(0, model.head, 2) / model.head)
        frequencies = ops.constant(frequencies, DType.float64, self.device)
        angles = ops.unsqueeze(ops.cast(here, DType.float64), 1) * frequencies
        cos, sin = (ops.unsqueeze(ops.cast(f(angles), DType.float32), 1) for f in (ops.cos, ops.sin))
        keys = ops.range(0, TensorValue(old + seq), 1, out_dim=old + seq, dtype=DType.int64, device=self.device)
        mask = ops.cast(ops.unsqueeze(keys, 0) > ops.unsqueeze(here, 1), DType.float32) * MASKED
        return cos, sin, mask.rebind((seq, "total"))

    def layer_weights(self, n):
        m = self.model
        kv = m.groups * m.head
        p = f"blk.{n}."
        return [
            self.weight(p + "attn_norm.weight", m.hidden),
            self.matrix(p + "attn_q.weight", m.hidden, m.hidden),
            self.matrix(p + "attn_k.weight", kv, m.hidden),
            self.matrix(p + "attn_v.weight", kv, m.hidden),
            self.matrix(p + "attn_output.weight", m.hidden, m.hidden),
            self.weight(p + "ffn_norm.weight", m.hidden),
            self.matrix(p + "ffn_gate.weight", m.intermediate, m.hidden),
            self.matrix(p + "ffn_up.weight", m.intermediate, m.hidden),
            self.matrix(p + "ffn_down.weight", m.hidden, m.intermediate),
        ]

    def layer(self, x, cos, sin, mask, past, attn_norm, q, k, v, out, ffn_norm, gate, up, down):
        y = self.norm(x, attn_norm)
        attended, row = self.attention(y, cos, sin, mask, past, q, k, v)
        x = x + self.linear(attended, out)
        y = self.norm(x, ffn_norm)
        y = ops.silu(self.linear(y, gate)) * self.linear(y, up)
        return x + self.linear(y, down), row

    def attention(self, x, cos, sin, mask, past, q, k, v):
        m = self.model
        seq = x.shape[0]
        each = m.heads // m.groups

        def heads(w, n):
            return self.linear(x, w).reshape((seq, n, m.head))

        query = self.rotate(heads(q, m.heads), cos, sin) / math.sqrt(m.head)
        row = ops.stack([self.rotate(heads(k, m.groups), cos, sin), heads(v, m.groups)], axis=1)
        both = ops.permute(ops.concat([past, row], axis=0).rebind((mask.shape[1], 2, m.groups, m.head)), [1, 2, 0, 3])
        total = both.shape[2]
        query = ops.permute(query.reshape((seq, m.groups, each, m.head)), [1, 2, 0, 3])
        query = query.reshape((m.groups, each * seq, m.head))
        scores = query @ ops.transpose(both[0], -1, -2)
        scores = scores.reshape((m.groups, each, seq, total)) + mask
        weights = ops.softmax(scores).reshape((m.groups, each * seq, total))
        context = (weights @ both[1]).reshape((m.groups, each, seq, m.head))
        return ops.permute(context, [2, 0, 1, 3]).reshape((seq, m.hidden)), row

    def rotate(self, x, cos, sin):
        seq, heads, width = x.shape
        pairs = x.reshape((seq, heads, width // 2, 2))
        even, odd = pairs[..., 0], pairs[..., 1]
        return ops.concat([even * cos - odd * sin, even * sin + odd * cos], axis=-1)

    def linear(self, x, w):
        return x @ (w if self.transposed else w.T)

    def norm(self, x, w):
        return ops.rms_norm(x, w, self.model.norm_epsilon)

    def weight(self, name, *shape):
        return Weight(name, DType.float32, shape, self.device)

    def matrix(self, name, out, inp):
        return self.weight(name, *((inp, out) if self.transposed else (out, inp)))
