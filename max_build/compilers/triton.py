"""The `triton` compiler: a Triton kernel, specialised once or several times → a cubin for each.

A specialisation is derived to TTIR, Triton's first level of IR after the inliner, and compiled
from that very text: what was hashed is what is compiled. No GPU is needed: the target is given.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from max_build import distributions
from max_build.compilers import Derivation, Job, Product, ptxas_options
from max_build.compilers.cubin import check_cubin
from max_build.compilers.entry import imported, located, told
from max_build.compilers.triton_environment import ambient, neutral, relevant
from max_build.compilers.triton_units import Special, problems, specials
from max_build.errors import CompileError, ToolchainError
from max_build.key import Components, digest
from max_build.record import Kernel
from max_build.target import Target

if TYPE_CHECKING:
    from max_build.config import Unit

__all__ = ["TritonCompiler"]

# Triton compiles a plain number, and from 90 on for the architecture-specific set alone. Its LLVM
# and ptxas lack the others: seen with Triton 3.8.
_ARCHITECTURES = "75 80 86 87 89 90a 100a 103a 110a 120a 121a".split()
_WARP = 32


@dataclass(frozen=True, slots=True)
class _Module:
    """One specialisation as derived: its TTIR, and Triton's options in full."""

    special: Special
    text: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _State:
    modules: dict[str, _Module]
    environment: dict[str, str]


