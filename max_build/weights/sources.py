"""From what the user names to the files that make up one model.

A path may be a file, a directory, a sharded set's index, or one shard of a set, which stands
for the whole set: shards opened alone have silently been taken for models before. Several
paths mean exactly those files.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from max_build.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Source", "find"]

INDEX_SUFFIX = ".safetensors.index.json"
_SUFFIXES = (".safetensors", ".gguf")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})(?P<suffix>\.\w+)")
_PICKLES = {b"\x80": "a pickle", b"PK\3\4": "a zip archive, as `torch.save` writes"}
#: An index names files and tensors; the largest known have 232,000 tensors in 40 MB.
_MAX_INDEX = 256 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one model.

    Parameters
    ----------
    paths
        In order.
    weight_map
        Tensor name to position in `paths`, if an index says so; then it decides which file a
        tensor is taken from, and tensors it does not name are ignored.
    index
        The index's path, if there is one.
    total_size
        Bytes of all tensors as the index declares them.
    """

    paths: tuple[str, ...]
    weight_map: Mapping[str, int] | None = None
    index: str = ""
    total_size: int | None = None


def find(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Source:
    """Return the files that `path` stands for.

    Raises
    ------
    WeightsError
        If there are none, some are missing, or more than one model could be meant.
    """
    if not isinstance(path, str | os.PathLike):
        paths = tuple(os.fspath(item) for item in path)
        if not paths:
            message = "no weights files were named"
            raise WeightsError(message)
        return find(paths[0]) if len(paths) == 1 else Source(paths)
    path = os.fspath(path)
    if os.path.isdir(path):
        return _directory(path)
    if path.endswith(INDEX_SUFFIX):
        return _indexed(path)
    folder, name = os.path.split(path)
    match = _SHARD.fullmatch(name)
    if match and match["suffix"] in _SUFFIXES:
        index = os.path.join(folder, match["stem"] + INDEX_SUFFIX)
        if match["suffix"] == ".safetensors" and os.path.exists(index):
            return _indexed(index)
        return _complete(folder, match)
    return Source((path,))


def _directory(folder: str) -> Source:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        message = f"cannot list weights directory `{folder}`: {error.strerror}"
        raise WeightsError(message) from error
    found: dict[str, str] = {}  # how a model is called in a message: the path that opens it
    indexed: set[str] = set()
    for name in names:
        if name.endswith(INDEX_SUFFIX):
            found[name] = name
            indexed.update(_weight_map(os.path.join(folder, name))[0].values())
    for name in names:
        if not name.endswith(_SUFFIXES) or name in indexed:
            continue
        match = _SHARD.fullmatch(name)
        label = f"{match['stem']}-*-of-{match['count']}{match['suffix']}" if match else name
        found.setdefault(label, name)
    if not found:
        message = f"directory `{folder}` holds no safetensors or GGUF file"
        raise WeightsError(message)
    if len(found) > 1:
        message = f"directory `{folder}` holds several models: {', '.join(sorted(found))}"
        raise WeightsError(message, hint="name the file to open")
    return find(os.path.join(folder, *found.values()))


def _complete(folder: str, match: re.Match[str]) -> Source:
    count = int(match["count"])
    width = len(match["number"])
    if not 1 <= int(match["number"]) <= count:
        message = f"`{match[0]}` is not one of {count} shards"
        raise WeightsError(message)
    # Listed and compared as sets: a count of 99999 must not mean 99999 probes.
    pattern = re.compile(
        rf"{re.escape(match['stem'])}-(\d{{{width}}})-of-{match['count']}"
        rf"{re.escape(match['suffix'])}"
    )
    try:
        names = os.listdir(folder or ".")
    except OSError as error:
        message = f"cannot list `{folder}`: {error.strerror}"
        raise WeightsError(message) from error
    numbers = {int(m[1]): name for name in names if (m := pattern.fullmatch(name))}
    missing = [number for number in range(1, count + 1) if number not in numbers]
    if missing:
        some = ", ".join(f"{number:0{width}}" for number in missing[:10])
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        where = os.path.join(folder, match[0])
        message = f"`{where}` is one of {count} shards; missing are {some}{more}"
        raise WeightsError(message, hint="a set is opened whole or not at all")
    return Source(tuple(os.path.join(folder, numbers[n]) for n in range(1, count + 1)))


def _indexed(index: str) -> Source:
    weight_map, total_size = _weight_map(index)
    folder = os.path.dirname(index)
    files = {name: number for number, name in enumerate(sorted(set(weight_map.values())))}
    missing = [name for name in files if not os.path.exists(os.path.join(folder, name))]
    if missing:
        message = f"index `{index}` names files that are not there: {', '.join(missing)}"
        raise WeightsError(message)
    return Source(
        tuple(os.path.join(folder, name) for name in files),
        {tensor: files[name] for tensor, name in weight_map.items()},
        index,
        total_size,
    )


def _weight_map(index: str) -> tuple[dict[str, str], int | None]:
    """Return the weight map and the declared total size of an index file."""
    try:
        if os.path.getsize(index) > _MAX_INDEX:
            message = f"index `{index}` is larger than {_MAX_INDEX >> 20} MiB"
            raise WeightsError(message)
        with open(index, "rb") as stream:
            content: Any = msgspec.json.decode(stream.read())
    except OSError as error:
        message = f"cannot read index `{index}`: {error.strerror}"
        raise WeightsError(message) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, WeightsError):
            raise
        message = f"index `{index}` is not valid JSON: {error}"
        raise WeightsError(message) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        message = f"index `{index}` has no `weight_map` object"
        raise WeightsError(message)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            message = f"index `{index}`: tensor {tensor!r}: {name!r} is not a safetensors file"
            raise WeightsError(message)
    for name in set(weight_map.values()):
        if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
            message = f"index `{index}`: file {name!r} leaves the index's directory"
            raise WeightsError(message)
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, int(total) if isinstance(total, int | float) else None


def pickle_kind(start: bytes) -> str:
    """Return what a file that begins with these 9 bytes is, if it may run code when loaded."""
    if start[8:] == b"{":
        return ""  # the other bytes are a safetensors header's length
    return next((kind for magic, kind in _PICKLES.items() if start.startswith(magic)), "")
