"""Which environment variables reach Triton's code generation, each in its canonical value."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from max_build.compilers import ptxas_options
from max_build.key import digest

__all__ = ["ambient", "neutral", "relevant"]

_READ = re.compile(
    r"(TRITON|MLIR|LLVM|NVPTX|PTXAS|AMDGCN)_\w+"
    r"|DISABLE_(FAST_REDUCTION|LLVM_OPT|MMA_V\d|PTXAS_OPT)|USE_IR_LOC|ALLOW_LHS_TMEM_LAYOUT_CONVERSION"
)
# Where Triton keeps things and what it prints or records; what could answer in place of the
# compiler, or point it elsewhere than the target says. None of it is there while a unit compiles.
_NEUTRAL = re.compile(
    r"TRITON_(ALWAYS_COMPILE|BACKENDS_IN_TREE|BUILD_\w+|CACHE_AUTOTUNING|CACHE_DIR|CACHE_MANAGER"
    r"|CUDACRT_PATH|CUDART_PATH|CUOBJDUMP_PATH|CUPTI_\w+|DISABLE_LINE_INFO|DUMP_\w+|ENABLE_LLVM_DEBUG"
    r"|ENABLE_PYTHON_STACKTRACE|FRONT_END_DEBUGGING|HOME|INTERPRET|KERNEL_DUMP|LIBCUDA_PATH"
    r"|LLVM_DEBUG_ONLY|NVDISASM_PATH|OVERRIDE_ARCH|OVERRIDE_DIR|PARTITION_SCHEDULING_\w*DUMP\w*"
    r"|PRINT_AUTOTUNING|PROTON_DISABLE|REDIS_\w+|REMOTE_CACHE_BACKEND|REPRODUCER_PATH"
    r"|STORE_BINARY_ONLY)"
    r"|MLIR_(DUMP_PATH|ENABLE_DIAGNOSTICS|ENABLE_DUMP|ENABLE_TIMING|ENABLE_REMARK)"
    r"|LLVM_(ENABLE_TIMING|IR_ENABLE_DUMP|\w*SYMBOLIZ\w+)|NVPTX_ENABLE_DUMP|AMDGCN_\w+|USE_IR_LOC"
)
# What only sets the default of an option, which is in the key with the value it came to.
_OPTIONS = ("TRITON_DEFAULT_FP_FUSION",)
_FILES = ("TRITON_LIBDEVICE_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH")
_FOREIGN = ("TRITON_KERNEL_OVERRIDE", "TRITON_PLUGIN_PATHS", "TRITON_PASS_PLUGIN_PATH")
# As Triton's own reader of switches: anything that is not one of these is false.
_TRUE = ("1", "on", "true", "y", "yes")
_FALSE = ("", "0", "false", "n", "no", "off")


def neutral(name: str) -> bool:
    """Whether a variable cannot change the code, or must not be allowed to."""
    return _NEUTRAL.fullmatch(name) is not None


def ambient(environ: Mapping[str, str]) -> dict[str, str]:
    """Every variable that could count, as it is: without Triton nobody knows the defaults.

    So a variable that is set to its default asks for a derivation, which finds the same key.
    """
    found = {
        name: value
        for name, value in environ.items()
        if _READ.fullmatch(name) and not neutral(name)
    }
    for name in found.keys() & set(_FILES):
        with contextlib.suppress(OSError):
            found[name] = digest(Path(found[name]).read_bytes())
    return found


def relevant(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The variables that count, where they are not at their default; and why they cannot be keyed.

    A tool or library named by its path counts by its bytes. The second value is empty where the
    first one says everything.
    """
    found: dict[str, str] = {}
    uncacheable = ""
    switches = _switches()
    for name, value in sorted(environ.items()):
        if not _READ.fullmatch(name) or neutral(name) or name in _OPTIONS:
            continue
        lower = value.strip().lower()
        if name == "PTXAS_OPTIONS":
            uncacheable = uncacheable or ptxas_options.doubt(value)
        if name in _FOREIGN and lower not in _FALSE:
            uncacheable = f"`{name}` is set, and what it brings in cannot be keyed"
        elif name in _FILES:
            with contextlib.suppress(OSError):
                found[name] = digest(Path(value).read_bytes())
        elif name in switches:
            if (lower in _TRUE) != switches[name]:
                found[name] = str(lower in _TRUE).lower()
        elif lower not in _FALSE:
            found[name] = value
    return found, uncacheable


def _switches() -> dict[str, bool]:
    """Triton's own on-off settings and their defaults, by variable."""
    from triton import knobs

    found: dict[str, bool] = {}
    for group in vars(knobs).values():
        if isinstance(group, knobs.base_knobs):
            found |= {
                one.key: one.default
                for one in group.knob_descriptors.values()
                if isinstance(getattr(one, "default", None), bool)
            }
    return found
