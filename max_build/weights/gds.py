"""Files straight to a GPU by cuFile (GPUDirect Storage), where everything on the way allows it.

Through `cuda.bindings.cufile`, to which the extra `gds` adds NVIDIA's library, a wheel of 2 MB;
`kvikio` would want CuPy and a CUDA toolkit beside it. cuFile's own fallback, a copy through the
host, is switched off: the ring of pinned buffers does that, and what is told is what happens.

Only done where `MAX_BUILD_GDS=1` asks for it: a file in the page cache comes sooner through the
ring, and whether DMA from the disk wins depends on where disk and GPU are plugged in.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max_build.errors import WeightsError
from max_build.machine import Mount, mount_of
from max_build.weights.pages import in_parallel
from max_build.weights.stream import Streamed

if TYPE_CHECKING:
    from collections.abc import Callable

    from max_build.weights.plan import Block, Plan

__all__ = ["VARIABLE", "Facts", "GdsError", "fill", "gds_reason", "refusal"]

VARIABLE = "MAX_BUILD_GDS"

#: Filesystems with a client that cuFile knows ("GPUDirect Storage Overview Guide", third-party
#: support), whatever lies below them.
_SHARED = frozenset({"beegfs", "gpfs", "lustre", "wekafs"})


class GdsError(Exception):
    """cuFile did not do what it was asked: nothing is lost, the ring can."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides whether a file can go straight to a GPU.

    Parameters
    ----------
    module
        The kernel module `nvidia-fs` is loaded.
    mount
        The filesystem that holds the file.
    block_device
        Where the kernel has the disk below it (`/sys/devices/…/nvme0n1`); empty if there is none.
    asked
        `MAX_BUILD_GDS` is 1.
    """

    module: bool
    mount: Mount
    block_device: str
    asked: bool


def gds_reason(path: str) -> str:
    """Return why the weights file `path` does not go to a GPU by cuFile; nothing when it does."""
    return refusal(_facts(path)) or _library()  # which takes long to import: only if all else fits


def refusal(facts: Facts) -> str:
    """Return what stands in the way of cuFile, the hardest to change first, or nothing.

    The rules are those of NVIDIA's "GPUDirect Storage Installation and Troubleshooting Guide":
    ext4 with ordered data and XFS on NVMe, NFS over RDMA, and a few shared filesystems.
    """
    kind, options = facts.mount.kind, facts.mount.options
    if kind in ("ext4", "xfs"):
        if "/nvme" not in facts.block_device:
            return f"the {kind} filesystem is not on an NVMe disk"
        if kind == "ext4" and {"data=journal", "data=writeback"} & options:
            return "the ext4 filesystem is not mounted with ordered data"
    elif kind in ("nfs", "nfs4"):
        if "proto=rdma" not in options:
            return "the NFS mount does not use RDMA"
    elif kind not in _SHARED:
        return f"cuFile does not read {kind or 'unknown'} filesystems directly"
    if not facts.module:
        return "the kernel module `nvidia-fs` is not loaded"
    return "" if facts.asked else f"`{VARIABLE}=1` does not ask for it"


def fill(
    plan: Plan,
    addresses: list[int],
    device_id: int,
    progress: Callable[[int, int], object] | None = None,
) -> Streamed:
    """Carry out `plan` without staging: cuFile reads each copy into its place.

    Parameters
    ----------
    addresses
        Device address of each arena.
    device_id
        Ordinal of their device.
    progress
        Called with the bytes read so far and the bytes to read.

    Raises
    ------
    GdsError
        If cuFile refuses a file or does not read all of it: the arenas hold anything then.
    WeightsError
        If a file was changed meanwhile.
    """
    from cuda.bindings import cufile
    from cuda.core import Device

    begun = time.perf_counter()
    done, lock = 0, threading.Lock()

    def read(block: Block) -> None:
        nonlocal done
        Device(device_id).set_current()  # a context is current for one thread only
        for source, target, nbytes in block.copies:
            place = block.offset + source
            got = cufile.read(handles[block.file], addresses[block.file], nbytes, place, target)
            if got != nbytes:  # None, from bindings that do not say
                message = f"cuFile read {got} of {nbytes} bytes at offset {place}"
                raise GdsError(message)
        if progress is not None:
            with lock:
                done += block.nbytes
                progress(done, plan.read_bytes)

    handles: list[int] = []
    descriptors: list[int] = []
    try:
        device = Device(device_id)
        device.set_current()
        device.sync()  # cuFile waits for no stream, and the arenas' memory may be in use on one yet
        _open_driver()
        for file in plan.files:
            file.check()
            # By way of /proc, so that it is the same file even if another took its name.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
            descriptors.append(os.open(f"/proc/self/fd/{file.descriptor}", flags))
            wanted = cufile.Descr()
            wanted.type = cufile.FileHandleType.OPAQUE_FD
            wanted.handle.fd = descriptors[-1]
            wanted.fs_ops = 0
            handles.append(cufile.handle_register(wanted.ptr))
        in_parallel(read, list(plan.blocks))
    except (GdsError, WeightsError):
        raise
    except Exception as error:
        message = f"cuFile: {error}"
        raise GdsError(message) from error
    finally:
        for handle in handles:
            with contextlib.suppress(Exception):  # what was read is there all the same
                cufile.handle_deregister(handle)
        for descriptor in descriptors:
            os.close(descriptor)
    for file in plan.files:
        file.check()
    paths = tuple(file.path for file in plan.files)
    return Streamed(plan.nbytes, time.perf_counter() - begun, paths)


@cache
def _open_driver() -> None:
    from cuda.bindings import cufile

    allow: Any = cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE
    cufile.set_parameter_bool(int(allow), False)
    cufile.driver_open()


def _facts(path: str) -> Facts:
    try:
        device = os.stat(path).st_dev
    except OSError:  # the file may be open still, and another's name by now
        device, mount = 0, Mount()
    else:
        mount = mount_of(path, device)
    disk = Path("/sys/dev/block", f"{os.major(device)}:{os.minor(device)}")
    return Facts(
        module=Path("/proc/driver/nvidia-fs").exists(),
        mount=mount,
        block_device=str(disk.resolve()) if disk.exists() else "",
        asked=os.environ.get(VARIABLE) == "1",
    )


@cache
def _library() -> str:
    """Why cuFile cannot be used, or nothing."""
    try:
        import_module("cuda.core")
        import_module("cuda.bindings.cufile").get_version()
    except Exception:  # noqa: BLE001 - the bindings have one of their own for a missing library
        return "cuFile is not installed (`pip install 'max-build[gds]'`)"
    return ""
