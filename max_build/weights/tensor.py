"""One tensor of a weights file: a description, and views of its bytes where they lie."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from max_build.errors import WeightsError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from max_build.weights.dtypes import DType
    from max_build.weights.header import Entry
    from max_build.weights.pages import File

    Array = npt.NDArray[Any]

__all__ = ["NATIVE", "Tensor"]

NATIVE: Literal["<", ">"] = "<" if sys.byteorder == "little" else ">"


class Tensor:
    """A named tensor; nothing is read until a view of it is asked for.

    Views alias the file's pages and keep them mapped. `numpy()` and `__array_interface__` are
    read-only. `__dlpack__` is writable, because consumers copy read-only arrays or refuse
    them: what is written there stays private to the process and never reaches the file.

    Parameters
    ----------
    name
        The tensor's name in its file.
    entry
        Where it lies.
    file
        The open file.
    order
        Byte order of its elements.
    """

    __slots__ = ("_exported", "_type", "file", "name", "nbytes", "offset", "order", "shape")

    def __init__(self, name: str, entry: Entry, file: File, order: Literal["<", ">"] = "<") -> None:
        self.name = name
        self.file = file
        self.order = order
        self._exported: Array | None = None
        self._type: DType = entry.dtype
        self.shape: tuple[int, ...] = entry.shape
        self.offset: int = entry.offset
        self.nbytes: int = entry.nbytes

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self.dtype} {list(self.shape)}>"

    @property
    def dtype(self) -> str:
        """The element type by MAX's name (`float32`, `bfloat16`), or a quantised one (`q4_k`)."""
        return self._type.name

    @property
    def type(self) -> DType:
        """The element type's row of the table."""
        return self._type

    @property
    def stored(self) -> Tensor:
        """The tensor as it lies in its file: this one, or what it is converted from."""
        return self

    @property
    def path(self) -> str:
        """The file's path."""
        return self.file.path

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """`shape`, or for packed and quantised types the shape of the `uint8` array of bytes."""
        return self._type.raw_shape(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one item to the next along each dimension of `raw_shape`; C order."""
        strides, step = [], self._type.itemsize
        for dim in reversed(self.raw_shape):
            strides.append(step)
            step *= dim
        return tuple(reversed(strides))

    @property
    def alignment(self) -> int:
        """The largest power of two that divides the address of every view, at most a page."""
        return min(self.offset & -self.offset or 4096, 4096)

    @property
    def is_native(self) -> bool:
        """The elements are in this machine's byte order."""
        return self.order == NATIVE or self._type.itemsize == 1

    def writable(self) -> Array:
        """Return the raw array over private memory, for consumers that alias only writable ones.

        An array of the element type where NumPy has it, unsigned integers of the same width
        where not, bytes for packed and quantised types. A tensor that its file misaligns is
        copied to aligned memory.
        """
        import numpy as np

        kind = self._type
        item = np.dtype(self.order + kind.raw)
        shape = kind.raw_shape(self.shape)
        try:
            if not self.nbytes:
                return np.empty(shape, item)
            if self.offset % item.itemsize:
                array = np.empty(shape, item)
                self.file.read_into(self.offset, array.reshape(-1).view("u1").data)
                self.file.check()
                return array
            memory = self.file.memory(self.offset, self.nbytes)
            return np.frombuffer(memory, item, self.nbytes // item.itemsize, self.offset).reshape(
                shape
            )
        except ValueError as error:
            if isinstance(error, WeightsError):
                raise
            # More dimensions than NumPy can have.
            message = f"`{self.path}`: tensor {self.name!r} does not fit a NumPy array: {error}"
            raise WeightsError(message) from error

    def numpy(self) -> Array:
        """Return a read-only array that aliases the file's pages.

        Types that NumPy lacks come as `ml_dtypes` types if that package is installed, else raw
        as from `writable`; nothing is ever converted. Packed and quantised types are bytes.
        """
        array = self.writable()
        array.flags.writeable = False
        if not self._type.native and not self._type.packed:
            try:
                import ml_dtypes  # type: ignore[import-not-found,unused-ignore]
            except ImportError:
                return array
            extra = np_dtype(ml_dtypes, self._type.name)
            return array if extra is None else array.view(extra.newbyteorder(self.order))
        return array

    def tobytes(self) -> bytes:
        """Return a copy of the tensor's bytes as they are in the file."""
        content = self.file.read(self.offset, self.nbytes)
        self.file.check()
        return content

    def dequantize(self) -> Array:
        """Return the values as a new `float32` array of `shape`.

        Quantised types are decoded as the `gguf` package does it; floating types are widened.

        Raises
        ------
        WeightsError
            If there is no decoder for the type.
        """
        from max_build.weights.convert import dequantize

        return dequantize(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        array = self.writable()
        array.flags.writeable = False
        # The consumer's array keeps this object alive, so this object must keep the memory.
        self._exported = array
        interface: dict[str, Any] = array.__array_interface__
        return interface

    def __dlpack_device__(self) -> tuple[int, int]:
        """Host memory: kDLCPU."""
        return 1, 0

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule that aliases the pages and names the true element type.

        Packed and quantised tensors are exported as their bytes.

        Raises
        ------
        BufferError
            If the elements are not in this machine's byte order, or a device is asked for.
        """
        from max_build.weights.convert import dlpack

        if stream is not None or dl_device not in (None, (1, 0)):
            message = f"tensor {self.name!r} is in host memory; no stream, no other device"
            raise BufferError(message)
        if not self.is_native:
            message = f"tensor {self.name!r} has foreign byte order; DLPack cannot say so"
            raise BufferError(message)
        return dlpack(self, copy=bool(copy))

    def is_contiguous(self) -> bool:
        """Return True: consumers ask before they take a capsule."""
        return True

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def np_dtype(module: Any, name: str) -> np.dtype[Any] | None:
    """Return the dtype called `name` of a module of dtypes, if it has one."""
    import numpy as np

    found = getattr(module, name, None)
    return None if found is None else np.dtype(found)
