"""Weights files: found, validated and viewed where they lie.

>>> weights = open_weights("model.safetensors")      # doctest: +SKIP
>>> weights["embed.weight"].numpy()                  # doctest: +SKIP
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from max_build.errors import WeightsError
from max_build.weights import gguf, safetensors, split
from max_build.weights.collection import Shard, Weights
from max_build.weights.device import cuda_buffers
from max_build.weights.pages import File
from max_build.weights.sources import Source, find, pickle_kind
from max_build.weights.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from max_build.weights.policy import Mode
    from max_build.weights.remembered import Remembered

__all__ = ["Tensor", "Weights", "cuda_buffers", "open_weights"]


def open_weights(
    path_or_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    mode: Mode = "auto",
    memo: str | os.PathLike[str] | None = None,
) -> Weights:
    """Open the weights of a model: headers are read and validated, nothing is copied.

    Parameters
    ----------
    path_or_paths
        A safetensors or GGUF file, the index of a sharded set, any shard of one, a directory
        that holds one model, or several files.
    mode
        `map` reads tensors in place, `read` reads them into memory in large pieces when they
        are first asked for, `auto` maps local files and reads those of network filesystems.

    memo
        A folder that remembers validated headers between processes; long ones are then
        opened without being parsed. Only of use for thousands of tensors, or vocabularies.

    Raises
    ------
    WeightsError
        If a file is missing, damaged, or not what its set says it is.
    """
    if mode not in ("auto", "map", "read"):
        message = f"mode must be 'auto', 'map' or 'read', got {mode!r}"
        raise WeightsError(message)
    source = find(path_or_paths)
    remembered = None
    if memo is not None:
        from max_build.weights.remembered import Remembered

        remembered = Remembered(os.fspath(memo))
    shards = [_shard(File(path, mode), remembered) for path in source.paths]
    if shards[0].header.format == "gguf":
        shards = split.whole(shards)
    formats = {shard.header.format for shard in shards}
    if len(formats) > 1:
        message = f"safetensors and GGUF files cannot be mixed: {', '.join(source.paths)}"
        raise WeightsError(message)
    if source.weight_map is not None:
        return _by_index(source, shards)
    return Weights(shards, _merged(shards) if len(shards) > 1 else None)


def _shard(file: File, remembered: Remembered | None) -> Shard:
    if remembered is not None and (header := remembered.by_stamp(file)):
        return Shard(file, header)
    start = file.read(0, min(file.size, 9))
    if start.startswith(gguf.MAGIC):
        header = gguf.read(file)
    elif kind := pickle_kind(start):
        message = f"`{file.path}` is {kind}: opening it could run code"
        raise WeightsError(message, hint="convert it to safetensors")
    else:
        text = safetensors.read(file)
        if remembered is not None and (known := remembered.by_header(file, text)):
            return Shard(file, known)
        header = safetensors.parse(text, path=file.path, size=file.size)
    if remembered is not None:
        remembered.put(file, header)
    return Shard(file, header)


def _merged(shards: list[Shard]) -> dict[str, int]:
    """Return which shard holds each tensor; a name in two of them has no meaning."""
    places: dict[str, int] = {}
    for number, shard in enumerate(shards):
        places.update(dict.fromkeys(shard.header.entries, number))
    if len(places) != sum(len(shard.header.entries) for shard in shards):
        seen: dict[str, int] = {}
        for number, shard in enumerate(shards):
            for name in shard.header.entries:
                if seen.setdefault(name, number) != number:
                    files = f"`{shards[seen[name]].file.path}` and `{shard.file.path}`"
                    message = f"tensor {name!r} is in both {files}"
                    raise WeightsError(message, hint="an index file can say which one counts")
    return places


def _by_index(source: Source, shards: list[Shard]) -> Weights:
    places = source.weight_map or {}
    lost = sorted(
        f"{name!r} (said to be in `{shards[number].file.path}`)"
        for name, number in places.items()
        if name not in shards[number].header.entries
    )
    if lost:
        some = ", ".join(lost[:10]) + (f" and {len(lost) - 10} more" if len(lost) > 10 else "")
        message = f"index `{source.index}` names tensors that are not there: {some}"
        raise WeightsError(message)
    problems = []
    if extra := sum(len(shard.header.entries) for shard in shards) - len(places):
        problems.append(f"`{source.index}` leaves out {extra} of the tensors in its files")
    weights = Weights(shards, places, problems)
    if source.total_size not in (None, weights.nbytes):
        text = f"declares {source.total_size} bytes in all; there are {weights.nbytes}"
        return Weights(shards, places, [*problems, f"`{source.index}` {text}"])
    return weights
