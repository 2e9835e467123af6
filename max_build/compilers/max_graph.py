"""The `max` compiler: a function that returns a MAX graph → a MEF for one target.

Everything here but the declaration's check runs in a worker: MAX's virtual device, its CPU
target and its MLIR context are global to a process.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from max_build import distributions
from max_build.compilers import Derivation, Job, Product, mojo_libraries
from max_build.compilers.entry import imported, told
from max_build.errors import CompileError, ToolchainError
from max_build.key import Components, digest
from max_build.record import Tensor
from max_build.target import KNOWN_TARGETS, Target

if TYPE_CHECKING:
    from max_build.config import Unit

__all__ = ["HOSTS", "MaxCompiler"]

HOSTS = (
    "generic",
    "x86-64",
    "x86-64-v2",
    "x86-64-v3",
    "x86-64-v4",
    "neoverse-n1",
    "neoverse-n2",
    "neoverse-v1",
    "neoverse-v2",
)
"""Baselines of host code: MAX takes any text without complaint, so the list is ours."""

DISTRIBUTIONS = (
    "max",
    "max-core",
    "max-mojo-libs",
    "max-shmem-libs",
    "mojo-compiler",
    "mojo-compiler-mojo-libs",
)
"""What makes up the compiler: together their files decide the machine code."""

PACKAGES = ("max", "modular", "mojo")
"""What they are imported as."""

# What MAX reads beside MODULAR_…: see `max.engine.api`.
_VARIABLES = ("ENABLE_PER_TENSOR_FP8_QUANTIZE", "USE_FI_TOPK_KERNEL")
# Of MODULAR_…, what tells it where to keep its caches, logs and profiles, or who runs it: it
# cannot change the code that comes out.
_NEUTRAL = re.compile(
    r"MODULAR_(HOME|DERIVED_PATH|USER_ID|CRASH_REPORTING.*|TELEMETRY.*|.*CACHE_(DIR|PATH|LOGGING)"
    r"|ENABLE_CACHE_LOGGING|PROFILE_FILENAME|STRUCTURED_LOGGING|OTLP_.*)"
)
# Where MAX finds its own parts: `import max` sets these, in this process or in one that started it.
_PLACES = frozenset(
    {"MODULAR_MAX_PACKAGE_ROOT", "MODULAR_MOJO_MAX_PACKAGE_ROOT", "MODULAR_MOJO_MAX_IMPORT_PATH"}
)
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Of the debug settings, how a model's values are shown, long after the compile.
_SHOWN = ("print_style",)
_OLDEST = (26, 7)


class MaxCompiler:
    """Compiles `entry = "package.module:function"`, called as `function(target) -> Graph`."""

    name = "max"
    kinds: tuple[Literal["graph", "kernel"], ...] = ("graph",)
    accepts: tuple[Target, ...] = KNOWN_TARGETS
    runs_user_code = True
    one_job_per_process = True
    distributions = DISTRIBUTIONS

    def problems(self, unit: Unit) -> Iterator[tuple[str, str]]:
        """Check `host`, `options` and `rename`."""
        if unit.host not in HOSTS:
            yield "host", f"must be one of {', '.join(HOSTS)}, got {unit.host!r}"
        options = unit.declared["options"]
        for name in sorted(options.keys() - {"defines", "tile-based-fusion"}):
            yield f"options.{name}", "is unknown: there are `defines` and `tile-based-fusion`"
        if not isinstance(options.get("tile-based-fusion", False), bool):
            yield "options.tile-based-fusion", "must be a boolean"
        defines = options.get("defines", {})
        if not isinstance(defines, dict) or not all(
            isinstance(value, str | int) for value in defines.values()
        ):
            yield "options.defines", "must be a table of strings, integers and booleans"
        for pattern in unit.declared["rename"]:
            if pattern.startswith("^"):
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield f"rename.{pattern!r}", f"is no regular expression: {error}"

    def ambient(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables and the file that reach MAX's code generation, before it is imported."""
        return _environment(environ)

    def derive(self, job: Job) -> Derivation:
        """Build the graph and hash its canonical text, with what the session adds to it."""
        environment, configuration = self.ambient(os.environ), _configuration(os.environ)
        _start(job)
        from max.engine import InferenceSession

        with mojo_libraries.observed(job.scratch) as libraries, imported(job) as entry:
            graph = _call(job, entry)
            _aim(job)  # again: the project's code may have aimed elsewhere
            text = canonical_ir(graph, libraries)
        # What the project's code sets reaches the compile, which runs in this process.
        later = self.ambient(os.environ)
        environment |= {
            f"{name} (set by the project)": later.get(name, "")
            for name in environment.keys() | later.keys()
            if later.get(name) != environment.get(name)
        }
        reads = libraries.sources()
        if _configuration(os.environ) != configuration:
            reads += (_configuration(os.environ),)
        options = job.unit.declared["options"]
        components = Components(
            compiler=distributions.identities(DISTRIBUTIONS),
            target=str(job.target),
            host=job.unit.host,
            options=canonical_options(
                InferenceSession.debug,
                options.get("defines", {}),
                tile_based_fusion=bool(options.get("tile-based-fusion")),
            ),
            sources={"ir": digest(text)},
            dependencies=libraries.digests(),
            environment=environment,
        )
        return Derivation(
            components=components,
            ir=text,
            uncacheable=libraries.unknown(graph) or foreign_parts(os.environ),
            state=(graph, libraries),
            reads=reads,
        )

    def compile(self, job: Job, derivation: Derivation) -> Product:
        """Compile the graph that `derive` built and export it as a MEF."""
        from max import driver, engine

        # MAX's own cache of models knows a graph by less than our key, and could answer with
        # another state of a library. Its caches of kernels go by what they compile, and stay.
        os.environ["MODULAR_MAX_CACHE_DIR"] = str(job.scratch / "max-cache")
        graph, libraries = derivation.state
        options = job.unit.declared["options"]
        devices = [driver.CPU()] if job.target.is_cpu else [driver.CPU(), driver.Accelerator()]
        try:
            session = engine.InferenceSession(devices=devices)
            for name, value in sorted(options.get("defines", {}).items()):
                session._set_mojo_define(name, value)  # MAX's own knobs all end here
            compiled = session.compile(
                graph, tile_based_fusion=bool(options.get("tile-based-fusion"))
            )
            path = job.scratch / "graph.mef"
            compiled.export_mef(path)
        except Exception as error:
            message = f"MAX refused the graph: {_last_cause(error)}"
            raise CompileError(message) from error
        if changed := libraries.changed():
            message = f"kernel library `{changed}` changed while the graph was compiled"
            raise CompileError(message, hint="build again")
        arch = _validate(path, str(job.target))
        return Product(
            files={"mef": path},
            arch=arch,
            uncacheable=foreign_parts(os.environ),
            **signature(graph)._asdict(),
        )


