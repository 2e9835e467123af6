"""Which CUDA device runs which code: the compatibility rules as a pure function.

Follows the CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility" and "Feature
Set Compiler Targets"; which devices form a family was checked with the assembler of CUDA 13.5,
which takes PTX for `sm_100f` to sm_100, sm_103 and sm_107 and to nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Accepted", "Rejected", "can_jit", "can_run", "ptx_isa_of"]

Capability = tuple[int, int]
"""Compute capability of a device, (major, minor)."""

_ARCH = re.compile(r"(?:sm|compute)_(\d+)(\d)([af]?)")

# Each CUDA 12 release and the PTX ISA it brought ("PTX ISA", "Release History"); before and after
# it the numbers follow a rule.
_CUDA_12_ISA = (0, 1, 2, 3, 4, 5, 5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The device runs it."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The device does not run it; `reason` is one line to read after the artifact's name."""

    reason: str


def can_run(artifact_arch: str, device: Capability) -> Accepted | Rejected:
    """Whether a device runs machine code, by the exact architecture of the code.

    Parameters
    ----------
    artifact_arch
        `sm_NN` runs where the major number is the same and the minor not lower, `sm_NNf` where
        moreover the device is of the family, and `sm_NNa` on that one capability.
    device
        Its compute capability.
    """
    parsed = _parse(artifact_arch)
    if parsed is None:
        return Rejected(f"`{artifact_arch}` is not the name of a CUDA architecture")
    code, suffix = parsed
    name = _named(device)
    if suffix == "a":
        if device == code:
            return Accepted()
        return Rejected(f"it runs on {_named(code)} alone, and the device is {name}")
    if suffix == "f":
        if _same_family(code, device) and device >= code:
            return Accepted()
        return Rejected(f"it runs on the family of {_named(code)}, and the device is {name}")
    if device[0] != code[0]:
        return Rejected(f"it runs on {code[0]}.x devices, and the device is {name}")
    if device < code:
        return Rejected(f"it needs {_named(code)} or later, and the device is {name}")
    return Accepted()


def can_jit(
    ptx_target: str, ptx_isa: tuple[int, int], device: Capability, driver_isa: tuple[int, int]
) -> Accepted | Rejected:
    """Whether a driver compiles a PTX module for a device.

    Parameters
    ----------
    ptx_target
        The module's `.target`, such as `sm_80`: a plain one is compiled for every later device,
        `f` within its family, `a` for that one capability.
    ptx_isa
        The module's `.version`.
    device
        Its compute capability.
    driver_isa
        The newest PTX ISA the driver takes; see `ptx_isa_of`.
    """
    parsed = _parse(ptx_target)
    if parsed is None:
        return Rejected(f"`{ptx_target}` is not the name of a CUDA architecture")
    if ptx_isa > driver_isa:
        return Rejected(
            f"it is PTX ISA {ptx_isa[0]}.{ptx_isa[1]}, and the driver takes up to "
            f"{driver_isa[0]}.{driver_isa[1]}"
        )
    code, suffix = parsed
    if suffix:
        return can_run(ptx_target, device)
    if device < code:
        return Rejected(f"it needs {_named(code)} or later, and the device is {_named(device)}")
    return Accepted()


def ptx_isa_of(cuda: tuple[int, int]) -> tuple[int, int]:
    """The newest PTX ISA of a CUDA release, such as the one a driver reports.

    CUDA 11.x has 7.x, 13.x has 9.x, and each major release after it the next number; an older one
    is taken for CUDA 10.0, which had 6.3.
    """
    major, minor = cuda
    if major == 12:
        return (8, _CUDA_12_ISA[min(minor, len(_CUDA_12_ISA) - 1)])
    if major < 11:
        return (6, 3)
    return (major - 4, minor)


def _parse(arch: str) -> tuple[Capability, str] | None:
    found = _ARCH.fullmatch(arch)
    return ((int(found[1]), int(found[2])), found[3]) if found else None


def _same_family(code: Capability, device: Capability) -> bool:
    # 10.1 is what 11.0 was called before CUDA 13, and no member of the family of 10.0.
    return device[0] == code[0] and ((10, 1) not in (code, device) or code == device)


def _named(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
