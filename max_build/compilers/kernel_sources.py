"""What the compilers of kernel sources share: where they run, their notes, and their product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from max_build import schema
from max_build.compilers import Job, Product
from max_build.compilers.cubin import check_cubin
from max_build.compilers.notes import Notes
from max_build.record import Kernel, Role
from max_build.target import KNOWN_TARGETS, Target

if TYPE_CHECKING:
    from max_build.compilers import Memory
    from max_build.config import Unit

__all__ = ["SourceCompiler", "foreign", "product_of"]

_OF_TRITON: Final = ("constexprs", "signature", "specialisations", "num-warps", "num-stages")
_DEFAULTS: Final = {field.name: field.default for field in schema.KERNEL}


class SourceCompiler:
    """What compilers of kernel sources share: keyed from bytes, in the build process."""

    kinds: tuple[Literal["graph", "kernel"], ...] = ("kernel",)
    accepts: tuple[Target, ...] = tuple(one for one in KNOWN_TARGETS if one.api == "cuda")
    runs_user_code = False
    one_job_per_process = False

    def __init__(self) -> None:
        self._notes: tuple[Memory | None, Notes] | None = None

    def notes_of(self, memory: Memory | None) -> Notes:
        """The notes over `memory`, kept for the next job."""
        if self._notes is None or self._notes[0] is not memory:
            self._notes = (memory, Notes(memory))
        return self._notes[1]


def foreign(unit: Unit) -> Iterator[tuple[str, str]]:
    """The keys of a kernel's table that are set though only a Triton kernel has them."""
    for name in _OF_TRITON:
        if unit.declared[name] != _DEFAULTS[name]:
            yield name, "is for a Triton kernel alone"


def product_of(job: Job, cubin: bytes, ptx: bytes, lowered: Mapping[str, str]) -> Product:
    """Check a compiled cubin and leave it in the job's scratch directory, with PTX if it is kept.

    `lowered` has the names in the code of those declared that are others there.

    Raises
    ------
    CompileError
        If it is not a whole cubin for the target with the declared kernels in it.
    """
    declared = job.unit.declared
    kernels = _kernels(cubin, str(job.target), declared["names"], lowered)
    files: dict[Role, Path | tuple[Path, ...]] = {"cubin": job.scratch / "kernel.cubin"}
    (job.scratch / "kernel.cubin").write_bytes(cubin)
    if declared["keep-ptx"]:
        files["ptx"] = job.scratch / "kernel.ptx"
        (job.scratch / "kernel.ptx").write_bytes(ptx)
    return Product(files=files, kernels=kernels)


def _kernels(
    cubin: bytes, target: str, names: Sequence[str], lowered: Mapping[str, str]
) -> dict[str, Kernel]:
    """A cubin's kernels by the names asked for, or every one where none was."""
    promised = {name: lowered.get(name, name) for name in names}
    found = check_cubin(cubin, target, promised.values())
    if not promised:
        promised = {name: name for name in found.entry_points}
    return {name: Kernel(lowered=symbol) for name, symbol in promised.items()}
