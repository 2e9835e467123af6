"""Where a plan's blocks go: arenas on a device, filled through pinned staging buffers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from max_build.weights.plan import SECTOR

if TYPE_CHECKING:
    from max_build.weights.plan import Block, Plan

__all__ = ["CudaSink", "MaxSink"]


class MaxSink:
    """Arenas and pinned staging of a `max.driver.Device`; copies on its default queue.

    Parameters
    ----------
    plan
        What will be delivered.
    device
        Where to.
    """

    def __init__(self, plan: Plan, device: Any) -> None:
        from max.driver import Buffer, Usage
        from max.dtype import DType

        self._queue = device.default_queue
        self._lock = threading.Lock()
        usage = Usage.DEFAULT if device.is_host else Usage.STAGING | Usage.UNTRACKED
        self.arenas = [Buffer(DType.uint8, [size], device=device) for size in plan.arenas]
        slots = [(lane, slot) for lane in range(plan.lanes) for slot in range(plan.slots)]
        self._slots: dict[tuple[int, int], tuple[Any, memoryview]] = {}
        for key in slots:
            whole = Buffer(DType.uint8, [plan.slot_bytes + SECTOR], device=device, usage=usage)
            view = whole.to_numpy()
            start = -view.ctypes.data % SECTOR
            end = start + plan.slot_bytes
            self._slots[key] = whole[start:end], view[start:end].data
        self._events: dict[tuple[int, int], Any] = {}

    def buffer(self, lane: int, slot: int) -> memoryview:
        """Return the staging buffer, once the copies from it have ended."""
        if event := self._events.pop((lane, slot), None):
            event.synchronize()
        return self._slots[lane, slot][1]

    def take(self, block: Block) -> None:
        """Start the block's copies."""
        key = block.lane, block.slot
        source, arena = self._slots[key][0], self.arenas[block.file]
        with self._lock:
            for begin, target, nbytes in block.copies:
                part = source[begin : begin + nbytes]
                arena[target : target + nbytes].inplace_copy_from(part)
            self._events[key] = self._queue.record_event()

    def finish(self, lane: int) -> None:
        """Wait for the lane's copies."""
        for key in [key for key in self._events if key[0] == lane]:
            self._events.pop(key).synchronize()


class CudaSink:
    """Arenas and pinned staging of a CUDA device by `cuda.core`; a stream for each lane.

    Parameters
    ----------
    plan
        What will be delivered.
    device_id
        Ordinal of the device.
    """

    def __init__(self, plan: Plan, device_id: int = 0) -> None:
        import ctypes

        from cuda.core import Device, LegacyPinnedMemoryResource

        self._device = Device(device_id)
        self._device.set_current()
        self._streams = [self._device.create_stream() for _ in range(plan.lanes)]
        first = self._streams[0]
        self.arenas = [self._device.allocate(size, stream=first) for size in plan.arenas]
        first.sync()  # the other lanes' streams may use them from here on
        pinned = LegacyPinnedMemoryResource()
        self._slots: dict[tuple[int, int], tuple[Any, memoryview]] = {}
        for lane in range(plan.lanes):
            for slot in range(plan.slots):
                memory = pinned.allocate(plan.slot_bytes)
                place = (ctypes.c_ubyte * plan.slot_bytes).from_address(int(memory.handle))
                self._slots[lane, slot] = memory, memoryview(place).cast("B")
        self._events: dict[tuple[int, int], Any] = {}

    def buffer(self, lane: int, slot: int) -> memoryview:
        """Return the staging buffer, once the copies from it have ended."""
        self._device.set_current()  # a context is current for one thread only
        if event := self._events.pop((lane, slot), None):
            event.sync()
        return self._slots[lane, slot][1]

    def take(self, block: Block) -> None:
        """Start the block's copies on its lane's stream."""
        from cuda.core import Buffer

        stream = self._streams[block.lane]
        source, arena = self._slots[block.lane, block.slot][0], self.arenas[block.file]
        for begin, target, nbytes in block.copies:
            part = Buffer.from_handle(int(source.handle) + begin, nbytes, owner=source)
            whole = Buffer.from_handle(int(arena.handle) + target, nbytes, owner=arena)
            whole.copy_from(part, stream=stream)
        self._events[block.lane, block.slot] = stream.record()

    def finish(self, lane: int) -> None:
        """Wait for the lane's copies."""
        self._streams[lane].sync()
