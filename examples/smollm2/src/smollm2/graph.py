"""SmolLM2 as a MAX graph: a Llama decoder that goes on from the keys and values of earlier tokens.

One graph serves the prompt and each token after it. What each layer remembers of earlier tokens
goes in as a tensor, and what it is to remember of the new ones comes out, so nothing is changed in
place and no buffer inside the graph can be outgrown. Weights have the names of the GGUF file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops

from smollm2.model import MODEL, SmolLM2

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["build"]

# Added to the score of a token yet to come: exp() of what is left is exactly zero in float32.
MASKED = -1e9


@dataclass(frozen=True, slots=True)
class Builder:
    """Adds the operations of the model to the graph being built, all on one device."""

    model: SmolLM2
    device: DeviceRef

    def __call__(
        self, graph: Graph, token_ids: TensorValue, *past: TensorValue
    ) -> tuple[TensorValue, ...]:
        """Logits after the last token, and what each layer is to remember; see `build`."""
        model = self.model
        embedding = self.weight("token_embd", model.vocabulary, model.hidden)
        layers = [
            [self.weight(f"blk.{n}.{part}", *shape) for part, shape in model.layer_weights.items()]
            for n in range(model.layers)
        ]
        x = ops.gather(embedding, token_ids, axis=0)
        positions = self.positions(token_ids, past[0])
        # All layers are alike: the compiler sees one, with its weights as arguments.
        inputs = [x, past[0], *positions, *layers[0]]
        layer = graph.add_subgraph("layer", input_types=[value.type for value in inputs])
        with layer:
            values = [value.tensor for value in layer.inputs]
            count = len(model.layer_weights)
            weights = dict(zip(model.layer_weights, values[-count:], strict=True))
            layer.output(*self.layer(weights, *values[:-count]))
        rows = []
        for mine, known in zip(layers, past, strict=True):
            x, row = (v.tensor for v in ops.call(layer, x, known, *positions, *mine))
            rows.append(row)
        # Unlike a plain slice, which reads before the first row if there is none, a rebind is
        # checked at run time.
        end = TensorValue(token_ids.shape[0])
        x = x[(slice(end - 1, end), "last"), :].rebind(
            (1, model.hidden), "a step takes at least one token"
        )
        logits = self.norm(x, self.weight("output_norm", model.hidden)) @ embedding.T
        return logits.reshape((model.vocabulary,)), *rows

    def positions(
        self, token_ids: TensorValue, past: TensorValue
    ) -> tuple[TensorValue, TensorValue, TensorValue]:
        """What depends on where the tokens are.

        Cosines and sines of the rotary angles, `[seq, 1, head / 2]`, in float64 until they are
        rounded once; and the bias `[seq, total]` that hides from each token those after it.
        """
        model, seq, old = self.model, token_ids.shape[0], past.shape[0]
        position = self.count(seq) + TensorValue(old)
        # The last bits of a power depend on the processor. Rounded, the graph, and so its key, is
        # the same everywhere.
        frequency = np.round(model.rope_base ** -(np.arange(0, model.head, 2) / model.head), 12)
        angle = ops.unsqueeze(ops.cast(position, DType.float64), 1) * ops.constant(
            frequency, DType.float64, self.device
        )
        cos, sin = (
            ops.unsqueeze(ops.cast(function(angle), DType.float32), 1)
            for function in (ops.cos, ops.sin)
        )
        future = ops.unsqueeze(self.count(old + seq), 0) > ops.unsqueeze(position, 1)
        bias = ops.cast(future, DType.float32) * MASKED
        # A subgraph takes no sums of dimensions: theirs gets a name.
        return cos, sin, bias.rebind((seq, "total"))

    def layer(
        self,
        weights: Mapping[str, TensorValue],
        x: TensorValue,
        past: TensorValue,
        cos: TensorValue,
        sin: TensorValue,
        bias: TensorValue,
    ) -> tuple[TensorValue, TensorValue]:
        """One decoder layer on `x` `[seq, hidden]` and what it knows of the past.

        Returns
        -------
        tuple
            The new `x`, and the keys and values to remember: `[seq, 2, groups, head]`.
        """
        model, seq = self.model, x.shape[0]
        y = self.norm(x, weights["attn_norm"])
        query, key, value = (
            (y @ weights[f"attn_{part}"].T).reshape((seq, count, model.head))
            for part, count in (("q", model.heads), ("k", model.groups), ("v", model.groups))
        )
        row = ops.stack([rotate(key, cos, sin), value], axis=1)
        attended = self.attention(rotate(query, cos, sin), past, row, bias)
        x = x + attended @ weights["attn_output"].T
        y = self.norm(x, weights["ffn_norm"])
        inner = ops.silu(y @ weights["ffn_gate"].T) * (y @ weights["ffn_up"].T)
        return x + inner @ weights["ffn_down"].T, row

    def attention(
        self, query: TensorValue, past: TensorValue, row: TensorValue, bias: TensorValue
    ) -> TensorValue:
        """Attend to old and new tokens, heads of a group sharing keys and values: `[seq, hidden]`.

        The queries of a group are rows of one matrix, so that shared keys are not repeated.
        """
        model = self.model
        seq, total = bias.shape
        each = model.heads // model.groups
        known = ops.concat([past, row]).rebind((total, 2, model.groups, model.head))
        keys, values = (ops.permute(known[:, part], [1, 0, 2]) for part in (0, 1))
        query = ops.permute(query.reshape((seq, model.groups, each, model.head)), [1, 2, 0, 3])
        query = query.reshape((model.groups, each * seq, model.head)) / math.sqrt(model.head)
        scores = query @ ops.transpose(keys, 1, 2)
        scores = scores.reshape((model.groups, each, seq, total)) + bias
        share = ops.softmax(scores).reshape((model.groups, each * seq, total))
        context = (share @ values).reshape((model.groups, each, seq, model.head))
        return ops.permute(context, [2, 0, 1, 3]).reshape((seq, model.hidden))

    def norm(self, x: TensorValue, weight: TensorValue) -> TensorValue:
        """Scale rows to a root mean square of one, then by `weight`."""
        return ops.rms_norm(x, weight, self.model.norm_epsilon)

    def count(self, length: object) -> TensorValue:
        """0, 1, … of a symbolic length: int64 `[length]`."""
        stop = TensorValue(length)
        return ops.range(0, stop, out_dim=length, dtype=DType.int64, device=self.device)

    def weight(self, name: str, *shape: int) -> Weight:
        """Name a weight of the file; its values are given at load time, as float32."""
        return Weight(f"{name}.weight", DType.float32, shape, self.device)


def rotate(x: TensorValue, cos: TensorValue, sin: TensorValue) -> TensorValue:
    """Rotary embedding of `[seq, heads, head]`: neighbours are turned as a pair.

    The first of each pair come out before the second ones: attention is a sum over a head's
    components, so their order is free if keys and queries agree on it.
    """
    seq, heads, width = x.shape
    pairs = x.reshape((seq, heads, width // 2, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    return ops.concat([first * cos - second * sin, first * sin + second * cos], axis=-1)


def build(target: object) -> Graph:
    """Build the decoder for a target.

    Parameters
    ----------
    target
        What the graph will be compiled for; `str(target)` has to be `cpu`.

    Returns
    -------
    max.graph.Graph
        Inputs: ids of the new tokens, int64 `[seq]`; for each layer, keys and values of all tokens
        before them, float32 `[past, 2, groups, head]`, in order, `past` 0 at the start. Running
        it fails if there is no new token, or one beyond the vocabulary.
        Outputs: logits after the last new token, float32 `[vocabulary]`; for each layer, keys and
        values of the new tokens, float32 `[seq, 2, groups, head]`, to be appended to the past.

    Raises
    ------
    ValueError
        If the target is another.
    """
    if str(target) != "cpu":
        message = f"this graph is written for the CPU, not for {target}"
        raise ValueError(message)
    device = DeviceRef.CPU()
    tokens = TensorType(DType.int64, ["seq"], device)
    past = TensorType(DType.float32, ["past", *MODEL.row], device)
    with Graph("smollm2", input_types=[tokens] + [past] * MODEL.layers) as graph:
        inputs = (value.tensor for value in graph.inputs)
        graph.output(*Builder(MODEL, device)(graph, *inputs))
    return graph
