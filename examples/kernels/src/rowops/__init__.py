"""Row operations on the GPU. `kernels(unit)` loads them ready to launch; nothing is compiled."""

from __future__ import annotations

import max_build
from max_build.runtime.module import Kernels

__all__ = ["kernels"]


def kernels(unit: str, device: str = "auto") -> Kernels:
    """The kernels of `reduce`, `axpy` or `softmax`, by the names they have in the source."""
    return max_build.load_kernels("rowops", unit, device=device)
