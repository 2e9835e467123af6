"""Which weights are these? XXH3 of every tensor and of all, at the speed of reading.

A fingerprint depends on names, types, shapes and bytes alone: the same model in one file or
in ten has the same. XXH3 tells different weights apart; it does not resist an adversary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from max_build.weights.pages import CHUNK, in_parallel
from max_build.weights.stream import Reader, staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from max_build.weights.tensor import Tensor

__all__ = ["Difference", "Fingerprint", "compare", "fingerprint"]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """XXH3-128 digests, in hexadecimal.

    Parameters
    ----------
    total
        Of all tensors.
    tensors
        Of each one's bytes, by name.
    """

    total: str
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Difference:
    """How two sets of weights differ; names, sorted.

    Parameters
    ----------
    removed, added
        Only in the first; only in the second.
    retyped
        Of another type or shape, and so.
    changed
        Of other bytes.
    """

    removed: tuple[str, ...]
    added: tuple[str, ...]
    retyped: tuple[str, ...]
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.retyped or self.changed)


def fingerprint(
    weights: Mapping[str, Tensor], progress: Callable[[int, int], object] | None = None
) -> Fingerprint:
    """Return the fingerprint of `weights`; memory stays at a few megabytes.

    Parameters
    ----------
    weights
        The tensors; converted ones count as they are stored.
    progress
        Called with the bytes read so far and the bytes in all.

    Raises
    ------
    WeightsError
        If a file can no longer be read or was changed meanwhile.
    """
    import threading

    import xxhash

    tensors = [(name, tensor.stored) for name, tensor in weights.items()]
    digests: dict[str, bytes] = {}
    total = sum(tensor.nbytes for _, tensor in tensors)
    done, lock, local = 0, threading.Lock(), threading.local()

    def hash_group(group: list[tuple[str, Tensor]]) -> None:
        nonlocal done
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(staging(CHUNK))
        buffer: memoryview = local.buffer
        first = group[0][1]
        reader = Reader(first.file)
        try:
            if len(group) > 1:
                last = group[-1][1]
                reader.read(first.offset, last.offset + last.nbytes - first.offset, buffer)
                for name, tensor in group:
                    begin = tensor.offset - first.offset
                    part = buffer[begin : begin + tensor.nbytes]
                    digests[name] = xxhash.xxh3_128_digest(part)
            else:
                digests[group[0][0]] = _hash_large(first, reader, buffer)
        finally:
            reader.close()
        if progress is not None:
            with lock:
                done += sum(tensor.nbytes for _, tensor in group)
                progress(done, total)

    in_parallel(hash_group, list(_groups(tensors)))
    for file in {id(tensor.file): tensor.file for _, tensor in tensors}.values():
        file.check()
    whole = xxhash.xxh3_128()
    for name, tensor in sorted(tensors):
        about = f"{tensor.dtype}\0{tensor.order}\0{tensor.shape}".encode()
        for part in (name.encode(), about, digests[name]):
            whole.update(len(part).to_bytes(8, "little") + part)
    found = {name: digests[name].hex() for name, _ in tensors}
    return Fingerprint(whole.hexdigest(), found)


def _hash_large(tensor: Tensor, reader: Reader, buffer: memoryview) -> bytes:
    import xxhash

    state = xxhash.xxh3_128()
    end = tensor.offset + tensor.nbytes
    for begin in range(tensor.offset, end, CHUNK):
        length = min(CHUNK, end - begin)
        reader.read(begin, length, buffer)
        state.update(buffer[:length])
    return state.digest()


def _groups(tensors: list[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield runs of tensors that lie in one chunk of a file, and large tensors alone."""
    group: list[tuple[str, Tensor]] = []
    for item in sorted(tensors, key=lambda item: (item[1].path, item[1].offset)):
        tensor = item[1]
        if group:
            first = group[0][1]
            fits = tensor.offset + tensor.nbytes - first.offset <= CHUNK
            if first.file is not tensor.file or not fits:
                yield group
                group = []
        group.append(item)
    if group:
        yield group


def compare(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Difference:
    """Return what differs between two sets of weights.

    Raises
    ------
    WeightsError
        If a file can no longer be read or was changed meanwhile.
    """
    both = [name for name in first if name in second]
    retyped = {name for name in both if _kind(first[name]) != _kind(second[name])}
    same = [name for name in both if name not in retyped]
    one = fingerprint({name: first[name] for name in same}).tensors
    other = fingerprint({name: second[name] for name in same}).tensors
    return Difference(
        tuple(sorted(first.keys() - second.keys())),
        tuple(sorted(second.keys() - first.keys())),
        tuple(sorted(retyped)),
        tuple(sorted(name for name in same if one[name] != other[name])),
    )


def _kind(tensor: Tensor) -> tuple[str, str, tuple[int, ...]]:
    return tensor.dtype, tensor.order, tensor.shape
