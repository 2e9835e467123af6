"""What is read when, into which buffer, and copied where: a pure schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from max_build.weights.pages import File
    from max_build.weights.tensor import Tensor

__all__ = ["ranges"]

#: Gap between two tensors that costs less to read than to seek over, in bytes.
GAP = 64 << 10


def ranges(tensors: Iterable[Tensor], gap: int = GAP) -> list[tuple[File, int, int]]:
    """Return the (file, offset, nbytes) that cover `tensors`, in file order, near ones joined."""
    spans: dict[int, tuple[File, list[tuple[int, int]]]] = {}
    for tensor in tensors:
        span = (tensor.offset, tensor.offset + tensor.nbytes)
        spans.setdefault(id(tensor.file), (tensor.file, []))[1].append(span)
    found: list[tuple[File, int, int]] = []
    for file, pairs in spans.values():
        pairs.sort()
        begin, end = pairs[0]
        for first, last in pairs:
            if first > end + gap:
                found.append((file, begin, end - begin))
                begin = first
            end = max(end, last)
        found.append((file, begin, end - begin))
    return found
