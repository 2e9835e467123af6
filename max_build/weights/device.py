"""Deliver tensors to where a graph or kernel wants them.

On the host that is the mapping itself, handed to MAX without a copy. On a device it is one
allocation for each file, filled through a ring of pinned staging buffers by the schedule of
`plan`: file pages are never given to the device's driver, which would fault them one by one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from max_build.weights.plan import SECTOR, make_plan
from max_build.weights.stream import Streamed, execute
from max_build.weights.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from max_build.weights.plan import Block, Plan
    from max_build.weights.tensor import Array

__all__ = ["CudaSink", "MaxSink", "cuda_buffers", "device_buffers", "host_buffers"]


def host_buffers(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a `max.driver.Buffer` for each tensor that aliases the file's pages.

    For `InferenceSession.init(weights_registry=…)`. The buffers keep the pages mapped. Tensors
    that their file misaligns, and converted ones, are buffers over new memory. Quantised and
    packed tensors are `uint8` buffers of their bytes.

    Raises
    ------
    WeightsError
        If a file was changed since it was opened.
    """
    import numpy as np
    from max.driver import Buffer

    whole: dict[int, Array] = {}
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        file = tensor.file
        if not _is_plain(tensor) or tensor.offset % tensor.type.itemsize:
            found[name] = Buffer.from_dlpack(tensor)
            continue
        if (base := whole.get(id(file))) is None:
            memory = file.memory(tensor.offset, tensor.nbytes)
            base = whole[id(file)] = np.frombuffer(memory, np.uint8)
        elif file.is_read:
            file.memory(tensor.offset, tensor.nbytes)
        raw = Buffer.from_dlpack(base[tensor.offset : tensor.offset + tensor.nbytes])
        found[name] = _shaped(raw, tensor)
    return found


def device_buffers(
    tensors: Mapping[str, Tensor],
    device: Any,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[dict[str, Any], Streamed]:
    """Return a `max.driver.Buffer` on `device` for each tensor, and how fast they got there.

    Parameters
    ----------
    tensors
        What to deliver; names of one tensor share its copy.
    device
        A `max.driver.Device`.
    progress
        Called with the bytes read so far and the bytes to read.

    Raises
    ------
    WeightsError
        If a file can no longer be read or was changed.
    """
    from max.driver import Buffer

    plan = _plan(tensors)
    sink = MaxSink(plan, device)
    streamed = execute(plan, sink, progress)
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name in plan.places:
            arena, offset, nbytes = plan.places[name]
            found[name] = _shaped(sink.arenas[arena][offset : offset + nbytes], tensor)
        else:
            found[name] = Buffer.from_dlpack(tensor).to(device)
    return found, streamed


def cuda_buffers(
    tensors: Mapping[str, Tensor],
    device_id: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[dict[str, Any], Streamed]:
    """Return a `cuda.core.Buffer` on a CUDA device for each tensor, and how fast they got there.

    The buffers keep their arena alive. Empty and converted tensors are not delivered this way.

    Parameters
    ----------
    tensors, progress
        As for `device_buffers`.
    device_id
        Ordinal of the device.

    Raises
    ------
    WeightsError
        If a file can no longer be read or was changed.
    """
    from cuda.core import Buffer

    plan = _plan(tensors)
    sink = CudaSink(plan, device_id)
    streamed = execute(plan, sink, progress)
    found: dict[str, Any] = {}
    for name, (arena, offset, nbytes) in plan.places.items():
        owner = sink.arenas[arena]
        found[name] = Buffer.from_handle(int(owner.handle) + offset, nbytes, owner=owner)
    return found, streamed


def _plan(tensors: Mapping[str, Tensor]) -> Plan:
    """The schedule for those tensors whose bytes are wanted as they lie in the file."""
    return make_plan({name: tensor for name, tensor in tensors.items() if _is_plain(tensor)})


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's bytes are wanted as they lie in the file."""
    return type(tensor) is Tensor and tensor.nbytes > 0 and tensor.is_native


def _shaped(raw: Any, tensor: Tensor) -> Any:
    """Return a `uint8` buffer as one of the tensor's type and shape."""
    from max.dtype import DType

    kind = tensor.type
    wanted = DType.uint8 if kind.packed else DType[kind.name]
    return raw.view(wanted, kind.raw_shape(tensor.shape))


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
