"""The GPUs of this machine, asked of the driver itself: no CUDA or ROCm package is needed."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

__all__ = ["cuda_capabilities", "cuda_driver", "hip_architectures"]

# CUdevice_attribute of the CUDA Driver API (cuda.h).
_MAJOR = 75
_MINOR = 76


def cuda_capabilities() -> tuple[tuple[int, int], ...]:
    """Compute capability (major, minor) of each CUDA device, in the driver's order.

    Empty where there is no driver or no device.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found: list[tuple[int, int]] = []
    for ordinal in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        failed = (
            driver.cuDeviceGet(ctypes.byref(device), ordinal)
            or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
            or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        )
        if not failed:
            found.append((major.value, minor.value))
    return tuple(found)


def cuda_driver() -> tuple[int, int] | None:
    """CUDA release (major, minor) of the NVIDIA driver; None where there is no driver."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def hip_architectures(
    topology: Path = Path("/sys/class/kfd/kfd/topology/nodes"),
) -> tuple[str, ...]:
    """`gfxNNN` of each AMD GPU, in the kernel driver's order; empty where there is none.

    `gfx_target_version` of the amdkfd topology is decimal `MMmmss`: 90402 is gfx942, and a
    stepping is written in hexadecimal (90010 is gfx90a).
    """
    found: list[str] = []
    for node in sorted(topology.glob("*/properties"), key=lambda path: int(path.parent.name)):
        try:
            text = node.read_text()
        except OSError:
            continue
        version = re.search(r"^gfx_target_version (\d+)$", text, re.MULTILINE)
        if version and int(version[1]):
            major, rest = divmod(int(version[1]), 10000)
            minor, stepping = divmod(rest, 100)
            found.append(f"gfx{major}{minor}{stepping:x}")
    return tuple(found)
