"""The softmax of each row of a matrix in one pass over memory, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_rows(out, x, stride, columns, BLOCK: tl.constexpr):  # noqa: N803
    """One program for each row; `BLOCK` is a power of 2 of at least `columns`."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row * stride + column, mask=inside, other=-float("inf"))
    # Subtracting the largest keeps the exponentials finite.
    weights = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * stride + column, weights / tl.sum(weights, axis=0), mask=inside)
