"""NVRTC: which build of it there is, and one compile of CUDA C++."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from max_build.compilers.cuda_libraries import NVRTC
from max_build.errors import CompileError

__all__ = ["Compiled", "compile_cubin", "unopened_headers"]

_UNOPENED: Final = re.compile(r'(?:cannot|could not) open source file "([^"]+)"')


class Compiled(NamedTuple):
    """The cubin, name expression → lowered name, what NVRTC had to say, and the PTX.

    The cubin is empty where the architecture was a virtual one (`compute_80`).
    """

    cubin: bytes
    lowered: dict[str, str]
    log: str
    ptx: bytes


def compile_cubin(
    source: bytes,
    name: str,
    arch: str,
    args: Sequence[str] = (),
    name_expressions: Sequence[str] = (),
) -> Compiled:
    """Compile one source, without NVRTC's own cache.

    Parameters
    ----------
    source
        CUDA C++. Its quoted includes are looked for in the directory that `name` says it is in.
    name
        Path of the source in messages and line information; see `tree.Tree.name`.
    arch
        `sm_NN[af]`, or `compute_NN[af]` for PTX alone.
    args
        Further options, such as `cuda_options.arguments` and `tree.Tree.include_args`.
    name_expressions
        Kernels by their name in the source, such as `axpby<float>`.

    Raises
    ------
    CompileError
        NVRTC refuses the source, an option or the architecture; its log is in the message.
    ToolchainError
        There is no NVRTC, or another than that of `build_id` was loaded into this process.
    """
    if b"\0" in source:
        message = f"`{name}` holds a zero byte, where NVRTC would stop reading"
        raise CompileError(message)
    NVRTC.load()
    from cuda.bindings import nvrtc

    # Earlier ones have no cache and do not know the option.
    cacheless = ["-no-cache"] if _check(nvrtc.nvrtcVersion()) >= (12, 9) else []
    options = [option.encode() for option in (f"-arch={arch}", *cacheless, *args)]
    program = _check(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
    try:
        for expression in name_expressions:
            _check(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        said = log.rstrip(b"\0").decode("utf-8", "replace").strip()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            message = f"NVRTC cannot compile `{name}` for `{arch}`:\n{said or status.name}"
            raise CompileError(message, hint=_hint(said, nvrtc))
        lowered = {
            expression: _check(nvrtc.nvrtcGetLoweredName(program, expression.encode())).decode()
            for expression in name_expressions
        }
        virtual = arch.startswith("compute_")
        return Compiled(
            cubin=b"" if virtual else _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program),
            lowered=lowered,
            log=said,
            ptx=_text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0"),
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def unopened_headers(text: str) -> tuple[str, ...]:
    """Headers that a log says could not be opened, in order.

    When a compile in the private tree ends with one, the closure may have missed it: compile in
    place then, and store nothing if that works.
    """
    return tuple(dict.fromkeys(_UNOPENED.findall(text)))


def _check(answer: tuple[Any, ...]) -> Any:
    """The values of a binding's answer; its first element is the status."""
    from cuda.bindings import nvrtc

    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        message = f"NVRTC failed: {status.name}"
        raise CompileError(message)
    return values[0] if len(values) == 1 else tuple(values)


def _text(size: Any, fill: Any, program: Any) -> bytes:
    # NVRTC writes into an immutable object here. One of a single byte is shared by the whole
    # interpreter (every `b" "` is the same), so the buffer is longer than the text.
    length = _check(size(program))
    buffer = bytes(length + 2)
    _check(fill(program, buffer))
    return buffer[:length]


def _hint(log: str, nvrtc: Any) -> str:
    if "--gpu-architecture" in log:
        numbers = ", ".join(f"sm_{number}" for number in _check(nvrtc.nvrtcGetSupportedArchs()))
        return f"this NVRTC compiles for {numbers}, and for the `a` and `f` of the newer ones"
    missing = unopened_headers(log)
    if missing and not missing[0].startswith("."):
        return f"add the directory of `{missing[0]}` to `include-dirs`"
    return ""
