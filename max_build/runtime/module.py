"""A kernel module's artifacts on a device: the driver loads them, and launches their kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max_build.errors import LoadError
from max_build.record import Kernel as KernelRecord
from max_build.record import Role
from max_build.runtime.devices import cuda_driver
from max_build.runtime.select import Choice, this_machine

if TYPE_CHECKING:
    from cuda.core import Kernel, LaunchConfig, ObjectCode

__all__ = ["Kernels", "missing_driver"]

Grid = int | tuple[int, ...]

_WARP = 32
# Above this, a kernel has to opt in: CUDA C++ Programming Guide, "Shared Memory".
_PLAIN_SHARED_BYTES = 48 << 10


class Kernels(Mapping[str, "Kernel"]):
    """The kernels of one unit, by their names in the source.

    `kernels["axpby<float>"]` is a `cuda.core.Kernel`; it is loaded into the driver when it is
    first asked for. `launch` adds what the record knows about a launch. A device has to be
    current (`cuda.core.Device().set_current()`) for either.

    Parameters
    ----------
    choice
        Which record, and for which device.
    role
        `cubin`, or `ptx` where no cubin fits the device and the driver compiles.
    files
        Digest → verified file of each blob of that role.
    """

    __slots__ = ("_files", "_loaded", "_objects", "choice", "record", "role", "unit")

    def __init__(self, unit: str, choice: Choice, role: Role, files: Mapping[str, Path]) -> None:
        self.unit = unit
        self.choice = choice
        self.record = choice.record
        self.role = role
        self._files = dict(files)
        self._objects: dict[str, ObjectCode] = {}
        self._loaded: dict[str, Kernel] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.record.kernels)

    def __len__(self) -> int:
        return len(self.record.kernels)

    def __contains__(self, name: object) -> bool:
        return name in self.record.kernels

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __repr__(self) -> str:
        return f"<Kernels {self.unit} for {self.choice.target}: {', '.join(self)}>"

    @property
    def target(self) -> str:
        """The target they were compiled for."""
        return str(self.choice.target)

    def needs(self, name: str) -> KernelRecord:
        """What a launch of a kernel needs, as its compiler recorded it.

        Raises
        ------
        LoadError
            If the unit has no such kernel; the message lists those it has.
        """
        if name not in self.record.kernels:
            has = ", ".join(f"`{one}`" for one in sorted(self))
            message = f"`{self.unit}` has no kernel `{name}`; it has {has}"
            raise LoadError(message)
        return self.record.kernels[name]

    def code(self, name: str) -> ObjectCode:
        """The `cuda.core.ObjectCode` that a kernel lies in; source-level names work in it."""
        from cuda.core import ObjectCode

        digest = self._digest(name)
        if digest not in self._objects:
            make = ObjectCode.from_cubin if self.role == "cubin" else ObjectCode.from_ptx
            names = {
                one: kernel.lowered
                for one, kernel in self.record.kernels.items()
                if self._digest(one) == digest
            }
            path = str(self._files[digest])
            self._objects[digest] = make(path, name=self.unit, symbol_mapping=names)
        return self._objects[digest]

    def config(self, name: str, grid: Grid, block: Grid = 0, shared_bytes: int = 0) -> LaunchConfig:
        """A launch configuration with all that the record knows.

        Parameters
        ----------
        grid
            Blocks, or clusters where the kernel is compiled for clusters.
        block
            Threads of a block; may be left out where the code is compiled for a number.
        shared_bytes
            Dynamic shared memory beyond what the record asks for.
        """
        from cuda.core import LaunchConfig

        needs = self.needs(name)
        if not block and not needs.num_warps:
            message = f"`{name}` is not compiled for a number of threads: give `block`"
            raise LoadError(message)
        return LaunchConfig(
            grid=grid,
            cluster=needs.cluster if needs.cluster != (1, 1, 1) else None,
            block=block or _WARP * needs.num_warps,
            shmem_size=needs.shared_bytes + shared_bytes,
            is_cooperative=needs.cooperative,
        )

    def launch(
        self,
        stream: Any,
        name: str,
        grid: Grid,
        *arguments: Any,
        block: Grid = 0,
        shared_bytes: int = 0,
    ) -> None:
        """Launch a kernel on a `cuda.core.Stream`; see `config` for the rest.

        Raises
        ------
        LoadError
            If the number of arguments is not the kernel's, or it needs scratch buffers.
        """
        from cuda.core import launch

        needs = self.needs(name)
        if needs.signature and len(arguments) != len(needs.signature):
            message = (
                f"`{name}` takes {len(needs.signature)} arguments "
                f"({', '.join(needs.signature)}), got {len(arguments)}"
            )
            raise LoadError(message)
        if any(needs.scratch_bytes):
            message = f"`{name}` needs scratch buffers of {needs.scratch_bytes} bytes per block"
            raise LoadError(message, hint="launch `kernels[name]` with them after the arguments")
        config, kernel = self.config(name, grid, block, shared_bytes), self[name]
        if shared_bytes and config.shmem_size > _PLAIN_SHARED_BYTES:
            _allow_shared(kernel, config.shmem_size, self.choice.ordinal or 0)
        launch(stream, config, kernel, *arguments, *(0 for _ in needs.scratch_bytes))

    def warm(self) -> None:
        """Load every kernel into the current device now, so that no first launch waits for it.

        The driver leaves that to the first launch otherwise (`CUDA_MODULE_LOADING`).

        Raises
        ------
        LoadError
            If the driver refuses one.
        """
        from cuda.bindings import driver

        for name in self:
            handle = driver.CUkernel(int(self[name].handle))
            try:
                status, function = driver.cuKernelGetFunction(handle)
                if status == driver.CUresult.CUDA_SUCCESS:
                    (status,) = driver.cuFuncLoad(function)
            except RuntimeError as error:  # what the bindings raise where a driver is too old
                message = f"the driver cannot load `{name}` of `{self.unit}`: {error}"
                raise LoadError(message) from error
            if status != driver.CUresult.CUDA_SUCCESS:
                message = f"the driver does not load `{name}` of `{self.unit}` ({status.name})"
                raise LoadError(message)

    def _digest(self, name: str) -> str:
        digest = self.needs(name).blob
        return digest if digest in self._files else next(iter(self._files))

    def _load(self, name: str) -> Kernel:
        needs = self.needs(name)
        missing = missing_driver()
        if missing:
            message = f"`{name}` cannot be loaded: {missing}"
            raise LoadError(message)
        try:
            kernel = self.code(name).get_kernel(name)
            if needs.shared_bytes > _PLAIN_SHARED_BYTES:
                _allow_shared(kernel, needs.shared_bytes, self.choice.ordinal or 0)
        except Exception as error:
            message = f"the driver refuses `{name}` of `{self.unit}` for `{self.target}`: {error}"
            raise LoadError(message) from error
        return kernel


def missing_driver() -> str:
    """What this machine lacks to run any kernel, in words; empty when it lacks nothing."""
    if cuda_driver() is None:
        return "this machine has no NVIDIA driver (`libcuda.so.1` cannot be loaded)"
    return "" if this_machine().cuda else "the NVIDIA driver finds no device"


def _allow_shared(kernel: Kernel, size: int, ordinal: int) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(kernel.handle))
    status, device = driver.cuDeviceGet(ordinal)
    if status == driver.CUresult.CUDA_SUCCESS:
        (status,) = driver.cuKernelSetAttribute(attribute, size, handle, device)
    if status != driver.CUresult.CUDA_SUCCESS:
        message = f"the device has no {size} bytes of shared memory for a block ({status.name})"
        raise LoadError(message)
