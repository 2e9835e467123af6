"""The adapters that turn a unit into an artifact for a target: their contract and their registry.

An adapter is light to import: it loads its compiler inside `derive` or `compile`, which run in a
worker, so that a build in which everything hits never meets a compiler at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

from max_build.errors import ToolchainError

if TYPE_CHECKING:
    from max_build.config import Unit
    from max_build.key import Components
    from max_build.record import Kernel, Role, Tensor
    from max_build.target import Target

__all__ = ["Compiler", "Derivation", "Direct", "Job", "Memory", "Product", "get", "names", "takes"]

GROUP = "max_build.compilers"
# As pyproject.toml has them for whoever else asks. Repeated, because `metadata.entry_points` looks
# through every installed distribution: 10 ms, which a build in which everything hits would notice.
_OWN = {
    "cuda": "max_build.compilers.cuda:CudaCompiler",
    "max": "max_build.compilers.max_graph:MaxCompiler",
    "ptx": "max_build.compilers.ptx:PtxCompiler",
    "triton": "max_build.compilers.triton:TritonCompiler",
}


class Memory(Protocol):
    """Small values by (namespace, key) that may be forgotten at any time; never raises."""

    def get(self, namespace: str, key: str) -> bytes | None:
        """The value last set, or None."""
        ...

    def under(self, namespace: str, prefix: str) -> dict[str, bytes]:
        """The values of the keys that begin with `prefix`, by key, for the cost of one."""
        ...

    def set(self, namespace: str, key: str, value: bytes) -> None:
        """Remember a value."""
        ...


class Job(msgspec.Struct, frozen=True):
    """One unit for one target, and where its project lies on this machine.

    Nothing of it but the unit's declaration and the target may reach a key: `root`,
    `python_path` and `scratch` differ between two machines that share a cache. `memory` is where
    an adapter may note what it found out about files, to be checked before it is believed.
    """

    unit: Unit
    target: Target
    root: Path
    python_path: tuple[str, ...]
    scratch: Path
    memory: Memory | None = None


class Derivation(msgspec.Struct, frozen=True):
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
    reads
        Files and folders, each with all that is in it, that the derivation read by other means
        than Python's own: by a compiler's subprocess or its native code.
    """

    components: Components
    ir: bytes | None = None
    uncacheable: str = ""
    state: Any = None
    reads: tuple[Path, ...] = ()


class Product(msgspec.Struct, frozen=True):
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
    arch
        The architecture of the device code, where it is not the target's.
    uncacheable
        As in `Derivation`, where it showed in the compile alone.
    """

    files: Mapping[Role, Path | tuple[Path, ...]]
    kernels: Mapping[str, Kernel] = {}
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()
    arch: str = ""
    uncacheable: str = ""


class Compiler(Protocol):
    """An adapter of the entry-point group `max_build.compilers`, made without arguments."""

    @property
    def name(self) -> str:
        """Its name in `compiler = …`, and in messages."""
        ...

    @property
    def kinds(self) -> tuple[Literal["graph", "kernel"], ...]:
        """The kinds of unit it takes; an adapter that does not say takes both."""
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


@runtime_checkable
class Direct(Protocol):
    """What an adapter that runs the project's code has besides `Compiler`, for recipes.

    Between them, `distributions` and `ambient` have to name all that the compiler by itself takes
    from the machine: a recipe notes what the project does, and leaves the compiler to its adapter.
    An adapter without them derives every unit anew.
    """

    @property
    def distributions(self) -> tuple[str, ...]:
        """The distributions that make up the compiler; `components.compiler` names no other."""
        ...

    def ambient(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What the compiler reads besides: its variables, its own files by digest.

        Cheap, and without importing the compiler: every lookup asks.
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
        found = [point for point in _installed() if point.name == name]
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


def takes(adapter: Compiler, kind: Literal["graph", "kernel"]) -> bool:
    """Whether an adapter compiles units of that kind, whose tables have keys of their own."""
    return kind in getattr(adapter, "kinds", (kind,))


def names() -> tuple[str, ...]:
    """Every adapter that is installed, sorted."""
    return tuple(sorted({*_OWN, *(point.name for point in _installed())}))


def _installed() -> metadata.EntryPoints:
    try:
        return metadata.entry_points(group=GROUP)
    except OSError as error:
        message = f"what compilers are installed cannot be read: {error}"
        raise ToolchainError(message) from error
