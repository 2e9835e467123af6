"""The machine code in a MEF or any other file of an artifact, and whether it is the target's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from max_build.compilers.code_object import code_object_of
from max_build.compilers.cubin import Kernel, cubin_of, read_cubin
from max_build.compilers.elf_headers import (
    AARCH64,
    AMDGPU,
    CUDA,
    HEADER_SIZE,
    MAGIC,
    X86_64,
    DamagedError,
    Elf,
)
from max_build.errors import CompileError
from max_build.record import Role

__all__ = ["CODE", "Image", "check_mef", "mef_architectures", "read_code", "read_mef"]

CODE: Final[tuple[Role, ...]] = ("mef", "cubin")
"""The roles of an artifact's files that hold machine code."""


@dataclass(frozen=True, slots=True)
class Image:
    """One ELF inside a file: `offset` and `size` in bytes, `e_machine`, and its architecture.

    `arch` is `sm_NN[af]`, `gfxNNN`, or `x86-64` / `aarch64` for host code. `kernels` is empty for
    host code.
    """

    offset: int
    size: int
    machine: int
    arch: str
    kernels: tuple[Kernel, ...] = ()


def read_mef(data: bytes) -> tuple[Image, ...]:
    """Find every ELF in a MEF, in order of offset.

    The container has no public description. Host code lies in it whole, and device code lies
    whole in the read-only data of the host code, so an ELF is found by its magic and its end by
    its own tables.

    Raises
    ------
    CompileError
        An ELF in it is truncated or damaged, or is for a machine no artifact may hold.
    """
    images: list[Image] = []
    host_end = 0
    at = data.find(MAGIC)
    while at >= 0:
        try:
            elf = Elf(data, at)
            if elf.machine == CUDA:
                cubin = cubin_of(elf)
                images.append(Image(at, elf.extent, CUDA, cubin.arch, cubin.kernels))
                at += elf.extent
            elif elf.machine == AMDGPU:
                arch, kernels = code_object_of(elf)
                images.append(Image(at, elf.extent, AMDGPU, arch, kernels))
                at += elf.extent
            elif elf.machine in (X86_64, AARCH64):
                if at < host_end:
                    message = "is host code inside host code"
                    raise DamagedError(message)
                host_end = at + elf.extent
                arch = "x86-64" if elf.machine == X86_64 else "aarch64"
                images.append(Image(at, elf.extent, elf.machine, arch))
                at += HEADER_SIZE  # device code lies inside it
            else:
                message = f"is code for an unexpected machine: e_machine {elf.machine}"
                raise DamagedError(message)
        except DamagedError as damage:
            message = f"the ELF at byte {at} of the MEF {damage}"
            raise CompileError(message) from None
        at = data.find(MAGIC, at)
    return tuple(images)


def read_code(data: bytes, role: Role) -> tuple[Image, ...]:
    """Every piece of machine code in an artifact's file of a role in `CODE`.

    Raises
    ------
    CompileError
        It is damaged, or not of that role.
    """
    if role == "mef":
        return read_mef(data)
    cubin = read_cubin(data)
    return (Image(0, len(data), CUDA, cubin.arch, cubin.kernels),)


def mef_architectures(target: str) -> frozenset[str]:
    """Architectures that the device code of a MEF for `target` may have.

    The target itself, and one tolerance: MAX 26.7.0 compiles a plain `sm_NN` from sm_90 on with
    the instructions of `sm_NNa` (seen for sm_90, sm_100 and sm_120), so that code is accepted for
    that target. It still runs on that one architecture only: choose a device by `Image.arch`, not
    by the target.
    """
    found = re.fullmatch(r"sm_(\d+)", target)
    if found and int(found[1]) >= 90:
        return frozenset((target, f"{target}a"))
    return frozenset((target,)) if target != "cpu" else frozenset()


def check_mef(data: bytes, target: str) -> tuple[Image, ...]:
    """Check that a MEF holds host code, and device code for `target` alone; return its ELFs.

    `cpu` allows no device code. A graph for a GPU may have none either, where each of its kernels
    comes from a vendor's library. `mef_architectures` states the one tolerance.

    Raises
    ------
    CompileError
        The MEF is empty, holds no host code or a damaged ELF, or device code for something else.
    """
    if not data:
        message = "the MEF is empty"
        raise CompileError(message)
    images = read_mef(data)
    device = [image for image in images if image.machine in (CUDA, AMDGPU)]
    if len(device) == len(images):
        message = "the MEF holds no host code"
        raise CompileError(message)
    accepted = mef_architectures(target)
    foreign = [image for image in device if image.arch not in accepted]
    if foreign:
        found = ", ".join(f"`{arch}`" for arch in sorted({image.arch for image in foreign}))
        message = (
            f"the MEF for `{target}` holds {len(foreign)} of {len(device)} device images for "
            f"{found}, the first at byte {foreign[0].offset}"
        )
        raise CompileError(message)
    return images
