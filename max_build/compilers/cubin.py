"""What a cubin says about itself: its architecture, its kernels, and what those take.

NVIDIA publishes no description of one, so what is specific to it was read off cubins made by
the tools of CUDA 12.4 to 13.5 and is checked against `cuobjdump` by the tests:

- `EI_ABIVERSION` 7 (tools up to 12.9, sm_90 and older): `e_flags` bits 0-7 hold the number of the
  architecture and bit 11 its `a` suffix.
- `EI_ABIVERSION` 8: bits 8-15 hold the number. The `a` suffix is bit 3 (tools 12.8 and 12.9) or
  attribute 9 of `.nv.compat` (tools 13). The `f` suffix leaves no trace but the `-arch` that
  ptxas notes in `.note.nv.tkinfo`: the code of sm_100f is the code of sm_100.
- `.nv.info` is a list of (format, attribute, value) with one register count and one stack size
  per function; sections named after a kernel hold its code, constant banks, shared and local
  memory.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from max_build.compilers.elf_headers import (
    CUDA,
    FUNCTION,
    NOTE,
    SYMBOLS,
    DamagedError,
    Elf,
    Section,
)
from max_build.errors import CompileError

__all__ = ["Cubin", "Kernel", "check_cubin", "cubin_of", "read_cubin"]

_ET_EXEC: Final = 2
_STB_LOCAL: Final = 0
_ATTRIBUTE: Final = struct.Struct("<BBH")
_EIFMT_SVAL: Final = 4  # the only format whose value follows the four-byte head
_EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE, _EIATTR_REGCOUNT = 0x11, 0x12, 0x2F
_EICOMPAT_ACCELERATOR: Final = 0x09
_UNKNOWN_STACK: Final = 0xFFFF_FFFF  # what ptxas writes for recursion
_ARCH_OPTION: Final = re.compile(rb"(?:-arch|--gpu-name)[= ](sm_\d+[af]?)\b")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry point. Sizes in bytes; registers and stack are per thread, shared per block.

    Spilled registers are part of the stack: no cubin tells them apart. `stack_bytes` is None
    where a recursion leaves it unknown. `constants` maps a bank to its bytes; bank 0 holds the
    parameters.
    """

    name: str
    registers: int
    shared_bytes: int
    local_bytes: int
    stack_bytes: int | None
    code_bytes: int
    constants: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cubin:
    """A CUDA ELF: its exact architecture (`sm_90a`), and its kernels in order of name."""

    arch: str
    kernels: tuple[Kernel, ...]
    constants: dict[int, int]
    global_bytes: int
    executable: bool
    size: int

    @property
    def entry_points(self) -> tuple[str, ...]:
        """Lowered names of the kernels, sorted."""
        return tuple(kernel.name for kernel in self.kernels)


def read_cubin(data: bytes) -> Cubin:
    """Read one cubin.

    Raises
    ------
    CompileError
        The bytes are no CUDA ELF, or a truncated or damaged one.
    """
    try:
        elf = Elf(data)
        if elf.machine != CUDA:
            message = f"is code for another machine: e_machine {elf.machine}, not {CUDA}"
            raise DamagedError(message)
        return cubin_of(elf)
    except DamagedError as damage:
        message = f"the cubin {damage}"
        raise CompileError(message) from None


def check_cubin(data: bytes, target: str, entry_points: Iterable[str] = ()) -> Cubin:
    """Check that a compiler's answer is a whole cubin for exactly `target`; return what it is.

    Parameters
    ----------
    data
        The cubin.
    target
        The architecture with its suffix, such as `sm_90a`. Nothing but it is accepted.
    entry_points
        Lowered names that were promised; others may be there as well.

    Raises
    ------
    CompileError
        The bytes are no whole CUDA ELF, are not executable, are for another architecture, hold no
        kernel, or lack a promised one.
    """
    cubin = read_cubin(data)
    if cubin.arch != target:
        message = f"the cubin holds code for `{cubin.arch}`, not for `{target}`"
        raise CompileError(message)
    if not cubin.executable:
        message = "the cubin is relocatable: it was compiled but not linked"
        raise CompileError(message)
    if not cubin.kernels:
        message = "the cubin holds no kernel"
        raise CompileError(
            message,
            hint="declare one `__global__`; name the instances of a template in `names`",
        )
    missing = sorted(set(entry_points) - set(cubin.entry_points))
    if missing:
        listing = ", ".join(f"`{name}`" for name in missing)
        found = ", ".join(f"`{name}`" for name in cubin.entry_points)
        message = f"the cubin lacks the entry point {listing}; it has {found}"
        raise CompileError(message)
    return cubin


