"""What a build and its workers tell each other: requests and answers, a line of JSON each."""

from __future__ import annotations

from pathlib import Path

import msgspec

from max_build.compilers import Job, Memory
from max_build.config import Unit
from max_build.errors import CompileError, MaxBuildError, ToolchainError
from max_build.key import Components
from max_build.recipes.recipe import Recipe
from max_build.record import Kernel, Role, Tensor
from max_build.target import Target

__all__ = ["Answer", "Compile", "Compiled", "Derive", "Derived", "Failed", "Request"]


class Derive(msgspec.Struct, frozen=True, tag=True):
    """Asks for a unit's components for one target."""

    unit: Unit
    target: str
    root: str
    python_path: tuple[str, ...]
    scratch: str
    memory: str = ""

    def job(self, memory: Memory | None = None) -> Job:
        """The job as an adapter takes it."""
        return Job(
            unit=self.unit,
            target=Target(self.target),
            root=Path(self.root),
            python_path=self.python_path,
            scratch=Path(self.scratch),
            memory=memory,
        )


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Asks to compile what was derived last."""


class Derived(msgspec.Struct, frozen=True, tag=True):
    """Answers `Derive`; `ir` is a file in the scratch directory, or empty.

    Without a recipe, `always` says why the unit is derived in every build.
    """

    components: Components
    ir: str
    uncacheable: str
    recipe: Recipe | None = None
    always: str = ""


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """Answers `Compile`: role → files, and what the record says of them."""

    files: dict[Role, tuple[str, ...]]
    kernels: dict[str, Kernel]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    arch: str = ""
    uncacheable: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Answers either: the compiler's or the project's fault, told in full."""

    message: str
    hint: str
    toolchain: bool

    def error(self) -> MaxBuildError:
        """The error to raise on the other side."""
        kind = ToolchainError if self.toolchain else CompileError
        return kind(self.message, hint=self.hint)


Request = Derive | Compile
Answer = Derived | Compiled | Failed
