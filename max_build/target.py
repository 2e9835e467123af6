"""What a unit is compiled for: an exact string, parsed once and checked against known hardware."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from max_build.errors import TargetError

__all__ = ["KNOWN_TARGETS", "Target", "native", "parse"]

Api = Literal["cpu", "cuda", "hip"]

# Compute capabilities NVIDIA has named, and which of them have an architecture-specific (`a`)
# and a family-specific (`f`) instruction set: CUDA C++ Programming Guide, "Feature Set Compiler
# Targets"; the PTX ISA's `.target` table.
_CUDA = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
_CUDA_EXACT = (90, 100, 101, 103, 110, 120, 121)
_CUDA_FAMILY = (100, 101, 103, 110, 120, 121)
# AMDGPU processors that LLVM names and ROCm supports for compute: LLVM's "User Guide for AMDGPU
# Backend", table of processors.
_HIP = (
    "906 908 90a 942 950 1030 1031 1032 1100 1101 1102 1103 1150 1151 1152 1153 1200 1201".split()
)

_SM = re.compile(r"sm_(\d+)([af]?)")


@dataclass(frozen=True, slots=True)
class Target:
    """One target: `cpu`, `sm_NN`, `sm_NNa`, `sm_NNf` or `gfxNNN`.

    `str(target)` is the exact string that goes into keys. Targets sort as their names do.
    """

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def api(self) -> Api:
        """The device API that runs it."""
        if self.name == "cpu":
            return "cpu"
        return "cuda" if self.name.startswith("sm_") else "hip"

    @property
    def is_cpu(self) -> bool:
        """Whether the target is the host itself."""
        return self.name == "cpu"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor) of a CUDA target.

        Raises
        ------
        ValueError
            If the target is not a CUDA one.
        """
        found = _SM.fullmatch(self.name)
        if not found:
            message = f"`{self.name}` is no CUDA target, so it has no compute capability"
            raise ValueError(message)
        number = int(found[1])
        return number // 10, number % 10

    @property
    def suffix(self) -> str:
        """`a` (this architecture only), `f` (this family) or empty, of a CUDA target."""
        found = _SM.fullmatch(self.name)
        return found[2] if found else ""


KNOWN_TARGETS: tuple[Target, ...] = (
    Target("cpu"),
    *(
        Target(f"sm_{number}{suffix}")
        for number in _CUDA
        for suffix, numbers in (("", _CUDA), ("a", _CUDA_EXACT), ("f", _CUDA_FAMILY))
        if number in numbers
    ),
    *(Target(f"gfx{number}") for number in _HIP),
)
"""Every target that some compiler may accept, in the order of the hardware."""


def parse(text: str, *, accepted: tuple[Target, ...] = KNOWN_TARGETS) -> Target:
    """Return the target that `text` names.

    Parameters
    ----------
    text
        An exact name, or `native` for the device of this machine.
    accepted
        What the unit's compiler accepts.

    Raises
    ------
    TargetError
        If the compiler does not accept it; with close names, else all that it does accept.
    """
    target = native() if text == "native" else Target(text)
    if target in accepted:
        return target
    names = [one.name for one in accepted]
    import difflib  # not where all is well

    close = difflib.get_close_matches(target.name, names, n=3)
    known = "not a target of this compiler" if target in KNOWN_TARGETS else "an unknown target"
    via = " (from `native`)" if text == "native" else ""
    hint = f"did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
    message = f"`{target.name}`{via} is {known}"
    if not hint:
        message += f"; it accepts {', '.join(names)}"
    raise TargetError(message, hint=hint)


def native() -> Target:
    """The first GPU of this machine as the most exact target it has, or `cpu` where there is none.

    Several devices in one machine count as the first one, as everywhere in CUDA and HIP.
    """
    from max_build.runtime import devices

    for major, minor in devices.cuda_capabilities():
        number = 10 * major + minor
        return Target(f"sm_{number}{'a' if number in _CUDA_EXACT else ''}")
    for name in devices.hip_architectures():
        return Target(name)
    return Target("cpu")
