"""`read_cubin` against NVIDIA's `cuobjdump`, over the cubins of every compiler there is."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from max_build.compilers.cubin import Cubin, check_cubin, read_cubin
from max_build.compilers.cuda_libraries import NVJITLINK, NVRTC
from max_build.compilers.elf_headers import CUDA
from max_build.compilers.linker import link_cubin
from max_build.compilers.mef import read_mef
from max_build.compilers.nvrtc import compile_cubin
from max_build.errors import ToolchainError

ARCHS = """
    sm_75 sm_80 sm_86 sm_87 sm_88 sm_89 sm_90 sm_90a sm_100 sm_100a sm_100f sm_103 sm_103a sm_103f
    sm_110 sm_110a sm_110f sm_120 sm_120a sm_120f sm_121 sm_121a sm_121f
""".split()

SHARED = b"""
template <class T, int N> __global__ void tile(const T *x, T *out) {
    __shared__ T part[N];
    extern __shared__ float more[];
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = part[N - 1 - threadIdx.x] + more[0];
}
template __global__ void tile<float, 64>(const float *, float *);
template __global__ void tile<double, 512>(const double *, double *);
"""
STACK = b"""
__constant__ float weights[3][17];
__device__ int counter;
extern "C" __global__ void __launch_bounds__(1024, 1) spills(const float *x, float *y, int n) {
    float a[48];
    for (int i = 0; i < 48; i++) a[i] = x[i * n];
    for (int k = 0; k < n; k++)
        for (int i = 0; i < 48; i++) a[i] = a[i] * a[(i + 7) % 48] + weights[k % 3][i % 17];
    for (int i = 0; i < 48; i++) y[i] = a[i];
    atomicAdd(&counter, 1);
}
extern "C" __global__ void indexed(const int *x, float *y, int n) {
    float a[32];
    for (int i = 0; i < 32; i++) a[i] = x[i];
    for (int k = 0; k < n; k++) a[x[k] & 31] += k;
    for (int i = 0; i < 32; i++) y[i] = a[i];
}
"""
CALLS = b"""
__device__ __noinline__ float down(float x, int n) {
    return n <= 0 ? x : down(x * 1.5f, n - 1) + down(x, n - 2);
}
__device__ __noinline__ float flat(float x) { float a[8]; a[int(x) & 7] = x; return a[3] + x; }
extern "C" __global__ void recursive(float *y, int n) { *y = down(*y, n); }
extern "C" __global__ void calls(float *y) { *y = flat(*y); }
"""
PTX = b"""
.version 8.8
.target sm_75
.address_size 64
.visible .entry seven(.param .u64 out) {
    .reg .b64 %rd<3>; .reg .b32 %r<2>;
    ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 7; st.global.u32 [%rd2], %r1; ret;
}
"""


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    try:
        files = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        pytest.skip("`nvidia-cuda-cuobjdump` is not installed")
    return next(str(file.locate()) for file in files if file.name == "cuobjdump")


def nvrtc_cubins() -> Iterator[tuple[str, str, bytes]]:
    for arch in ARCHS:
        for name, source in (("shared", SHARED), ("stack", STACK), ("calls", CALLS)):
            # What is named like a device is compiled for it as a whole; line information adds
            # sections, and tells nothing new.
            args = ["-lineinfo"] if name == "shared" else []
            yield f"nvrtc-{name}-{arch}", arch, compile_cubin(source, "k.cu", arch, args).cubin


def nvjitlink_cubins() -> Iterator[tuple[str, str, bytes]]:
    for arch in ARCHS:
        yield f"nvjitlink-{arch}", arch, link_cubin(PTX, "seven.ptx", arch).cubin


def triton_cubins(directory: Path) -> Iterator[tuple[str, str, bytes]]:
    """Of the two assemblers that come with Triton, the older one writes the older layout."""
    triton = pytest.importorskip("triton")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    for tool, archs in (
        ("ptxas", "sm_75 sm_80 sm_89 sm_90 sm_90a sm_100a sm_100f sm_120 sm_121a"),
        ("ptxas-blackwell", "sm_75 sm_90 sm_90a sm_100 sm_100a sm_103f sm_120a sm_121"),
    ):
        for arch in archs.split():
            ptx = compile_cubin(STACK, "k.cu", arch.replace("sm_", "compute_")).ptx
            # The ISA of this NVRTC may be newer than the tool's.
            ptx = re.sub(rb"\.version \d+\.\d+", b".version 8.8", ptx)
            (directory / "k.ptx").write_bytes(ptx)
            command = [tools / tool, "-arch", arch, "k.ptx", "-o", "k.cubin"]
            subprocess.run(command, cwd=directory, check=True, timeout=60)
            yield f"{tool}-{arch}", arch, (directory / "k.cubin").read_bytes()


def dumped(tool: str, option: str, path: Path) -> str:
    done = subprocess.run(
        [tool, option, path], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def assert_agrees(tool: str, path: Path, cubin: Cubin) -> None:
    text = dumped(tool, "-res-usage", path)
    theirs = {
        name: dict(item.rsplit(":", 1) for item in row.split())
        for name, row in re.findall(r"Function (.*):\n\s*(.*)", text)
    }
    ours = {
        kernel.name: {
            "REG": str(kernel.registers),
            "STACK": "UNKNOWN" if kernel.stack_bytes is None else str(kernel.stack_bytes),
            "SHARED": str(kernel.shared_bytes),
            "LOCAL": str(kernel.local_bytes),
            **{f"CONSTANT[{bank}]": str(size) for bank, size in kernel.constants.items()},
        }
        for kernel in cubin.kernels
    }
    unread = {"TEXTURE": "0", "SURFACE": "0", "SAMPLER": "0"}
    assert theirs == {name: {**row, **unread} for name, row in ours.items()}, path.name
    common = re.search(r"Common:\n\s*(.*)", text)
    assert common is not None
    shared = {f"CONSTANT[{bank}]": str(size) for bank, size in cubin.constants.items()}
    assert dict(item.rsplit(":", 1) for item in common[1].split()) == {
        "GLOBAL": str(cubin.global_bytes),
        **shared,
    }, path.name


def test_a_hundred_real_cubins_read_as_cuobjdump_reads_them(cuobjdump: str, tmp_path: Path) -> None:
    try:
        NVRTC.load()
        NVJITLINK.load()
    except ToolchainError as error:
        pytest.skip(error.message)
    count = 0
    for cubins in (nvrtc_cubins(), nvjitlink_cubins(), triton_cubins(tmp_path)):
        for name, arch, data in cubins:
            cubin = check_cubin(data, arch)
            path = tmp_path / f"{name}.cubin"
            path.write_bytes(data)
            assert_agrees(cuobjdump, path, cubin)
            count += 1
    assert count >= 100


def test_the_cubins_in_a_mef_read_as_cuobjdump_reads_them(
    cuobjdump: str, compiled: Path, tmp_path: Path
) -> None:
    count = 0
    for blob in sorted(compiled.rglob("cas/*/*")):
        data = blob.read_bytes()
        # A cubin kept by itself is not what this is about.
        if data.startswith(b"\x7fELF"):
            continue
        for image in read_mef(data):
            if image.machine != CUDA:
                continue
            path = tmp_path / f"{image.offset}.cubin"
            path.write_bytes(data[image.offset : image.offset + image.size])
            cubin = check_cubin(path.read_bytes(), "sm_90a")
            assert cubin.kernels == image.kernels
            assert_agrees(cuobjdump, path, cubin)
            count += 1
    assert count


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_90a", "sm_100a", "sm_120f"])
def test_the_architecture_reads_as_cuobjdump_reads_it(
    cuobjdump: str, arch: str, tmp_path: Path
) -> None:
    path = tmp_path / "k.cubin"
    path.write_bytes(compile_cubin(STACK, "k.cu", arch).cubin)
    named = re.search(r"\bsm=(\w+)", dumped(cuobjdump, "-elf", path))
    assert named is not None
    # It knows nothing of `f`: the code is that of the plain architecture.
    assert named[1] == read_cubin(path.read_bytes()).arch.removeprefix("sm_").rstrip("f")
