"""PTX to cubins, and a clear word where that cannot be."""

from __future__ import annotations

import pytest

from max_build.compilers import linker
from max_build.compilers.cubin import check_cubin
from max_build.compilers.cuda_libraries import NVJITLINK
from max_build.compilers.ptx_text import Ptx, read_ptx
from max_build.errors import CompileError, ToolchainError

PTX = b"""// .version 1.0 in a comment
/* .target sm_10 */
.version 8.7
.target sm_90, texmode_independent
.address_size 64
.visible .entry seven(.param .u64 out) {
    .reg .b64 %rd<3>; .reg .b32 %r<2>;
    ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 7; st.global.u32 [%rd2], %r1; ret;
}
.weak .entry $odd_name$() { ret; }
// .entry commented() { ret; }
"""


@pytest.fixture(scope="module")
def nvjitlink() -> None:
    try:
        NVJITLINK.load()
    except ToolchainError as error:
        pytest.skip(f"needs nvJitLink: {error.message}")


def test_a_module_says_what_it_is() -> None:
    assert read_ptx(PTX, "k.ptx") == Ptx((8, 7), "sm_90")


def test_what_is_said_in_a_comment_is_not_said() -> None:
    ptx = b"/*\n.version 9.9\n.target sm_10\n*/\n.version 7.0\n// x\n.target sm_70\n"
    assert read_ptx(ptx, "k.ptx") == Ptx((7, 0), "sm_70")


@pytest.mark.parametrize(
    ("ptx", "missing"),
    [(b"", ".version"), (b".version 8.7\n", ".target"), (b"\x7fELF", ".version")],
)
def test_what_is_not_ptx_is_refused(ptx: bytes, missing: str) -> None:
    with pytest.raises(CompileError, match=f"`k.ptx` is not PTX: it has no `{missing}` directive"):
        read_ptx(ptx, "k.ptx")


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100f", "sm_121a"])
def test_one_module_becomes_a_cubin_for_each_later_architecture(nvjitlink: None, arch: str) -> None:
    linked = linker.link_cubin(PTX, "k.ptx", arch)
    check_cubin(linked.cubin, arch, ["seven", "$odd_name$"])
    assert linker.link_cubin(PTX, "k.ptx", arch) == linked


@pytest.mark.parametrize(
    ("old", "new", "arch", "args", "message"),
    [
        (b".version 8.7", b".version 99.1", "sm_90", [],
         r"`k.ptx` is PTX ISA 99.1, and this nvJitLink takes no newer one than \d+\.\d"),
        (b"", b"", "sm_80", [], "`k.ptx` is PTX for `sm_90`, which cannot become code for `sm_80`"),
        (b"sm_90,", b"sm_90a,", "sm_100", [], "cannot be compiled to future architecture"),
        (b"ret;", b"rat;", "sm_90", [], "(?s)line 9.*'rat'"),
        (b"", b"", "sm_90", ["-nope"], "refuses the options -arch=sm_90 -no-cache -nope for"),
        (b"", b"", "sm_999", [], "refuses the options -arch=sm_999"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(
    nvjitlink: None, old: bytes, new: bytes, arch: str, args: list[str], message: str
) -> None:
    with pytest.raises(CompileError, match=message):
        linker.link_cubin(PTX.replace(old, new, 1) if old else PTX, "k.ptx", arch, args)


def test_the_build_is_told_in_full() -> None:
    try:
        name, version, change, digest = NVJITLINK.build_id().split()
    except ToolchainError as error:
        pytest.skip(error.message)
    assert (name, version.count("."), change[:3], digest[:7]) == ("nvJitLink", 2, "CL-", "sha256:")
