"""The `ptx` compiler: a PTX module → a cubin, by nvJitLink."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from max_build.compilers import Derivation, Job, Product, cuda_options, linker
from max_build.compilers.cuda_libraries import NVJITLINK
from max_build.compilers.cuda_options import PTX_NAMES, CudaOptions
from max_build.compilers.kernel_sources import SourceCompiler, foreign, product_of
from max_build.compilers.ptx_text import read_ptx
from max_build.errors import CompileError
from max_build.key import Components, digest

if TYPE_CHECKING:
    from max_build.config import Unit

__all__ = ["PtxCompiler"]


@dataclass(frozen=True, slots=True)
class _State:
    options: CudaOptions
    module: bytes


class PtxCompiler(SourceCompiler):
    """Compiles `source = "….ptx"`."""

    name = "ptx"

    def problems(self, unit: Unit) -> Iterator[tuple[str, str]]:
        """Check the options, and that nothing is set that a PTX module cannot have."""
        for name, reason in cuda_options.problems(unit.declared["options"], PTX_NAMES):
            yield f"options.{name}", reason
        if unit.declared["include-dirs"]:
            yield "include-dirs", "is not for PTX, which includes nothing"
        yield from foreign(unit)

    def derive(self, job: Job) -> Derivation:
        """Hash the module; runs in the build process and loads no compiler."""
        declared = job.unit.declared
        options = cuda_options.decode(declared["options"], PTX_NAMES)
        path = job.root / declared["source"]
        try:
            module = path.read_bytes()
        except OSError as error:
            message = f"`{declared['source']}` cannot be read: {error.strerror}"
            raise CompileError(message) from error
        read_ptx(module, declared["source"])
        notes = self.notes_of(job.memory)
        compiler = notes.build_id(NVJITLINK)
        notes.save()
        components = Components(
            compiler={"nvjitlink": compiler.partition(" ")[2]},
            target=str(job.target),
            options={
                **options.canonical(),
                "keep-ptx": str(declared["keep-ptx"]).lower(),
                "names": "\n".join(declared["names"]),
            },
            sources={"source": digest(module)},
        )
        return Derivation(components, state=_State(options, module))

    def compile(self, job: Job, derivation: Derivation) -> Product:
        """Compile the bytes that were hashed."""
        state: _State = derivation.state
        linked = linker.link_cubin(
            state.module,
            job.unit.declared["source"],
            str(job.target),
            state.options.linker_arguments(),
        )
        if linked.log:
            print(linked.log)  # a worker's output is the record's log
        return product_of(job, linked.cubin, state.module, {})
