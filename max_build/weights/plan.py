"""What is read when, into which buffer, and copied where: a pure schedule.

A plan moves tensors from files into *arenas*, one allocation for each file, through a ring of
staging buffers: a few *lanes* work side by side, and each has a few *slots* so that it can
read into one while the last is still being copied. Nothing here touches a file or a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from max_build.weights.pages import File
    from max_build.weights.tensor import Tensor

__all__ = ["Block", "Copy", "Place", "Plan", "by_device", "make_plan", "ranges"]

#: Gap between two tensors that costs less to read than to seek over, in bytes.
GAP = 64 << 10
#: Alignment of tensors in an arena: what kernels may ask of a device pointer.
ALIGNMENT = 256
#: Granule of O_DIRECT offsets and lengths; divides every block's offset.
SECTOR = 4096


class Copy(NamedTuple):
    """`nbytes` from `source` in the staging buffer to `target` in the arena."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """One read and what becomes of it.

    Parameters
    ----------
    file
        Number of the file in the plan, which is also the arena's.
    offset, nbytes
        What to read: `offset` is a multiple of a sector.
    lane, slot
        Into which staging buffer.
    copies
        From there to the arena; they do not overlap.
    """

    file: int
    offset: int
    nbytes: int
    lane: int
    slot: int
    copies: tuple[Copy, ...]


class Place(NamedTuple):
    """Where a tensor ends up: `nbytes` at `offset` of an arena."""

    arena: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule of reads and copies.

    Parameters
    ----------
    files
        The files to read.
    arenas
        Bytes of the arena of each file.
    places
        Tensor name to its place; two names of one tensor share it.
    blocks
        The reads, in the order in which each lane takes its own.
    lanes, slots, slot_bytes
        The staging buffers: `lanes * slots` of `slot_bytes` each.
    """

    files: tuple[File, ...]
    arenas: tuple[int, ...]
    places: dict[str, Place]
    blocks: tuple[Block, ...]
    lanes: int
    slots: int
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return sum(copy.nbytes for block in self.blocks for copy in block.copies)

    @property
    def read_bytes(self) -> int:
        """Bytes that are read."""
        return sum(block.nbytes for block in self.blocks)


def by_device(
    tensors: Mapping[str, Tensor], places: Mapping[str, str]
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each device, by the device's name; `places` says which has which."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(places[name], {})[name] = tensor
    return found


def ranges(tensors: Iterable[Tensor], gap: int = GAP) -> list[tuple[File, int, int]]:
    """Return the (file, offset, nbytes) that cover `tensors`, in file order, near ones joined."""
    found: list[tuple[File, int, int]] = []
    for file, extents in _by_file(tensors):
        begin, end = extents[0]
        for first, last in extents:
            if first > end + gap:
                found.append((file, begin, end - begin))
                begin = first
            end = max(end, last)
        found.append((file, begin, end - begin))
    return found


def make_plan(
    tensors: Mapping[str, Tensor],
    *,
    lanes: int = 2,
    slots: int = 2,
    slot_bytes: int = 4 << 20,
    alignment: int = ALIGNMENT,
    gap: int = GAP,
) -> Plan:
    """Return the schedule that delivers `tensors`.

    Parameters
    ----------
    tensors
        What to deliver, under the names to deliver it as; converted ones as they are stored.
    lanes, slots, slot_bytes
        The staging buffers; `slot_bytes` is a multiple of a sector.
    alignment
        Of each tensor in its arena.
    gap
        Bytes that are rather read and dropped than skipped.
    """
    files: list[File] = []
    arenas: list[int] = []
    targets: dict[tuple[int, int, int], Place] = {}
    cuts: list[tuple[int, int, int, tuple[Copy, ...]]] = []
    stored = {name: tensor.stored for name, tensor in tensors.items()}
    for file, extents in _by_file(stored.values()):
        number = len(files)
        files.append(file)
        segments, size = _layout(extents, alignment)
        for (begin, end), target in segments.items():
            targets[id(file), begin, end] = Place(number, target, end - begin)
        arenas.append(size)
        cuts += ((number, *cut) for cut in _cut(_merge(segments), slot_bytes, gap))
    blocks = tuple(
        Block(file, offset, nbytes, turn % lanes, turn // lanes % slots, copies)
        for turn, (file, offset, nbytes, copies) in enumerate(cuts)
    )
    places = {
        name: targets[id(tensor.file), tensor.offset, tensor.offset + tensor.nbytes]
        if tensor.nbytes
        else Place(0, 0, 0)
        for name, tensor in stored.items()
    }
    return Plan(tuple(files), tuple(arenas), places, blocks, lanes, slots, slot_bytes)


def _by_file(tensors: Iterable[Tensor]) -> list[tuple[File, list[tuple[int, int]]]]:
    """Return the distinct (begin, end) of the non-empty tensors of each file, sorted."""
    found: dict[int, tuple[File, set[tuple[int, int]]]] = {}
    for tensor in (tensor.stored for tensor in tensors):
        if tensor.nbytes:
            extents = found.setdefault(id(tensor.file), (tensor.file, set()))[1]
            extents.add((tensor.offset, tensor.offset + tensor.nbytes))
    return [(file, sorted(extents)) for file, extents in found.values()]


def _layout(
    extents: list[tuple[int, int]], alignment: int
) -> tuple[dict[tuple[int, int], int], int]:
    """Return the arena offset of each extent, one behind the other, and the arena's size."""
    mask = alignment - 1
    targets: dict[tuple[int, int], int] = {}
    position = 0
    for extent in extents:
        targets[extent] = position
        position = (position + extent[1] - extent[0] + mask) & ~mask
    return targets, position


def _merge(targets: dict[tuple[int, int], int]) -> list[tuple[int, int, int]]:
    """Return (begin, end, target) with those joined that stay together on the way."""
    merged: list[tuple[int, int, int]] = []
    first = last = shift = -1
    for (begin, end), target in targets.items():
        if begin == last and target - begin == shift:
            last = end
            continue
        if first >= 0:
            merged.append((first, last, first + shift))
        first, last, shift = begin, end, target - begin
    if first >= 0:
        merged.append((first, last, first + shift))
    return merged


def _cut(
    segments: list[tuple[int, int, int]], most: int, gap: int
) -> list[tuple[int, int, tuple[Copy, ...]]]:
    """Return (offset, nbytes, copies) of reads that start on a sector and fit a slot."""
    blocks: list[tuple[int, int, tuple[Copy, ...]]] = []
    copies: list[Copy] = []
    start = end = 0
    for first, last, target in segments:
        begin = first
        while begin < last:
            if copies and (begin > end + gap or begin >= start + most):
                blocks.append((start, end - start, tuple(copies)))
                copies = []
            if not copies:
                start = begin // SECTOR * SECTOR
            stop = min(last, start + most)
            copies.append(Copy(begin - start, target + begin - first, stop - begin))
            begin = end = stop
    if copies:
        blocks.append((start, end - start, tuple(copies)))
    return blocks
