"""The adapters that turn a unit into an artifact for a target: their contract and their registry.

An adapter is light to import: it loads its compiler inside `derive` or `compile`, which run in a
worker, so that a build in which everything hits never meets a compiler at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from max_build.errors import ToolchainError

if TYPE_CHECKING:
    from max_build.config import Unit
    from max_build.key import Components
    from max_build.record import Kernel, Role, Tensor
    from max_build.target import Target

__all__ = ["Compiler", "Derivation", "Job", "Product", "get", "names"]

GROUP = "max_build.compilers"
_OWN = {
    "cuda": "max_build.compilers.cuda:CudaCompiler",
    "max": "max_build.compilers.max_graph:MaxCompiler",
    "triton": "max_build.compilers.triton:TritonCompiler",
}


@dataclass(frozen=True, slots=True)
class Job:
    """One unit for one target, and where its project lies on this machine.

    Nothing of it but the unit's declaration and the target may reach a key: `root`,
    `python_path` and `scratch` differ between two machines that share a cache.
    """

    unit: Unit
    target: Target
    root: Path
    python_path: tuple[str, ...]
    scratch: Path


@dataclass(frozen=True, slots=True)
class Derivation:
    """What a unit comes down to for one target, before anything is compiled.

    Parameters
    ----------
    components
        What decides the artifact's bytes.
    ir
        The canonical text that was hashed, kept to explain a later miss; None where the sources
        themselves are what was hashed.
    uncacheable
        Why these components do not decide the bytes after all; empty when they do. Such a unit
        is compiled each time and never published.
    state
        What `compile` needs, opaque to everybody else; it stays in the process that derived.
    """

    components: Components
    ir: bytes | None = None
    uncacheable: str = ""
    state: Any = None


@dataclass(frozen=True, slots=True)
class Product:
    """What a compile left behind, validated by the adapter that made it.

    Parameters
    ----------
    files
        Role → file in the job's scratch directory, or several where a kernel module has a cubin
        for each of its kernels.
    kernels
        Source-level name → what a launch needs, of a kernel module.
    inputs, outputs, weights
        The signature of a graph.
    """

    files: Mapping[Role, Path | tuple[Path, ...]]
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()


class Compiler(Protocol):
    """An adapter of the entry-point group `max_build.compilers`, made without arguments."""

    @property
    def name(self) -> str:
        """Its name in `compiler = …`, and in messages."""
        ...

    @property
    def accepts(self) -> tuple[Target, ...]:
        """Every target it can compile for."""
        ...

    @property
    def runs_user_code(self) -> bool:
        """Whether `derive` runs the project's code or a compiler, and so needs a worker."""
        ...

    @property
    def one_job_per_process(self) -> bool:
        """Whether a process that compiled must not be used again."""
        ...

    def problems(self, unit: Unit) -> Iterable[tuple[str, str]]:
        """What is wrong with a unit's declaration, as (key within its table, "must be …")."""
        ...

    def derive(self, job: Job) -> Derivation:
        """Find out what decides the artifact's bytes.

        Raises
        ------
        CompileError
            If the unit's own code or sources are at fault.
        ToolchainError
            If the compiler is missing or unusable.
        """
        ...

    def compile(self, job: Job, derivation: Derivation) -> Product:
        """Compile, validate, and leave the files in `job.scratch`.

        Raises
        ------
        CompileError
            If the compiler refuses, or its product is not what the target asks for.
        """
        ...


@functools.cache
def get(name: str) -> Compiler:
    """The adapter of that name: max-build's own, else an installed distribution's.

    Raises
    ------
    ToolchainError
        If there is none, or it cannot be loaded.
    """
    if name in _OWN:
        point = metadata.EntryPoint(name, _OWN[name], GROUP)
    else:
        found = [point for point in metadata.entry_points(group=GROUP) if point.name == name]
        if not found:
            message = f"no compiler `{name}`; there are {', '.join(f'`{one}`' for one in names())}"
            raise ToolchainError(message, hint="install the distribution that provides it")
        point = found[0]
    try:
        adapter: Compiler = point.load()()
    except Exception as error:
        message = f"compiler `{name}` ({point.value}) cannot be loaded: {error}"
        raise ToolchainError(message) from error
    return adapter


def names() -> tuple[str, ...]:
    """Every adapter that is installed, sorted."""
    return tuple(sorted({*_OWN, *(point.name for point in metadata.entry_points(group=GROUP))}))
