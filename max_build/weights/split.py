"""Split GGUF sets: `name-00001-of-00003.gguf`, whose shards each say which they are.

Metadata as written by llama.cpp's `gguf-split`: `split.no` counts from 0 where file names
count from 1, `split.count` is the number of shards, `split.tensors.count` that of all tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from max_build.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from max_build.weights.collection import Shard

__all__ = ["whole"]


def whole(shards: Sequence[Shard]) -> list[Shard]:
    """Return `shards` in order, if they are one whole model.

    Raises
    ------
    WeightsError
        If a shard is missing, occurs twice or belongs to another set.
    """
    counts = {_number(shard, "split.count", 1) for shard in shards}
    if counts in ({0}, {1}):
        return list(shards)
    names = ", ".join(f"`{shard.file.path}`" for shard in shards)
    if counts != {len(shards)}:
        declared = ", ".join(str(count) for count in sorted(counts))
        message = f"{len(shards)} of a set of {declared} GGUF shards: {names}"
        raise WeightsError(message, hint="a set is opened whole or not at all")
    ordered = sorted(shards, key=lambda shard: _number(shard, "split.no", -1))
    numbers = [_number(shard, "split.no", -1) for shard in ordered]
    if numbers != list(range(len(shards))):
        message = f"`split.no` of {names} must be 0 to {len(shards) - 1}, are {numbers}"
        raise WeightsError(message)
    for number, shard in enumerate(ordered, 1):
        name = shard.file.path
        if (part := f"-{number:05}-of-") not in name and "-of-" in name:
            message = f"`{name}` says that it is shard {number} of its set: not {part!r} in name"
            raise WeightsError(message, hint="it was renamed, or belongs to another set")
    tensors = sum(len(shard.header.entries) for shard in shards)
    said = {_number(shard, "split.tensors.count", tensors) for shard in shards}
    if said != {tensors}:
        message = f"`split.tensors.count` of {names} says {sorted(said)}, found {tensors}"
        raise WeightsError(message)
    return ordered


def _number(shard: Shard, key: str, default: int) -> int:
    value = shard.header.metadata.get(key, default)
    if type(value) is not int:
        message = f"`{shard.file.path}`: metadata {key!r} must be a whole number, is {value!r:.100}"
        raise WeightsError(message, hint="the file is damaged or was written wrongly")
    return value