def canonical_ir(graph: Any, libraries: mojo_libraries.Libraries) -> bytes:
    """The text of a `max.graph.Graph` that is hashed: no source locations, no path.

    `asm()` prints floats and constants so that they round-trip; the only paths in it are those
    of kernel libraries, which are replaced by the digests of their contents.
    """
    return libraries.without_paths(graph.module.mlir_module.asm()).encode()


class Signature(NamedTuple):
    """What goes into a graph and comes out of it; weights are sorted by name."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]


def signature(graph: Any) -> Signature:
    """Inputs, outputs and weights of a `max.graph.Graph`, as the record keeps them."""
    from max import _core
    from max.graph import TensorType

    operation = graph._mlir_op
    names = {
        kind: [attribute.value for attribute in operation.attributes[f"{kind}_names"]]
        for kind in ("argument", "result")
    }
    subgraphs = {
        one.attributes["sym_name"].value: one
        for one in _operations(operation.parent or operation)
        if one.name == "mo.graph"
    }
    weights = {
        name: _tensor(name, TensorType.from_mlir(_core.Type._from_cmlir(type_)))
        for name, type_ in _weights(operation, "", subgraphs)
    }
    return Signature(
        inputs=tuple(
            _tensor(name, value.type)
            for name, value in zip(names["argument"], graph.inputs, strict=True)
        ),
        outputs=tuple(
            _tensor(name, type_)
            for name, type_ in zip(names["result"], graph.output_types, strict=True)
        ),
        weights=tuple(weights[name] for name in sorted(weights)),
    )


def _weights(graph: Any, prefix: str, subgraphs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and MLIR type of each weight that a graph reads, through the subgraphs it calls.

    A placeholder of a subgraph is the caller's prefix and its own name: see `max.graph.ops.call`.
    """
    for one in _operations(graph):
        if one.name == "mo.constant.external":
            placeholder = "isPlaceholder" in one.attributes
            name = one.attributes["name"].value
            yield (prefix + name if placeholder else name), one.results[0].type
        elif one.name == "mo.call":
            inner = one.attributes["prefix"].value if "prefix" in one.attributes else ""
            callee = subgraphs[one.attributes["callee"].value]
            yield from _weights(callee, prefix + inner, subgraphs)


def _operations(operation: Any) -> Iterator[Any]:
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for one in block.operations:
                yield from _operations(one.operation)


def _tensor(name: str, type_: Any) -> Tensor:
    if not hasattr(type_, "shape"):  # a chain or an opaque value has neither shape nor type
        return Tensor(name=name, dtype="opaque", shape=())
    shape = tuple(
        int(dim) if type(dim).__name__ == "StaticDim" else str(dim) for dim in type_.shape
    )
    kind = type_.device.device_type.value
    device = "cpu" if kind == "cpu" else f"{kind}:{type_.device.id}"
    return Tensor(name=name, dtype=type_.dtype.name, shape=shape, device=device)


