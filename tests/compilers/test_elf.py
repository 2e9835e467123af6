"""Reading cubins and MEFs: what real compilers made, and what became of it on a bad day."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import msgspec
import pytest

from max_build.compilers.cubin import check_cubin, read_cubin
from max_build.compilers.cuda_libraries import NVJITLINK, NVRTC
from max_build.compilers.elf_headers import AMDGPU, CUDA
from max_build.compilers.linker import link_cubin
from max_build.compilers.mef import check_mef, mef_architectures, read_mef
from max_build.compilers.nvrtc import compile_cubin
from max_build.errors import CompileError, ToolchainError

SOURCE = b"""
__constant__ float table[64];
extern "C" __global__ void saxpy(int n, float a, const float *x, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i] + table[i & 63];
}
template <class T> __global__ void sum(const T *x, T *out) {
    __shared__ T part[256];
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) { T all = 0; for (int i = 0; i < 256; i++) all += part[i]; *out = all; }
}
__device__ __noinline__ float down(float x, int n) {
    return n <= 0 ? x : down(x * 1.5f, n - 1) + down(x, n - 2);
}
extern "C" __global__ void recursive(float *out, int n) { *out = down(*out, n); }
"""
PTX = b"""
.version 8.7
.target sm_90
.address_size 64
.visible .entry seven(.param .u64 out) {
    .reg .b64 %rd<3>; .reg .b32 %r<2>;
    ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 7; st.global.u32 [%rd2], %r1; ret;
}
"""


@pytest.fixture(scope="module", autouse=True)
def _nvrtc() -> None:
    try:
        NVRTC.load()
    except ToolchainError as error:
        pytest.skip(f"these tests read what NVRTC compiles: {error.message}")


@pytest.fixture(scope="module")
def cubin() -> bytes:
    return compile_cubin(SOURCE, "k.cu", "sm_90a", [], ["sum<float>"]).cubin


@pytest.fixture(scope="module")
def host_code() -> bytes:
    """A host ELF: an extension module of this very interpreter."""
    return Path(msgspec._core.__file__).read_bytes()


def test_a_cubin_names_its_architecture_and_its_kernels(cubin: bytes) -> None:
    found = read_cubin(cubin)
    assert found.arch == "sm_90a"
    assert found.executable
    assert found.size == len(cubin)
    assert found.entry_points == ("_Z3sumIfEvPKT_PS0_", "recursive", "saxpy")
    assert found.constants[3] == 64 * 4
    total, recursive, saxpy = found.kernels
    assert total.shared_bytes >= 256 * 4
    assert recursive.stack_bytes is None or recursive.stack_bytes >= 0
    assert saxpy.stack_bytes == 0
    assert 0 < saxpy.registers < 64
    assert saxpy.code_bytes > 0
    assert saxpy.constants[0] > 24


@pytest.mark.parametrize(
    "arch",
    ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103f", "sm_120", "sm_121a"],
)
def test_the_suffix_of_the_architecture_is_read_from_the_code(arch: str) -> None:
    cubin = compile_cubin(b"__global__ void k() {}", "k.cu", arch).cubin
    assert check_cubin(cubin, arch, ["_Z1kv"]).arch == arch
    for other in {"sm_80", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f"} - {arch}:
        with pytest.raises(CompileError, match=f"holds code for `{arch}`, not for `{other}`"):
            check_cubin(cubin, other)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_90a"])
def test_the_older_layout_of_the_flags_is_read_too(arch: str, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    (tmp_path / "k.ptx").write_bytes(PTX.replace(b"sm_90", arch.encode()))
    import subprocess

    subprocess.run(
        [ptxas, "-arch", arch, "k.ptx", "-o", "k.cubin"], cwd=tmp_path, check=True, timeout=60
    )
    cubin = (tmp_path / "k.cubin").read_bytes()
    assert check_cubin(cubin, arch, ["seven"]).arch == arch


def test_a_linked_cubin_is_read_like_a_compiled_one() -> None:
    try:
        NVJITLINK.load()
    except ToolchainError as error:
        pytest.skip(error.message)
    for arch in ("sm_90a", "sm_100f"):
        check_cubin(link_cubin(PTX, "seven.ptx", arch).cubin, arch, ["seven"])


def test_what_is_wrong_with_a_cubin_is_said(cubin: bytes, host_code: bytes) -> None:
    def refused(data: bytes, message: str, *names: str) -> None:
        with pytest.raises(CompileError, match=message):
            check_cubin(data, "sm_90a", names)

    refused(b"", "the cubin is empty")
    refused(b"ptxas fatal: out of memory", "not an ELF file: starts with b'ptxas fa'")
    refused(cubin[:63], "is truncated")
    refused(cubin[:-1], "is truncated or damaged: its .* ends at byte")
    refused(b"\x7fELF\x01\x01\x01" + cubin[7:], "not a 64-bit little-endian ELF")
    refused(host_code, "code for another machine: e_machine (62|183), not 190")
    refused(
        cubin,
        r"lacks the entry point `axpby`, `dot`; it has `_Z3sumIfEvPKT_PS0_`, `recursive`, `saxpy`",
        *("saxpy", "dot", "axpby"),
    )
    device_only = compile_cubin(b"__device__ int x; ", "k.cu", "sm_90a").cubin
    refused(device_only, "holds no kernel")
    relocatable = compile_cubin(SOURCE, "k.cu", "sm_90a", ["-rdc=true"]).cubin
    refused(relocatable, "relocatable: it was compiled but not linked")


def test_a_cubin_cut_at_every_64th_byte_is_refused(cubin: bytes) -> None:
    for length in range(0, len(cubin), 64):
        with pytest.raises(CompileError):
            check_cubin(cubin[:length], "sm_90a", ["saxpy"])


def test_flipped_bits_end_in_an_answer_or_in_one_kind_of_error(cubin: bytes) -> None:
    chance = random.Random(20_26)
    refused = 0
    for _ in range(3_000):
        damaged = bytearray(cubin)
        for _ in range(chance.choice((1, 1, 4, 64))):
            # Half of the hits where they hurt: header and tables.
            end = chance.choice((256, len(damaged)))
            damaged[chance.randrange(end)] ^= 1 << chance.randrange(8)
        try:
            read_cubin(bytes(damaged))
        except CompileError:
            refused += 1
    assert refused > 500


def test_a_table_of_endless_names_is_refused_before_it_is_spelled() -> None:
    sections = 60_000
    name = b"a" * 60_000 + b"\0"
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01\x00\x08" + bytes(7),
        *(2, CUDA, 1, 0, 0, 64, 0x5A02, 64, 56, 0, 64, sections, 0),
    )
    strings = 64 + sections * 64
    row = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, strings, len(name), 0, 0, 1, 0)
    with pytest.raises(CompileError, match="more names than it has bytes for"):
        read_cubin(header + row * sections + name)


def container(*parts: bytes) -> bytes:
    """Bytes around the ELFs, as in a MEF."""
    return b"\xee\xf0\x03\x83" + bytes(60) + b"\xcb\xcb@toy\0".join(parts) + b"\x05(\r\x01"


def test_every_elf_in_a_mef_is_found(cubin: bytes, host_code: bytes) -> None:
    second = compile_cubin(b"__global__ void k() {}", "k.cu", "sm_90a").cubin
    mef = container(host_code, cubin, second)
    host, first, last = check_mef(mef, "sm_90a")
    assert host.arch in ("x86-64", "aarch64")
    assert host.kernels == ()
    assert mef[first.offset : first.offset + first.size] == cubin
    assert [kernel.name for kernel in first.kernels] == list(read_cubin(cubin).entry_points)
    assert (last.machine, last.arch) == (CUDA, "sm_90a")
    assert mef[last.offset : last.offset + last.size] == second


def test_device_code_inside_host_code_is_found(cubin: bytes, host_code: bytes) -> None:
    # A host ELF whose last section is a cubin, as MAX keeps device code in read-only data.
    rows = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 128, len(cubin), 0, 0, 1, 0)
    header = bytearray(host_code[:64])
    header[32:40] = bytes(8)
    header[40:48] = (64).to_bytes(8, "little")
    header[54:64] = struct.pack("<HHHHH", 56, 0, 64, 1, 0)
    host = bytes(header) + rows + cubin
    outer, inner = check_mef(container(host), "sm_90a")
    assert outer.size == len(host)
    assert (inner.offset - outer.offset, inner.size) == (128, len(cubin))


def test_a_mef_for_something_else_is_refused(cubin: bytes, host_code: bytes) -> None:
    plain = compile_cubin(b"__global__ void k() {}", "k.cu", "sm_90").cubin

    def refused(data: bytes, target: str, message: str) -> None:
        with pytest.raises(CompileError, match=message):
            check_mef(data, target)

    refused(b"", "cpu", "the MEF is empty")
    refused(b"nothing in here", "cpu", "holds no host code")
    refused(container(cubin), "sm_90a", "holds no host code")
    refused(
        container(host_code, cubin), "cpu", r"for `cpu` holds 1 of 1 device images for `sm_90a`"
    )
    refused(container(host_code, cubin), "sm_80", "1 of 1 device images for `sm_90a`")
    refused(
        container(host_code, cubin, plain), "sm_90a", "1 of 2 device images for `sm_90`, the fi"
    )
    refused(container(host_code, cubin)[:-100], "sm_90a", "the ELF at byte .* of the MEF is trunca")
    assert len(check_mef(container(host_code), "cpu")) == 1
    assert len(check_mef(container(host_code), "sm_90a")) == 1


def test_the_one_tolerance_is_what_max_does_with_a_plain_target(
    cubin: bytes, host_code: bytes
) -> None:
    assert mef_architectures("cpu") == frozenset()
    assert mef_architectures("sm_80") == {"sm_80"}
    assert mef_architectures("sm_90") == {"sm_90", "sm_90a"}
    assert mef_architectures("sm_90a") == {"sm_90a"}
    assert mef_architectures("sm_100f") == {"sm_100f"}
    assert mef_architectures("gfx942") == {"gfx942"}
    assert check_mef(container(host_code, cubin), "sm_90")[1].arch == "sm_90a"


def test_a_damaged_mef_ends_in_an_answer_or_in_one_kind_of_error(
    cubin: bytes, host_code: bytes
) -> None:
    chance = random.Random(7)
    mef = container(host_code, cubin)
    start = mef.index(cubin)
    for _ in range(300):
        damaged = bytearray(mef)
        for _ in range(8):
            at = chance.choice((64 + chance.randrange(64), start + chance.randrange(2_000)))
            damaged[at] ^= 1 << chance.randrange(8)
        try:
            read_mef(bytes(damaged))
        except CompileError as error:
            assert str(error)


@pytest.mark.slow
@pytest.mark.parametrize(("api", "arch", "code"), [
    ("cuda", "sm_90", "sm_90a"), ("cuda", "sm_120", "sm_120a"), ("cuda", "sm_80", "sm_80"),
    ("hip", "gfx942", "gfx942"),
])  # fmt: skip
def test_what_max_compiles_is_what_it_says(api: str, arch: str, code: str, tmp_path: Path) -> None:
    pytest.importorskip("max.engine")
    mef = compile_graph(api, arch, tmp_path)
    device = [i for i in check_mef(mef, arch) if i.machine in (CUDA, AMDGPU)]
    assert {image.arch for image in device} == {code}
    assert all(kernel.registers and kernel.code_bytes for i in device for kernel in i.kernels)


def compile_graph(api: str, arch: str, directory: Path) -> bytes:
    import subprocess
    import sys

    program = f"""
import os, numpy as np
from max import driver, engine
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
driver.set_virtual_device_api({api!r})
driver.set_virtual_device_target_arch({arch!r})
driver.set_virtual_device_count(1)
with Graph("toy", input_types=[TensorType(DType.float32, ["n", 4], DeviceRef.GPU())]) as graph:
    x = graph.inputs[0].tensor
    graph.output(x * x + x)
session = engine.InferenceSession(devices=[driver.Accelerator()])
session.compile(graph).export_mef("toy.mef")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], cwd=directory, check=True, timeout=900)
    return (directory / "toy.mef").read_bytes()
