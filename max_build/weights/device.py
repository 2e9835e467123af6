"""Deliver tensors to where a graph or kernel wants them.

On the host that is the mapping itself, handed to MAX without a copy. On a device it is one
allocation for each file, filled through a ring of pinned staging buffers by the schedule of
`plan`, or by cuFile where it can (`gds`): file pages are never given to the device's driver,
which would fault them one by one.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from max_build.errors import WeightsError
from max_build.weights import gds
from max_build.weights.pages import in_parallel, workers
from max_build.weights.plan import by_device, make_plan
from max_build.weights.stream import execute
from max_build.weights.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from max_build.weights.plan import Plan
    from max_build.weights.sinks import CudaSink, MaxSink

__all__ = ["cuda_buffers", "deliver", "device_buffers", "host_buffers"]

_log = logging.getLogger(__name__)

#: Tensors that are in memory at one time after they were converted for a device.
_MADE_AT_ONCE = 8


def deliver(
    tensors: Mapping[str, Tensor], places: Mapping[str, str], devices: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a `max.driver.Buffer` for each tensor, where the graph wants it.

    For `InferenceSession.init(weights_registry=…)`. One device is filled after the other.

    Parameters
    ----------
    tensors
        What to deliver.
    places
        Name of each tensor → device, by the graph's name: `cpu`, `gpu:0`, ….
    devices
        The graph's name → the `max.driver.Device` that stands for it.

    Raises
    ------
    WeightsError
        If a file can no longer be read or was changed.
    """
    found: dict[str, Any] = {}
    for place, some in by_device(tensors, places).items():
        to = devices[place]
        found |= host_buffers(some) if place == "cpu" else device_buffers(some, to)
    return found


def host_buffers(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a `max.driver.Buffer` for each tensor that aliases the file's pages.

    The buffers keep the pages mapped. Tensors that their file misaligns, and converted ones,
    are buffers over new memory. Quantised and packed tensors are `uint8` buffers of their bytes.

    Raises
    ------
    WeightsError
        If a file was changed since it was opened.
    """
    import numpy as np
    from max.driver import Buffer

    whole: dict[int, Any] = {}
    found: dict[str, Any] = {}
    made: list[tuple[str, Tensor]] = []
    for name, tensor in tensors.items():
        file = tensor.file
        if not _is_plain(tensor) or tensor.offset % tensor.type.itemsize:
            made.append((name, tensor))
            continue
        if (base := whole.get(id(file))) is None:
            memory = file.memory(tensor.offset, tensor.nbytes)
            base = whole[id(file)] = Buffer.from_dlpack(np.frombuffer(memory, np.uint8))
        elif file.is_read:
            file.memory(tensor.offset, tensor.nbytes)
        found[name] = _shaped(base[tensor.offset : tensor.offset + tensor.nbytes], tensor)

    def make(some: list[tuple[str, Tensor]]) -> None:
        for name, tensor in some:
            found[name] = Buffer.from_dlpack(tensor)

    # What is decoded is bound by first touch of its new memory, which two threads do faster.
    count = workers(len(made))
    in_parallel(make, [made[number::count] for number in range(count)])
    return found


def device_buffers(
    tensors: Mapping[str, Tensor],
    device: Any,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """Return a `max.driver.Buffer` on `device` for each tensor.

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
    from max_build.weights.sinks import MaxSink

    plan = _plan(tensors)
    sink = MaxSink(plan, device)
    ordinal = -1 if device.is_host else device.id
    _fill(plan, sink, [arena._data_ptr() for arena in sink.arenas], ordinal, progress)  # noqa: SLF001 - MAX has no public way there
    found: dict[str, Any] = {}
    rest = [name for name in tensors if name not in plan.places]
    for begin in range(0, len(rest), _MADE_AT_ONCE):
        some = host_buffers({name: tensors[name] for name in rest[begin : begin + _MADE_AT_ONCE]})
        found |= {name: buffer.to(device) for name, buffer in some.items()}
    for name, (arena, offset, nbytes) in plan.places.items():
        found[name] = _shaped(sink.arenas[arena][offset : offset + nbytes], tensors[name])
    return found


def cuda_buffers(
    tensors: Mapping[str, Tensor],
    device_id: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """Return a `cuda.core.Buffer` on a CUDA device for each tensor: what kernels are launched with.

    The bytes are those of the file, each tensor aligned to 256 bytes. The buffers keep their
    memory alive; names of one tensor share its copy. All copies have ended on return.

    >>> weights = max_build.open_weights("model.safetensors")        # doctest: +SKIP
    >>> there = cuda_buffers(weights)                                # doctest: +SKIP
    >>> kernels.launch(stream, "saxpy", 64, there["x"], block=128)   # doctest: +SKIP

    Parameters
    ----------
    tensors
        What to deliver: `open_weights(…)`, or a part of it.
    device_id
        Ordinal of the device.
    progress
        Called with the bytes read so far and the bytes to read.

    Raises
    ------
    WeightsError
        If a tensor is empty, converted or of foreign byte order; or a file can no longer be
        read or was changed.
    """
    if odd := [repr(name) for name, tensor in tensors.items() if not _is_plain(tensor)]:
        message = f"tensors {', '.join(odd[:10])} have no bytes in the file that a kernel could use"
        raise WeightsError(message, hint="leave empty, converted and byte-swapped tensors out")
    from cuda.core import Buffer

    from max_build.weights.sinks import CudaSink

    plan = _plan(tensors)
    sink = CudaSink(plan, device_id)
    _fill(plan, sink, [int(arena.handle) for arena in sink.arenas], device_id, progress)
    found: dict[str, Any] = {}
    for name, (arena, offset, nbytes) in plan.places.items():
        owner = sink.arenas[arena]
        found[name] = Buffer.from_handle(int(owner.handle) + offset, nbytes, owner=owner)
    return found


def _fill(
    plan: Plan,
    sink: MaxSink | CudaSink,
    addresses: list[int],
    device_id: int,
    progress: Callable[[int, int], object] | None,
) -> None:
    """Carry out `plan`: by cuFile where all files allow it, else through the sink's ring."""
    reasons = [gds.gds_reason(file.path) for file in plan.files] if device_id >= 0 else ["no GPU"]
    way, reason = "cuFile", next(filter(None, reasons), "")
    if not reason:
        try:
            streamed = gds.fill(plan, addresses, device_id, progress)
        except gds.GdsError as error:
            reason = str(error)
    if reason:
        way = f"the pinned ring ({reason})"
        streamed = execute(plan, sink, progress)
    speed = streamed.gigabytes_per_second
    _log.info("%d bytes of weights at %.1f GB/s through %s", streamed.nbytes, speed, way)


def _plan(tensors: Mapping[str, Tensor]) -> Plan:
    """The schedule for those tensors whose bytes are wanted as they lie in the file."""
    return make_plan({name: tensor for name, tensor in tensors.items() if _is_plain(tensor)})


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's bytes are wanted as they lie in the file."""
    return type(tensor) is Tensor and tensor.nbytes > 0 and tensor.is_native


def _shaped(raw: Any, tensor: Tensor) -> Any:
    """Return a `uint8` buffer as one of the tensor's type and shape."""
    kind = tensor.type
    return raw.view(_dtype("uint8" if kind.packed else kind.name), kind.raw_shape(tensor.shape))


@cache
def _dtype(name: str) -> Any:
    from max.dtype import DType

    return DType[name]
