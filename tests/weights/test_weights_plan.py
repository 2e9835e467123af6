"""The schedule, and carrying it out into host memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_files import safetensors, tensors

from max_build.errors import WeightsError
from max_build.weights import Tensor, open_weights
from max_build.weights.dtypes import BY_NAME
from max_build.weights.header import Entry
from max_build.weights.plan import SECTOR, Block, Plan, make_plan, ranges
from max_build.weights.stream import execute, staging


class HostSink:
    """Arenas in host memory; a staging buffer is spoiled as soon as it may be used again."""

    def __init__(self, plan: Plan) -> None:
        self.arenas = [bytearray(size) for size in plan.arenas]
        self.sources: list[tuple[int, int]] = []
        self._slots = {
            (lane, slot): memoryview(staging(plan.slot_bytes))
            for lane in range(plan.lanes)
            for slot in range(plan.slots)
        }
        self._pending: dict[tuple[int, int], Block] = {}
        self.finished: set[int] = set()

    def buffer(self, lane: int, slot: int) -> memoryview:
        self._copy(lane, slot)
        buffer = self._slots[lane, slot]
        buffer[:] = b"\xee" * len(buffer)
        return buffer

    def take(self, block: Block) -> None:
        assert (block.lane, block.slot) not in self._pending
        self._pending[block.lane, block.slot] = block  # copied as late as a device may

    def finish(self, lane: int) -> None:
        for key in [key for key in self._pending if key[0] == lane]:
            self._copy(*key)
        self.finished.add(lane)

    def _copy(self, lane: int, slot: int) -> None:
        block = self._pending.pop((lane, slot), None)
        if block is not None:
            source, arena = self._slots[lane, slot], self.arenas[block.file]
            for begin, target, nbytes in block.copies:
                arena[target : target + nbytes] = source[begin : begin + nbytes]


class FakeFile:
    """Stands where a plan only asks which file it is."""

    path = "x"


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Tensor]:
    """Tensors of one to three files, with gaps between them and some twice."""
    found: dict[str, Tensor] = {}
    for number in range(draw(st.integers(1, 3))):
        file, offset = FakeFile(), draw(st.integers(8, 5000))
        for size in draw(st.lists(st.integers(0, 20_000), max_size=8)):
            entry = Entry(BY_NAME["uint8"], (size,), offset, size)
            name = f"{number}.{len(found)}"
            found[name] = Tensor(name, entry, file)  # type: ignore[arg-type]
            if draw(st.booleans()):
                found[f"{name}.tied"] = found[name]
            offset += size + draw(st.sampled_from([0, 0, 0, 1, 300, 9000]))
    return found


@settings(max_examples=150, deadline=None)
@given(
    layouts(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([SECTOR, 3 * SECTOR, 16 * SECTOR]),
    st.sampled_from([1, 16, 256]),
    st.sampled_from([0, 512, 8192]),
)
def test_a_plan_delivers_each_byte_once(
    found: dict[str, Tensor], lanes: int, slots: int, slot_bytes: int, alignment: int, gap: int
) -> None:
    plan = make_plan(
        found, lanes=lanes, slots=slots, slot_bytes=slot_bytes, alignment=alignment, gap=gap
    )
    files = [id(file) for file in plan.files]
    source: dict[tuple[int, int], int] = {}  # arena and byte there -> byte of the file
    for turn, block in enumerate(plan.blocks):
        assert block.offset % SECTOR == 0
        assert 0 < block.nbytes <= slot_bytes
        assert (block.lane, block.slot) == (turn % lanes, turn // lanes % slots)
        for begin, target, nbytes in block.copies:
            assert begin + nbytes <= block.nbytes
            assert target + nbytes <= plan.arenas[block.file]
            for i in range(0, nbytes, 97):
                assert source.setdefault((block.file, target + i), block.offset + begin + i) == (
                    block.offset + begin + i
                )
    unique = {(id(t.file), t.offset, t.nbytes) for t in found.values() if t.nbytes}
    assert plan.nbytes == sum(nbytes for _, _, nbytes in unique)
    assert plan.read_bytes <= plan.nbytes + len(plan.blocks) * SECTOR + len(found) * gap
    for name, tensor in found.items():
        arena, offset, nbytes = plan.places[name]
        assert nbytes == tensor.nbytes
        assert offset % alignment == 0
        if nbytes:
            assert files[arena] == id(tensor.file)
            first = next(
                block.offset + copy.source + offset - copy.target
                for block in plan.blocks
                if block.file == arena
                for copy in block.copies
                if copy.target <= offset < copy.target + copy.nbytes
            )
            assert first == tensor.offset


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = []
    rng = np.random.default_rng(0)
    for number, sizes in enumerate([(100_000, 3, 64, 1), (5, 70_000), (1,)]):
        specs = {f"{number}.{i}": ("U8", [size]) for i, size in enumerate(sizes)}
        header, _ = tensors(**specs)
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(safetensors(header, rng.bytes(sum(sizes))))
        found.append(path)
    return found


@pytest.mark.parametrize("direct", [False, True, None])
@pytest.mark.parametrize(("lanes", "slots"), [(1, 1), (1, 2), (3, 2)])
def test_what_arrives_is_what_the_files_hold(
    direct: bool | None, lanes: int, slots: int, paths: list[Path]
) -> None:
    weights = open_weights(paths)
    plan = make_plan(weights, lanes=lanes, slots=slots, slot_bytes=4 * SECTOR)
    sink, steps = HostSink(plan), []
    done = execute(plan, sink, lambda *step: steps.append(step), direct=direct)
    for name, tensor in weights.items():
        arena, offset, nbytes = plan.places[name]
        assert bytes(sink.arenas[arena][offset : offset + nbytes]) == tensor.tobytes()
    assert done.nbytes == weights.nbytes
    assert steps[-1] == (plan.read_bytes, plan.read_bytes)
    assert sink.finished == set(range(min(lanes, len(plan.blocks))))


def test_a_subset_is_read_without_the_rest(paths: list[Path]) -> None:
    weights = open_weights(paths)
    some = {name: weights[name] for name in ("0.1", "1.1")}
    plan = make_plan(some)
    assert len(plan.files) == 2
    assert plan.read_bytes < 90_000


def test_nothing_to_deliver_is_no_plan(paths: list[Path]) -> None:
    plan = make_plan({})
    assert (plan.blocks, plan.arenas, plan.nbytes) == ((), (), 0)
    assert execute(plan, HostSink(plan)).nbytes == 0


def test_near_ranges_are_joined(paths: list[Path]) -> None:
    weights = open_weights(paths[0])
    whole = ranges(weights.values())
    assert [(offset, nbytes) for _, offset, nbytes in whole] == [
        (weights["0.0"].offset, weights.nbytes)
    ]
    assert len(ranges([weights["0.0"], weights["0.3"]], gap=10)) == 2


def test_a_file_that_shrinks_stops_the_transfer(paths: list[Path]) -> None:
    weights = open_weights(paths)
    plan = make_plan(weights, lanes=2, slot_bytes=SECTOR)
    os.truncate(paths[0], 50_000)
    with pytest.raises(WeightsError, match="was changed while in use"):
        execute(plan, HostSink(plan))
    for file in plan.files:
        file.check = lambda: None  # type: ignore[method-assign]
    for direct in (False, True):
        with pytest.raises(WeightsError, match=r"0\.safetensors` at offset .*the file ends there"):
            execute(plan, HostSink(plan), direct=direct)


def test_a_failing_sink_stops_the_transfer(paths: list[Path]) -> None:
    plan = make_plan(open_weights(paths), lanes=3, slot_bytes=SECTOR)

    class Broken(HostSink):
        def take(self, block: Block) -> None:
            if block.offset > 2 * SECTOR:
                message = "device lost"
                raise RuntimeError(message)
            super().take(block)

    sink = Broken(plan)
    with pytest.raises(RuntimeError, match="device lost"):
        execute(plan, sink)
    assert sink.finished == {0, 1, 2}
