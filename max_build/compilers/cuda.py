"""The `cuda` compiler: CUDA C++ and every header it can reach → a cubin, by NVRTC.

The key is made of raw bytes, without loading a compiler; what is compiled is a private tree that
holds exactly those bytes. A source whose headers cannot be known beforehand is compiled where it
lies, and not kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from max_build.compilers import Derivation, Job, Product, cuda_options, nvrtc
from max_build.compilers.cuda_environment import relevant
from max_build.compilers.cuda_libraries import NVRTC
from max_build.compilers.cuda_options import CudaOptions
from max_build.compilers.files import Disk
from max_build.compilers.includes import SOURCE_ROOT, Closure, Layout, pasted
from max_build.compilers.kernel_sources import SourceCompiler, foreign, product_of
from max_build.compilers.scan import glued, pieces
from max_build.compilers.tree import CANONICAL, materialise
from max_build.errors import CompileError
from max_build.key import Components
from max_build.workspace import in_memory

if TYPE_CHECKING:
    from max_build.config import Unit

__all__ = ["CudaCompiler"]


class _State(msgspec.Struct, frozen=True):
    options: CudaOptions
    layout: Layout
    closure: Closure


class CudaCompiler(SourceCompiler):
    """Compiles `source = "….cu"`."""

    name = "cuda"

    def problems(self, unit: Unit) -> Iterator[tuple[str, str]]:
        """Check the options, and that nothing of Triton's is set."""
        for name, reason in cuda_options.problems(unit.declared["options"]):
            yield f"options.{name}", reason
        yield from foreign(unit)

    def derive(self, job: Job) -> Derivation:
        """Hash the source and its headers; runs in the build process and loads no compiler."""
        declared = job.unit.declared
        options = cuda_options.decode(declared["options"])
        notes = self.notes_of(job.memory)
        compiler = notes.build_id(NVRTC)
        closure, layout = notes.closure(str(job.root), declared["source"], declared["include-dirs"])
        notes.save()
        closure = _with_defines(closure, options)
        # What the compiler can tell from the bytes: their names, and which are one file.
        files = {
            one.path: one.digest + (f" same file as {one.first}" if one.first != one.path else "")
            for one in closure.files
        }
        environment, why = relevant(os.environ)
        components = Components(
            compiler={"nvrtc": compiler.partition(" ")[2]},
            target=str(job.target),
            options={
                **options.canonical(),
                "include-dirs": "\n".join(closure.include_dirs),
                "keep-ptx": str(declared["keep-ptx"]).lower(),
                "names": "\n".join(declared["names"]),
                "source": closure.source,
            },
            sources={"source": files.pop(closure.source)},
            dependencies=files,
            environment=environment,
        )
        return Derivation(
            components,
            uncacheable=why or "; ".join(map(_as_written, closure.problems[:3])),
            state=_State(options, layout, closure),
        )

    def compile(self, job: Job, derivation: Derivation) -> Product:
        """Compile from the private tree; in place only what cannot be compiled there."""
        state: _State = derivation.state
        if derivation.uncacheable:
            return _in_place(job, state)
        try:
            return _in_tree(job, state)
        except CompileError as error:
            missed = nvrtc.unopened_headers(error.message)
            if not missed:
                raise
            # The search may have overlooked a header: then it is there, and NVRTC finds it.
            product = _in_place(job, state)
        why = f"NVRTC found {', '.join(f'`{name}`' for name in missed)}, the search did not"
        return Product(product.files, product.kernels, uncacheable=why)


def _with_defines(closure: Closure, options: CudaOptions) -> Closure:
    """A closure to whose problems is added what the unit's macros make of its pieces."""
    if not options.defines:
        return closure
    words = pieces(" ".join(options.defines.values()).encode())
    name = glued({*closure.pieces, *words}) if words else ""
    problem = pasted(closure.source, name)
    if not name or problem in closure.problems:
        return closure
    return msgspec.structs.replace(closure, problems=(*closure.problems, problem))


def _in_tree(job: Job, state: _State) -> Product:
    paths = [state.layout.disk_path(one.path) for one in state.closure.files]
    with in_memory(job.scratch, sum(map(_size, paths))) as directory:
        tree = materialise(state.closure, state.layout, Disk(), directory)
        try:
            with tree.entered():
                return _compile(job, state, tree.source, tree.name, tree.include_args)
        except CompileError as error:
            message = _where_it_lies(error.message, job, state.layout)
            raise CompileError(message, hint=error.hint) from error


def _as_written(problem: str) -> str:
    """A closure's problem with the project's files as the project names them."""
    return re.sub(rf"(^|`){SOURCE_ROOT}/", r"\1", problem)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0  # it is gone, and the copy says so


def _where_it_lies(text: str, job: Job, layout: Layout) -> str:
    """A message with the paths of the tree turned into those of the user's files."""
    root = os.path.realpath(job.root)
    for name, directory in layout.roots.items():
        shown = "" if directory == root else f"{directory}/"
        text = text.replace(f"{CANONICAL}/{name}/", shown)
    return text


def _in_place(job: Job, state: _State) -> Product:
    layout = state.layout
    path = Path(layout.disk_path(state.closure.source))
    include_args = [f"-I{layout.disk_path(one)}" for one in layout.include_dirs]
    return _compile(job, state, path.read_bytes(), str(path), include_args)


def _compile(
    job: Job, state: _State, source: bytes, name: str, include_args: Sequence[str]
) -> Product:
    names: tuple[str, ...] = job.unit.declared["names"]
    arguments = (*state.options.arguments(), *include_args)
    compiled = nvrtc.compile_cubin(source, name, str(job.target), arguments, names)
    if compiled.log:
        # A worker's output is the record's log.
        print(_where_it_lies(compiled.log, job, state.layout))
    return product_of(job, compiled.cubin, compiled.ptx, compiled.lowered)
