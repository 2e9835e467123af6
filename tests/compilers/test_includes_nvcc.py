"""The closure against `nvcc -M`: whatever nvcc reads below an include directory is in it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from max_build.compilers.files import Disk
from max_build.compilers.includes import Layout, resolve
from support import ROOT

NVCC = shutil.which("nvcc")
HEADERS = [
    "cuda_fp16.h",
    "cuda_bf16.h",
    "cuda_fp8.h",
    "cooperative_groups.h",
    "cooperative_groups/reduce.h",
    "cuda_pipeline.h",
    "cuda/std/array",
    "cuda/std/atomic",
    "cuda/std/chrono",
    "cuda/std/complex",
    "cuda/std/expected",
    "cuda/std/mdspan",
    "cuda/std/optional",
    "cuda/std/span",
    "cuda/std/tuple",
    "cuda/std/type_traits",
    "cuda/atomic",
    "cuda/barrier",
    "cuda/pipeline",
    "cub/block/block_reduce.cuh",
    "cub/block/block_scan.cuh",
    "cub/warp/warp_reduce.cuh",
]

pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine to compare with")


def toolkit() -> Path:
    """The headers that come with nvcc, and CCCL's among them."""
    done = subprocess.run(
        [NVCC or "", "-E", "-v", "-x", "cu", "/dev/null"],
        text=True,
        capture_output=True,
        check=False,
    )
    places = [
        Path(word.strip('"').removeprefix("-I").removeprefix("-isystem"))
        for word in done.stderr.replace('" "', '"\n"').split()
        if word.strip('"').startswith(("-I", "-isystem"))
    ]
    found = next((one for one in places if (one / "cuda_fp16.h").is_file()), None)
    if found is None:
        pytest.skip("nvcc does not tell where its headers are")
    return found.resolve()


def read_by_nvcc(source: Path, *include_dirs: Path) -> set[Path]:
    """Every file that nvcc's host and device passes depend on."""
    command = [NVCC or "", "-M", "-std=c++20", *(f"-I{one}" for one in include_dirs), str(source)]
    read: set[Path] = set()
    for extra in ([], ["-D__CUDA_ARCH__=900"]):
        done = subprocess.run([*command, *extra], text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        names = done.stdout.partition(":")[2].replace("\\\n", " ").split()
        read |= {Path(name).resolve() for name in names}
    return read


@pytest.mark.parametrize("header", HEADERS)
def test_no_header_that_nvcc_reads_is_missing(header: str, tmp_path: Path) -> None:
    headers = toolkit()
    dirs = [headers, headers / "cccl"]
    source, empty = tmp_path / "k.cu", tmp_path / "empty.cu"
    source.write_text(f"#include <{header}>\n__global__ void k() {{}}\n")
    empty.write_text("__global__ void k() {}\n")
    # nvcc puts cuda_runtime.h in front of every source, which NVRTC does not.
    wanted = read_by_nvcc(source, *dirs) - read_by_nvcc(empty, *dirs) - {source}
    wanted = {path for path in wanted if path.is_relative_to(headers)}
    assert wanted
    layout = Layout.of(str(tmp_path), tuple(str(one) for one in dirs))
    closure = resolve(str(source), layout, Disk({}))
    mine = {Path(layout.disk_path(one.path)).resolve() for one in closure.files}
    if closure.problems:  # then the unit is compiled uncached, and nothing is claimed
        assert header.startswith("cub/"), closure.problems
    else:
        assert not wanted - mine
    assert not any("##" in problem for problem in closure.problems)


def test_the_examples_kernel(tmp_path: Path) -> None:
    example = ROOT / "examples" / "kernels" / "cuda"
    source = example / "reduce.cu"
    include = example / "include"
    layout = Layout.of(str(example.parent), (str(include),))
    closure = resolve(str(source), layout, Disk({}))
    mine = {Path(layout.disk_path(one.path)).resolve() for one in closure.files}
    wanted = {
        path for path in read_by_nvcc(source, include) if path.is_relative_to(example.resolve())
    }
    assert len(wanted) > 2
    assert not closure.problems
    assert wanted <= mine
