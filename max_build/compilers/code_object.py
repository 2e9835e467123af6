"""What an AMDGPU code object says about itself in its metadata note.

Follows "Code Object V3 Metadata" in LLVM's User Guide for AMDGPU Backend.
"""

from __future__ import annotations

from typing import Final

import msgspec

from max_build.compilers.cubin import Kernel
from max_build.compilers.elf_headers import DYNAMIC_SYMBOLS, FUNCTION, NOTE, DamagedError, Elf

__all__ = ["code_object_of"]

_NT_AMDGPU_METADATA: Final = 32


class _Kernel(msgspec.Struct):
    name: str = msgspec.field(name=".name")
    symbol: str = msgspec.field(name=".symbol")
    vector_registers: int = msgspec.field(name=".vgpr_count")
    shared: int = msgspec.field(name=".group_segment_fixed_size")
    private: int = msgspec.field(name=".private_segment_fixed_size")
    arguments: int = msgspec.field(name=".kernarg_segment_size")


class _Metadata(msgspec.Struct):
    target: str = msgspec.field(name="amdhsa.target")
    kernels: list[_Kernel] = msgspec.field(name="amdhsa.kernels")


def code_object_of(elf: Elf) -> tuple[str, tuple[Kernel, ...]]:
    """Architecture and kernels of the code object whose headers these are.

    Private memory is reported as stack, kernel arguments as bank 0.

    Raises
    ------
    DamagedError
        Its metadata is missing or damaged.
    """
    metadata = _metadata(elf)
    code = {
        elf.name(strings, symbol.name): symbol.size
        for symbol, strings in elf.symbols(DYNAMIC_SYMBOLS)
        if symbol.kind == FUNCTION
    }
    kernels = (
        Kernel(
            name=kernel.name,
            registers=kernel.vector_registers,
            shared_bytes=kernel.shared,
            local_bytes=0,
            stack_bytes=kernel.private,
            code_bytes=code.get(kernel.name, 0),
            constants={0: kernel.arguments},
        )
        for kernel in metadata.kernels
    )
    # `amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-`, or MAX's `amdgpu9.42-amd-amdhsa-unknown-gfx942`
    arch = metadata.target.partition(":")[0].rpartition("-")[2]
    return arch, tuple(sorted(kernels, key=lambda kernel: kernel.name))


def _metadata(elf: Elf) -> _Metadata:
    for section in elf.sections:
        if section.kind != NOTE:
            continue
        for owner, kind, description in elf.notes(section):
            if owner == b"AMDGPU" and kind == _NT_AMDGPU_METADATA:
                try:
                    return msgspec.msgpack.decode(description, type=_Metadata)
                except (msgspec.MsgspecError, RecursionError) as error:
                    message = f"has damaged metadata: {error}"
                    raise DamagedError(message) from None
    message = "has no AMDGPU metadata"
    raise DamagedError(message)