def cubin_of(elf: Elf) -> Cubin:
    """Read the cubin whose headers these are.

    Raises
    ------
    DamagedError
        It is damaged, or of a layout that is not known.
    """
    names = elf.section_names()
    sizes = dict(zip(names, (section.size for section in elf.sections), strict=True))
    by_name = dict(zip(names, elf.sections, strict=True))
    registers, frames, stacks = _function_attributes(elf, by_name.get(".nv.info"))
    kernels = []
    for index, (symbol, strings) in enumerate(elf.symbols(SYMBOLS)):
        if symbol.kind != FUNCTION or symbol.binding == _STB_LOCAL:
            continue
        name = elf.name(strings, symbol.name)
        code = by_name.get(f".text.{name}")
        # A device function has code of its own but no bank of parameters.
        if code is None or f".nv.constant0.{name}" not in by_name:
            continue
        stack = stacks.get(index, frames.get(index, 0))
        kernels.append(
            Kernel(
                name=name,
                registers=registers.get(index, code.info >> 24),
                shared_bytes=sizes.get(f".nv.shared.{name}", 0),
                local_bytes=sizes.get(f".nv.local.{name}", 0),
                stack_bytes=None if stack == _UNKNOWN_STACK else stack,
                code_bytes=code.size,
                constants=_banks(sizes, f".{name}"),
            )
        )
    return Cubin(
        arch=_cuda_arch(elf, by_name),
        kernels=tuple(sorted(kernels, key=lambda kernel: kernel.name)),
        constants=_banks(sizes, ""),
        global_bytes=sizes.get(".nv.global", 0) + sizes.get(".nv.global.init", 0),
        executable=elf.type == _ET_EXEC,
        size=elf.extent,
    )


def _banks(sizes: dict[str, int], suffix: str) -> dict[int, int]:
    found = ((bank, sizes.get(f".nv.constant{bank}{suffix}")) for bank in range(18))
    return {bank: size for bank, size in found if size is not None}


def _function_attributes(
    elf: Elf, section: Section | None
) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Registers, frame and least stack in bytes, each by the function's symbol index."""
    registers: dict[int, int] = {}
    frames: dict[int, int] = {}
    stacks: dict[int, int] = {}
    tables = {
        _EIATTR_REGCOUNT: registers,
        _EIATTR_FRAME_SIZE: frames,
        _EIATTR_MIN_STACK_SIZE: stacks,
    }
    if section is not None:
        for attribute, _, payload in _attributes(elf.content(section)):
            if attribute in tables and len(payload) == 8:
                function, value = struct.unpack("<II", payload)
                tables[attribute][function] = value
    return registers, frames, stacks


def _attributes(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield attribute, short value and long value of each item of `.nv.info` or `.nv.compat`."""
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        form, attribute, value = _ATTRIBUTE.unpack_from(data, at)
        at += _ATTRIBUTE.size
        length = value if form == _EIFMT_SVAL else 0
        yield attribute, value, data[at : at + length]
        at += length


def _cuda_arch(elf: Elf, by_name: dict[str, Section]) -> str:
    if elf.abi == 7:
        number, accelerated = elf.flags & 0xFF, bool(elf.flags & 0x800)
    elif elf.abi == 8:
        number, accelerated = elf.flags >> 8 & 0xFF, bool(elf.flags & 0x8)
        compat = by_name.get(".nv.compat")
        if compat is not None:
            accelerated |= any(
                attribute == _EICOMPAT_ACCELERATOR and value & 0xFF == 1
                for attribute, value, _ in _attributes(elf.content(compat))
            )
    else:
        message = f"has an unknown ABI version: {elf.abi}"
        raise DamagedError(message)
    arch = f"sm_{number}"
    if accelerated:
        return f"{arch}a"
    return f"{arch}f" if _noted_arch(elf, by_name) == f"{arch}f" else arch


def _noted_arch(elf: Elf, by_name: dict[str, Section]) -> str:
    section = by_name.get(".note.nv.tkinfo")
    if section is None or section.kind != NOTE:
        return ""
    for _, _, description in elf.notes(section):
        noted = _ARCH_OPTION.search(description)
        if noted:
            return noted[1].decode()
    return ""
