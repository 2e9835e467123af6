"""Tensors to what others take: DLPack capsules, dequantised and converted arrays."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from max_build.errors import WeightsError
from max_build.weights import dequantise
from max_build.weights.dtypes import BY_NAME
from max_build.weights.header import Entry
from max_build.weights.tensor import NATIVE, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from max_build.weights.tensor import Array

__all__ = ["Converted", "decodes", "dequantize", "dlpack"]


class Converted(Tensor):
    """A tensor that is transposed or cast on the host whenever it is viewed.

    Parameters
    ----------
    source
        The tensor of the file.
    dtype
        Type to convert to, a native one; None keeps the type.
    transpose
        Swap the last two dimensions.
    """

    __slots__ = ("source", "transpose")

    def __init__(self, source: Tensor, *, dtype: str | None, transpose: bool) -> None:
        kind = source.type if dtype is None else BY_NAME[dtype]
        shape = source.shape
        if transpose:
            shape = (*shape[:-2], shape[-1], shape[-2])
        entry = Entry(kind, shape, source.offset, kind.nbytes(shape))
        order = source.order if dtype is None else NATIVE
        super().__init__(source.name, entry, source.file, order)
        self.source = source
        self.transpose = transpose

    @property
    def stored(self) -> Tensor:
        """The tensor that is converted."""
        return self.source

    @property
    def alignment(self) -> int:
        """New arrays are aligned to 16 bytes."""
        return 16

    def writable(self) -> Array:
        """Return the converted values as a new C-contiguous array."""
        import numpy as np

        source = self.source
        if self.type is source.type and self.order == source.order:
            array = source.writable()
        else:
            kind = np.dtype(self.type.raw)
            plain = source.type.native
            array = (source.writable() if plain else dequantize(source)).astype(kind, copy=False)
        if self.transpose:
            array = array.swapaxes(-1, -2)
        return np.ascontiguousarray(array).reshape(self.raw_shape)

    def tobytes(self) -> bytes:
        """Return the converted bytes."""
        return self.writable().tobytes()


def dlpack(tensor: Tensor, *, copy: bool = False) -> Any:
    """Return a writable `dltensor` capsule of the tensor's true element type.

    NumPy makes the capsule and owns its memory; where it lacks the type, the capsule of the
    same-width integers is relabelled (DLPack's `DLDataType`: code, bits, lanes).
    """
    array = tensor.writable()
    if copy:
        array = array.copy()
    label = tensor.type.dlpack
    if tensor.dtype == "bool":
        array = array.view("u1")
    capsule = array.__dlpack__()
    if label is not None and (tensor.dtype == "bool" or not tensor.type.native):
        _relabeller()(capsule, *label)
    return capsule


@cache
def _relabeller() -> Callable[[Any, int, int], None]:
    import ctypes

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    label = ctypes.c_uint8 * 2

    def relabel(capsule: Any, code: int, bits: int) -> None:
        # struct DLTensor { void *data; int32_t device[2]; int32_t ndim; DLDataType dtype; … }
        kind = label.from_address(pointer(capsule, b"dltensor") + 20)
        kind[0], kind[1] = code, bits

    return relabel


def decodes(tensor: Tensor) -> bool:
    """Whether there is a way from the tensor's type and byte order to other types."""
    kind = tensor.type
    quantised = kind.block > 1 and tensor.order == "<"
    return kind.native or kind.name == "bfloat16" or quantised


def dequantize(tensor: Tensor) -> Array:
    """Return the tensor's values as a new `float32` array of its shape."""
    import numpy as np

    raw = tensor.writable()
    kind = tensor.type
    if kind.is_complex:
        message = f"`{tensor.path}`: tensor {tensor.name!r}: float32 cannot hold {kind.name}"
        raise WeightsError(message)
    if kind.native:
        return raw.astype(np.float32)
    if kind.name == "bfloat16":
        wide = raw.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    if kind.name in dequantise.KINDS and tensor.order == "<":
        return dequantise.decode(raw, kind.name).reshape(tensor.shape)
    if kind.block > 1 and tensor.order == "<":
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as decode

        try:
            values = decode(raw, GGMLQuantizationType[kind.name.upper()])
        except (KeyError, NotImplementedError) as error:
            message = f"`{tensor.path}`: tensor {tensor.name!r}: cannot decode {kind.name}: {error}"
            raise WeightsError(message) from error
        decoded: Array = values.reshape(tensor.shape)
        return decoded
    message = f"`{tensor.path}`: tensor {tensor.name!r}: no decoder for {kind.name}"
    if tensor.order != "<":
        message += " in big-endian files"
    raise WeightsError(message)
