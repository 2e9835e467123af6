"""One compile by NVRTC, and which NVRTC that is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from max_build.compilers import nvrtc
from max_build.compilers.cuda_libraries import NVRTC, Library
from max_build.errors import CompileError, ToolchainError

TEMPLATES = b"""
namespace blas {
template <class T> __global__ void axpby(T a, const T *x, T *y) { y[0] = a * x[0] + y[0]; }
}
extern "C" __global__ void plain() {}
__global__ void overloaded(int) {}
"""


@pytest.fixture(scope="module", autouse=True)
def _nvrtc() -> None:
    try:
        NVRTC.load()
    except ToolchainError as error:
        pytest.skip(f"needs NVRTC: {error.message}")


def test_names_are_lowered_and_kept() -> None:
    names = ["blas::axpby<float>", "blas::axpby<double>", "plain", "overloaded"]
    compiled = nvrtc.compile_cubin(TEMPLATES, "k.cu", "sm_90a", [], names)
    assert compiled.lowered == {
        "blas::axpby<float>": "_ZN4blas5axpbyIfEEvT_PKS1_PS1_",
        "blas::axpby<double>": "_ZN4blas5axpbyIdEEvT_PKS1_PS1_",
        "plain": "plain",
        "overloaded": "_Z10overloadedi",
    }
    assert compiled.cubin.startswith(b"\x7fELF")
    assert b".target sm_90a" in compiled.ptx
    assert compiled.log == ""


def test_the_same_compile_gives_the_same_bytes() -> None:
    first, second = (nvrtc.compile_cubin(TEMPLATES, "k.cu", "sm_80") for _ in range(2))
    assert first == second


def test_a_virtual_architecture_gives_ptx_alone() -> None:
    compiled = nvrtc.compile_cubin(TEMPLATES, "k.cu", "compute_80")
    assert compiled.cubin == b""
    assert b".target sm_80" in compiled.ptx


def test_an_empty_log_leaves_the_interpreter_whole() -> None:
    assert nvrtc.compile_cubin(TEMPLATES, "k.cu", "sm_80").log == ""
    assert [b" "[0], b"\0"[0], bytes([32])[0]] == [32, 0, 32]


def test_a_warning_is_kept() -> None:
    source = b"__global__ void k() { int unused; }"
    assert "was declared but never referenced" in nvrtc.compile_cubin(source, "k.cu", "sm_80").log


@pytest.mark.parametrize(
    ("source", "arch", "args", "names", "message"),
    [
        (b"__global__ void k() { int x = ; }", "sm_80", [], [], r"k\.cu\(1\): error: expected an"),
        (b"#include <a.h>", "sm_80", [], [], "add the directory of `a.h` to `include-dirs`"),
        (b"", "sm_12", [], [], r"invalid value for --gpu-architecture[^$]*hint: .*sm_90, "),
        (b"", "sm_80", ["--nope"], [], "unrecognized option --nope"),
        (b"", "sm_80", [], ["axpby<int>"], 'identifier "axpby" is undefined'),
        (b"__global__ void k() {}\0oops", "sm_80", [], [], "holds a zero byte"),
        (b"#error \xff\xfe", "sm_80", [], [], "#error directive"),
    ],
)
def test_a_refusal_says_what_nvrtc_said(
    source: bytes, arch: str, args: list[str], names: list[str], message: str
) -> None:
    with pytest.raises(CompileError, match=message):
        nvrtc.compile_cubin(source, "k.cu", arch, args, names)


def test_the_build_is_told_in_full_and_remembered() -> None:
    memo: dict = {}
    releases: dict = {}
    found = NVRTC.build_id(memo, releases)
    banner = nvrtc.compile_cubin(b"", "k.cu", "compute_80").ptx.decode()
    _, version, change, digest = found.split()
    assert f"V{version}" in banner
    assert change in banner
    assert len(digest) == len("sha256:") + 64
    assert memo.keys() == {str(path) for path in NVRTC._parts(NVRTC.find())}
    assert list(releases.values()) == [f"{version} {change}"]
    assert NVRTC.build_id(memo, releases) == found == NVRTC.build_id()


def test_the_build_is_known_without_loading_it() -> None:
    program = (
        "import sys; from max_build.compilers.cuda_libraries import NVRTC; print(NVRTC.build_id());"
        "print([name for name in sys.modules if name.split('.')[0] in ('cuda', 'ctypes')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    build, modules = done.stdout.splitlines()
    assert build == NVRTC.build_id()
    assert "cuda" not in modules


def test_another_build_of_the_same_version_is_another_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = NVRTC.find()
    copies = []
    for name in ("one", "two"):
        directory = tmp_path / name / "nvidia/cu13/lib"
        directory.mkdir(parents=True)
        try:
            os.link(mine, directory / "libnvrtc.so.13")
        except OSError:  # another filesystem
            shutil.copy(mine, directory / "libnvrtc.so.13")
        for companion in mine.parent.glob("libnvrtc-builtins.so.*"):
            shutil.copy(companion, directory)
        copies.append(directory)
    with next(copies[1].glob("libnvrtc-builtins.so.*")).open("ab") as file:
        file.write(b"patched")
    memo: dict = {}
    builds = []
    for directory in copies:
        monkeypatch.syspath_prepend(str(directory.parents[2]))
        builds.append(NVRTC.build_id(memo))
    assert builds[0].split()[:3] == builds[1].split()[:3]
    assert builds[0] != builds[1]
    with pytest.raises(ToolchainError, match="was loaded into this process before"):
        NVRTC.load()


def test_a_library_that_is_not_there_or_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "nvidia/cu13/lib"
    directory.mkdir(parents=True)
    (directory / "libnvrtc.so.13").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ToolchainError, match="nvrtc is not whole: there is no"):
        NVRTC.build_id()
    nothing = Library("nosuchlib", (("nvidia/nowhere", "libnone.so"),))
    with pytest.raises(ToolchainError, match="nosuchlib"):
        nothing.find()


def test_headers_that_could_not_be_opened_are_named() -> None:
    log = (
        'a.cu(1): catastrophic error: could not open source file "x/y.h" (no directories in'
        ' search list)\nb.h(2): catastrophic error: cannot open source file "z.h"\n'
    )
    assert nvrtc.unopened_headers(log) == ("x/y.h", "z.h")
    assert nvrtc.unopened_headers("error: expected a declaration") == ()


def test_no_variable_adds_a_directory_of_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seen.h").write_text("")
    for name in ("CPATH", "CPLUS_INCLUDE_PATH", "CUDA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("NVCC_APPEND_FLAGS", "NVRTC_APPEND_FLAGS"):
        monkeypatch.setenv(name, f"-I{tmp_path}")
    with pytest.raises(CompileError, match="could not open source file"):
        nvrtc.compile_cubin(b"#include <seen.h>", f"{os.sep}nowhere/k.cu", "sm_80")
