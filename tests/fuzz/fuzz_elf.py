"""Cubins, AMD code objects and MEFs, as compilers and caches hand them over."""

from __future__ import annotations

from elf_files import code_object, cubin, host_code, mef
from harness import Target

from max_build.compilers.cubin import read_cubin
from max_build.compilers.elf_headers import AARCH64, AMDGPU, CUDA, X86_64
from max_build.compilers.mef import check_mef, mef_architectures, read_mef
from max_build.errors import CompileError

__all__ = ["TARGETS"]


def _cubin(data: bytes) -> bool:
    try:
        found = read_cubin(data)
    except CompileError as error:
        assert str(error).startswith("the cubin ")
        return False
    assert 64 <= found.size <= len(data)
    # Nothing beyond its own end is read.
    assert read_cubin(data[: found.size]) == found
    assert read_cubin(data + b"\x7fELF" * 16) == found
    assert list(found.entry_points) == sorted(found.entry_points)
    for kernel in found.kernels:
        assert 0 <= kernel.code_bytes <= len(data) or kernel.code_bytes == 0
    # The same among other bytes.
    (image,) = read_mef(b"\xee\xf0" + data[: found.size])[:1]
    assert (image.offset, image.size, image.arch) == (2, found.size, found.arch)
    assert image.kernels == found.kernels
    return True


def _mef(data: bytes) -> bool:
    try:
        images = read_mef(data)
    except CompileError:
        return False
    end = 0
    for image in images:
        assert data[image.offset :].startswith(b"\x7fELF\x02\x01\x01")
        assert image.offset + image.size <= len(data)
        if image.machine in (CUDA, AMDGPU):
            assert end <= image.offset
            end = image.offset + image.size
        if image.machine == CUDA:
            alone = read_cubin(data[image.offset : image.offset + image.size])
            assert (alone.arch, alone.kernels) == (image.arch, image.kernels)
    for target in ("cpu", "sm_90", "sm_90a", "gfx942"):
        try:
            assert check_mef(data, target) == images
        except CompileError:
            continue
        allowed = mef_architectures(target)
        assert {i.arch for i in images if i.machine in (CUDA, AMDGPU)} <= allowed
        assert any(i.machine in (X86_64, AARCH64) for i in images)
    return True


_TOKENS = (
    b"\x7fELF\x02\x01\x01", b".text.k\0", b".nv.constant0.k\0", b".nv.info\0", b".nv.compat\0",
    b"-arch sm_90a", b"\xbe\x00", b"\xe0\x00", b"\x3e\x00", b"\xff" * 8, b"\xff\xff\xff\x7f",
)  # fmt: skip

TARGETS = (
    Target(
        "cubin",
        _cubin,
        lambda: {
            "good-accelerated": cubin(),
            "good-family": cubin(100, accelerated=False),
            "good-trailing": cubin() + b"junk",
            "bad-cut": cubin()[:-1],
            "bad-machine": code_object(),
        },
        tokens=_TOKENS,
        bounded=True,
    ),
    Target(
        "mef",
        _mef,
        lambda: {
            "good-host": mef(),
            "good-cuda": mef(cubin(), cubin(80, accelerated=False)),
            "good-amd": mef(code_object()),
            "good-nothing": b"no ELF in here",
            "bad-cut": mef(cubin())[:-200],
            "bad-nested": mef(host_code()),
        },
        tokens=_TOKENS,
        bounded=True,
        weight=2,
    ),
)
