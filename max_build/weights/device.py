"""Deliver tensors to where a graph or kernel wants them.

On the host that is the mapping itself, handed to MAX without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from max_build.weights.tensor import Array, Tensor

__all__ = ["host_buffers"]


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
    from max.dtype import DType

    from max_build.weights.tensor import Tensor as Plain

    types: dict[str, Any] = {}
    whole: dict[int, Array] = {}
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        kind = tensor.type
        if (
            type(tensor) is not Plain
            or not tensor.nbytes
            or not tensor.is_native
            or tensor.offset % kind.itemsize
        ):
            found[name] = Buffer.from_dlpack(tensor)
            continue
        file = tensor.file
        if (base := whole.get(id(file))) is None:
            memory = file.memory(tensor.offset, tensor.nbytes)
            base = whole[id(file)] = np.frombuffer(memory, np.uint8)
        elif file.is_read:
            file.memory(tensor.offset, tensor.nbytes)
        raw = Buffer.from_dlpack(base[tensor.offset : tensor.offset + tensor.nbytes])
        if (wanted := types.get(kind.name)) is None:
            wanted = types[kind.name] = DType.uint8 if kind.packed else DType[kind.name]
        found[name] = raw.view(wanted, kind.raw_shape(tensor.shape))
    return found