def _start(job: Job) -> None:
    """Import MAX and set the virtual devices, before anything asks what devices there are."""
    if job.target.is_cpu:
        # A graph for the CPU must not depend on which GPUs the building machine happens to have.
        os.environ.update(dict.fromkeys(_VISIBLE_DEVICES, ""))
    try:
        from max import engine
    except ImportError as error:
        message = f"MAX is needed to build this graph, and cannot be imported: {error}"
        hint = "install the extra `max-build[max]`; in [build-system], `requires` has to name it"
        raise ToolchainError(message, hint=hint) from error
    found = tuple(int(part) for part in re.findall(r"\d+", engine.__version__)[:2])
    if found < _OLDEST:
        message = f"MAX {engine.__version__} is too old: 26.7 or later is needed"
        raise ToolchainError(message, hint="install `max>=26.7`")
    _aim(job)


def _aim(job: Job) -> None:
    """Set the virtual devices of the target, and the CPU of the baseline."""
    from max import driver

    if not job.target.is_cpu:
        driver.set_virtual_device_api(job.target.api)
        driver.set_virtual_device_target_arch(str(job.target))
        driver.set_virtual_device_count(1)
    driver.set_virtual_cpu_target(job.unit.host)


def _call(job: Job, function: Any) -> Any:
    """Call the entry and look at what it returned."""
    from max.graph import Graph

    entry: str = job.unit.declared["entry"]
    try:
        graph = function(job.target)
    except Exception as error:
        message = f"`{entry}` raised {told(job, error)}"
        raise CompileError(message) from error
    except SystemExit as error:
        message = f"`{entry}` ended the process with status {error.code}"
        raise CompileError(message) from error
    if not isinstance(graph, Graph):
        message = (
            f"`{entry}` must return a `max.graph.Graph`, it returned "
            f"`{type(graph).__module__}.{type(graph).__qualname__}`"
        )
        raise CompileError(message)
    try:
        ended = bool(graph.output_types)
    except TypeError:  # what MAX raises for a graph that was never ended
        ended = False
    if not ended:
        message = f"`{entry}` returned a graph without an output"
        raise CompileError(message, hint="end it with `graph.output(…)`")
    return graph


def canonical_options(
    debug: Any, defines: Mapping[str, Any], *, tile_based_fusion: bool
) -> dict[str, str]:
    """The options of a session and its compile as a key has them: those that decide the code.

    Parameters
    ----------
    debug
        MAX's `DebugConfig`.
    defines
        Name → string, integer or boolean, which differ in the key.
    """
    options = {f"debug.{name}": value for name, value in debug_settings(debug).items()}
    options |= {
        f"define.{name}": f"{type(value).__name__} {value}" for name, value in defines.items()
    }
    if tile_based_fusion:
        options["tile-based-fusion"] = "true"
    return options


def debug_settings(debug: Any) -> dict[str, str]:
    """The settings of MAX's `DebugConfig` that are on and can reach a compile, as text."""
    names = [name for name in dir(debug) if not name.startswith("_") and name not in _SHOWN]
    found = {name: value for name in names if not callable(value := getattr(debug, name))}
    return {name: str(value) for name, value in found.items() if value}


def _last_cause(error: BaseException) -> str:
    """What the compiler itself said: MAX wraps it in a request to file an issue."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    found = {
        name: value
        for name, value in environ.items()
        if name in _VARIABLES or (name.startswith("MODULAR_") and not _NEUTRAL.fullmatch(name))
    }
    for name in _PLACES & found.keys():
        if _is_own(found[name]):
            del found[name]
    with contextlib.suppress(OSError):
        found["modular.cfg"] = digest(_configuration(environ).read_bytes())
    return found


def _configuration(environ: Mapping[str, str]) -> Path:
    """MAX's own settings, which it looks for in its home."""
    home = environ.get("MODULAR_HOME") or os.path.join(environ.get("HOME", ""), ".modular")
    return Path(home, "modular.cfg")


def foreign_parts(environ: Mapping[str, str]) -> str:
    """Why MAX's distributions do not tell all of what compiles; empty when they do."""
    for name in sorted(_PLACES & environ.keys()):
        if not _is_own(environ[name]):
            return f"`{name}` is set, and what it brings in cannot be keyed"
    return distributions.foreign(DISTRIBUTIONS, PACKAGES)


def _is_own(places: str) -> bool:
    """Whether a list of places, whichever way it is separated, lies in the `modular` package."""
    own = distributions.places(DISTRIBUTIONS, "modular")
    return all(
        any(one == place or one.startswith(place + os.sep) for place in own)
        for one in map(os.path.normpath, re.split("[,;:]", places))
    )


def _validate(path: Path, target: str) -> str:
    """Refuse an artifact that MAX itself cannot read, or with machine code for something else.

    The architecture of its device code, where that is not `target`.
    """
    from max import engine

    from max_build.compilers.elf_headers import AMDGPU, CUDA
    from max_build.compilers.mef import check_mef

    try:
        engine.read(path)
    except Exception as error:
        message = f"MAX cannot read back the artifact it exported: {_last_cause(error)}"
        raise CompileError(message) from error
    images = check_mef(path.read_bytes(), target)
    found = {image.arch for image in images if image.machine in (CUDA, AMDGPU)} - {target}
    return min(found, default="")
