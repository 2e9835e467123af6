"""What Triton's interpreter asks of a tensor, for NumPy arrays: no torch is needed."""

from __future__ import annotations

import numpy as np


class Storage:
    """The memory of an array; it is on the CPU already."""

    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return self

    def copy_(self, other):
        np.copyto(self.array, other.array)


class Tensor:
    """A contiguous array as a kernel's argument."""

    def __init__(self, array):
        assert array.flags.c_contiguous
        self.array = array

    @property
    def dtype(self):
        return self.array.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return Storage(self.array)

    def new_empty(self, *_, **__):
        return Tensor(self.array)

    def set_(self, storage, *_):
        self.array = storage.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)
