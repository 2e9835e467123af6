"""PTX to a cubin by nvJitLink."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from max_build.compilers.cuda_libraries import NVJITLINK
from max_build.compilers.ptx_text import Ptx, read_ptx
from max_build.errors import CompileError

__all__ = ["Linked", "link_cubin"]

_TOO_NEW: Final = re.compile(r"Unsupported \.version (\S+); current version is '([^']+)'")
_TOO_LOW: Final = "SM version specified by .target is higher than default SM version assumed"


class Linked(NamedTuple):
    """A cubin, and what nvJitLink had to say."""

    cubin: bytes
    log: str


def link_cubin(ptx: bytes, name: str, arch: str, args: Sequence[str] = ()) -> Linked:
    """Compile one PTX module, without nvJitLink's own cache.

    Parameters
    ----------
    ptx
        The module.
    name
        What to call it in messages.
    arch
        `sm_NN[af]`.
    args
        Further options of nvJitLink, such as `-maxrregcount=32`.

    Raises
    ------
    CompileError
        The module is not PTX, is of a newer ISA than nvJitLink knows, cannot be compiled for the
        architecture, or an option is refused.
    ToolchainError
        There is no nvJitLink.
    """
    module = read_ptx(ptx, name)
    NVJITLINK.load()
    from cuda.bindings import nvjitlink

    options = [f"-arch={arch}", "-no-cache", *args]
    try:
        handle = nvjitlink.create(len(options), options)
    except nvjitlink.nvJitLinkError as error:
        message = f"nvJitLink refuses the options {' '.join(options)} for `{name}`: {error}"
        raise CompileError(message) from error
    try:
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, ptx, len(ptx), name)
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            log = bytearray(nvjitlink.get_error_log_size(handle))
            nvjitlink.get_error_log(handle, log)
            raise _refusal(module, name, arch, _decoded(log) or str(error)) from error
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    finally:
        nvjitlink.destroy(handle)
    return Linked(bytes(cubin), _decoded(log))


def _refusal(module: Ptx, name: str, arch: str, log: str) -> CompileError:
    newer = _TOO_NEW.search(log)
    if newer:
        message = (
            f"`{name}` is PTX ISA {newer[1]}, and this nvJitLink takes no newer one than {newer[2]}"
        )
        return CompileError(message, hint="install a newer `nvidia-nvjitlink`")
    if _TOO_LOW in log:
        message = f"`{name}` is PTX for `{module.target}`, which cannot become code for `{arch}`"
        return CompileError(message, hint=f"take `{arch}` out of the unit's targets")
    message = f"nvJitLink cannot compile `{name}` for `{arch}`:\n{log}"
    return CompileError(message)


def _decoded(log: bytes | bytearray) -> str:
    return bytes(log).rstrip(b"\0").decode("utf-8", "replace").strip()