class TritonCompiler:
    """Compiles `entry = "package.module:kernel"`, a function under `@triton.jit`."""

    name = "triton"
    kinds: tuple[Literal["graph", "kernel"], ...] = ("kernel",)
    accepts: tuple[Target, ...] = tuple(Target(f"sm_{one}") for one in _ARCHITECTURES)
    runs_user_code = True
    # What one unit's code imports, patches or reads must not show in the next one's key or recipe.
    one_job_per_process = True
    distributions = ("triton",)

    def problems(self, unit: Unit) -> Iterator[tuple[str, str]]:
        """Check what can be checked without the kernel: types, options, numbers."""
        yield from problems(unit)

    def ambient(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that reach Triton, which is not imported; its ptxas is one of its files."""
        return ambient(environ)

    def derive(self, job: Job) -> Derivation:
        """Run Triton's front end: one TTIR module for each specialisation."""
        declared = specials(job.unit)
        with _isolated(job):
            _check_version()
            modules: dict[str, _Module] = {}
            with imported(job) as entry:
                kernel = _kernel(job, entry)
                for name, special in declared.items():
                    modules[name] = _lower(job, name, special, kernel)
            _refuse_hooks()
            environment, uncacheable = relevant(os.environ)
            state = _State(modules, dict(os.environ))
            ptxas = _ptxas(job.target)
        compiler = distributions.identities(self.distributions)
        if "+unrecorded" in compiler.get("triton", "+unrecorded"):
            uncacheable = uncacheable or "Triton was not installed from a wheel"
        uncacheable = uncacheable or distributions.foreign(self.distributions, ("triton",))
        components = Components(
            compiler={**compiler, **ptxas},
            target=str(job.target),
            options={
                f"{name}.{field}": value
                for name, module in modules.items()
                for field, value in _canonical(module).items()
            },
            sources={name: digest(module.text.encode()) for name, module in modules.items()},
            environment=environment,
        )
        for reason in (_absolute_path, _for_ptxas):
            uncacheable = uncacheable or next(filter(None, map(reason, modules.values())), "")
        ir = "".join(f"// {name}\n{module.text}" for name, module in modules.items()).encode()
        return Derivation(components, ir, uncacheable, state)

    def compile(self, job: Job, derivation: Derivation) -> Product:
        """Compile each module's text, alone in an empty directory."""
        state: _State = derivation.state
        kernels: dict[str, Kernel] = {}
        files: list[Path] = []
        with _isolated(job):
            os.environ.update(state.environment)
            for name, module in state.modules.items():
                cubin, kernels[name] = _compile(job, name, module)
                files.append(job.scratch / f"{len(files)}.cubin")
                files[-1].write_bytes(cubin)
        return Product(
            files={"cubin": files[0] if len(files) == 1 else tuple(files)},
            kernels=kernels,
            uncacheable=distributions.foreign(self.distributions, ("triton",)),
        )


@contextlib.contextmanager
def _isolated(job: Job) -> Iterator[None]:
    """Leave the process as it was: its environment, Triton's knobs, the temporary directory.

    Triton's own cache and whatever could answer in place of the compiler are out of the way.
    """
    before, temporary = dict(os.environ), tempfile.tempdir
    for name in [name for name in os.environ if neutral(name)]:
        del os.environ[name]
    os.environ["TRITON_CACHE_DIR"] = str(job.scratch / "triton")
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    tempfile.tempdir = str(job.scratch)
    knobs: dict[Any, dict[str, Any]] = {}
    try:
        triton = _triton()
        groups = [
            one for one in vars(triton.knobs).values() if isinstance(one, triton.knobs.base_knobs)
        ]
        knobs = {one: dict(vars(one)) for one in groups}
        yield
    finally:
        for one, values in knobs.items():
            vars(one).clear()
            vars(one).update(values)
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = temporary


def _triton() -> Any:
    try:
        import triton
    except ImportError as error:
        message = f"Triton is needed to build this kernel, and cannot be imported: {error}"
        hint = "install the extra `max-build[triton]`; in [build-system], `requires` has to name it"
        raise ToolchainError(message, hint=hint) from error
    return triton


def _check_version() -> None:
    triton = _triton()
    found = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if found < (3, 4):
        message = f"Triton {triton.__version__} is too old: 3.4 or later is needed"
        raise ToolchainError(message, hint="install `triton>=3.4`")


def _kernel(job: Job, entry: Any) -> Any:
    """The kernel proper, under its autotuner and heuristics: those choose at run time."""
    from triton.runtime.jit import JITFunction

    kernel = entry
    while not isinstance(kernel, JITFunction) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    if not isinstance(kernel, JITFunction):
        what = f"`{type(entry).__module__}.{type(entry).__qualname__}`"
        name = job.unit.declared["entry"]
        message = f"`{name}` must be a kernel under `@triton.jit`, it is a {what}"
        raise CompileError(message)
    if getattr(kernel, "is_gluon", lambda: False)():
        message = f"`{job.unit.declared['entry']}` is a Gluon kernel, which is not supported"
        raise CompileError(message)
    return kernel


def _backend(target: Target) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    major, minor = target.capability
    return make_backend(GPUTarget("cuda", 10 * major + minor, _WARP))


def _ptxas(target: Target) -> dict[str, str]:
    """Version and build of a ptxas that is not Triton's own; of that one, RECORD has the digest.

    With it in the key there is no recipe: only a run of the tool tells what it is.
    """
    triton = _triton()
    nvidia, own = triton.knobs.nvidia, os.path.dirname(os.path.abspath(triton.__file__)) + os.sep
    tools = [getattr(nvidia, one) for one in ("ptxas", "ptxas_blackwell") if hasattr(nvidia, one)]
    if all(os.path.abspath(tool.path).startswith(own) for tool in tools):
        return {}
    text: str = _backend(target).hash()
    found = re.search(r"\b(V[\d.]+)\s+Build (\S+)", text)
    return {"ptxas": f"{found[1]} {found[2]}" if found else " ".join(text.split())}


def _lower(job: Job, name: str, special: Special, kernel: Any) -> _Module:
    """One specialisation's TTIR, after the passes that Triton runs on it."""
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource

    os.environ["TRITON_DISABLE_LINE_INFO"] = "0" if special.lineinfo else "1"
    arguments = [argument for argument in kernel.arg_names if argument not in special.constexprs]
    _check_arguments(job, name, special, kernel.arg_names, arguments)
    types = {one: special.signature[one].removesuffix(":16") for one in arguments}
    aligned = {
        (kernel.arg_names.index(one),): [["tt.divisibility", 16]]
        for one in arguments
        if special.signature[one].endswith(":16")
    }
    try:
        backend = _backend(job.target)
        options = backend.parse_options(dict(special.options))
        source = ASTSource(
            kernel,
            {one: types.get(one, "constexpr") for one in kernel.arg_names},
            special.constexprs,
            aligned,
        )
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        offered = {
            "target": backend.target,
            "options": options,
            "codegen_fns": backend.get_codegen_implementation(options),
            "module_map": backend.get_module_map(),
            "context": context,
        }
        wanted = inspect.signature(source.make_ir).parameters  # it grew one between releases
        module = source.make_ir(**{key: offered[key] for key in wanted})
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, source.language)
        module = stages["ttir"](module, {})
    except Exception as error:
        raise _refusal(job, name, error) from error
    text = str(module) if special.lineinfo else module.str_nodebug()
    ordered = Special({one: special.signature[one] for one in arguments}, {}, {}, special.lineinfo)
    return _Module(ordered, _relative(text, job), dict(vars(options)))


def _check_arguments(
    job: Job, name: str, special: Special, names: list[str], arguments: list[str]
) -> None:
    where = f"`{job.unit.declared['entry']}`, specialisation `{name}`"
    unknown = sorted((special.signature.keys() | special.constexprs.keys()) - set(names))
    if unknown:
        message = (
            f"{where}: the kernel has no argument {', '.join(f'`{one}`' for one in unknown)}; "
            f"it has {', '.join(f'`{one}`' for one in names)}"
        )
        raise CompileError(message)
    missing = [one for one in arguments if one not in special.signature]
    if missing:
        message = (
            f"{where}: {', '.join(f'`{one}`' for one in missing)} has neither a type in "
            "`signature` nor a value in `constexprs`"
        )
        raise CompileError(message)


def _refusal(job: Job, name: str, error: Exception) -> CompileError:
    """Triton's error, which quotes the kernel, with the reason that lies behind it."""
    cause = error.__cause__
    why = f": {cause}" if cause is not None and str(cause) not in str(error) else ""
    # Its own frames say nothing; the deepest kernel that it was in does.
    deepest: BaseException = error
    while getattr(deepest.__cause__, "src", None):
        deepest = deepest.__cause__ or deepest
    source, node = getattr(deepest, "src", None), getattr(deepest, "node", None)
    place = located(job, source, getattr(node, "lineno", 1)) if source else ""
    what = f"{type(error).__name__} at {place}: {error}" if place else told(job, error)
    return CompileError(f"Triton refused `{name}`: {what}{why}")


def _refuse_hooks() -> None:
    """What code puts into Triton's pipeline leaves no trace in the IR or the environment."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    if getattr(knobs.runtime, "add_stages_inspection_hook", None) or getattr(
        CUDABackend, "instrumentation", None
    ):
        message = "the kernel's module puts a hook into Triton's pipeline, which is not supported"
        raise CompileError(message)


def _relative(text: str, job: Job) -> str:
    """TTIR whose locations name each file as an import would find it, wherever that is."""
    for root in sorted({*job.python_path, str(job.root), *sys.path}, key=len, reverse=True):
        if root:
            text = text.replace(f'loc("{root.rstrip("/")}/', 'loc("')
    return text


def _absolute_path(module: _Module) -> str:
    found = re.search(r'loc\("(/[^"]*)"', module.text)
    return f"the line information names `{found[1]}`, outside of the project" if found else ""


def _for_ptxas(module: _Module) -> str:
    """Why the options for ptxas, which the kernel's module may set too, cannot be keyed."""
    return ptxas_options.doubt(module.options.get("ptx_options") or "")


def _canonical(module: _Module) -> dict[str, str]:
    """Triton's options in full, so that one left out and one set to its default are the same."""
    found = {
        field: str(sorted(value) if isinstance(value, set) else value)
        for field, value in module.options.items()
        if field != "extern_libs"  # Triton's own libdevice: part of its distribution
    }
    # The record repeats the types as they are declared, where the IR may not tell them apart.
    types = ", ".join(module.special.signature.values())
    return {**found, "lineinfo": str(module.special.lineinfo), "signature": types}


def _compile(job: Job, name: str, module: _Module) -> tuple[bytes, Kernel]:
    """One module's cubin, and what a launch of it needs."""
    triton = _triton()
    os.environ["TRITON_DISABLE_LINE_INFO"] = "0" if module.special.lineinfo else "1"
    # ptxas notes time and size of each source file that it finds: in an empty directory, none.
    # The name of this one stands in assertions where there are no other locations.
    directory = Path(tempfile.mkdtemp(dir=job.scratch))
    with contextlib.chdir(directory):
        Path("kernel.ttir").write_text(module.text)
        try:
            compiled = triton.compile(
                "kernel.ttir", target=_backend(job.target).target, options=dict(module.options)
            )
        except Exception as error:
            raise _refusal(job, name, error) from error
    cubin: bytes = compiled.asm["cubin"]
    metadata = compiled.metadata
    check_cubin(cubin, str(job.target), [metadata.name])
    cluster = getattr(metadata, "cluster_dims", None) or (metadata.num_ctas, 1, 1)
    scratch = [
        getattr(metadata, f"{kind}_scratch_size")
        for kind in ("global", "profile")
        if hasattr(metadata, f"{kind}_scratch_size")
    ]
    return cubin, Kernel(
        lowered=metadata.name,
        blob=digest(cubin),
        shared_bytes=metadata.shared,
        num_warps=metadata.num_warps,
        cluster=tuple(cluster),
        cooperative=metadata.launch_cooperative_grid,
        signature=tuple(module.special.signature.values()),
        scratch_bytes=tuple(scratch),
    )
