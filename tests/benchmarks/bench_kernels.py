"""What kernels cost: all-hit builds, a unit with a thousand headers, misses beside bare NVRTC.

    python tests/benchmarks/bench_kernels.py [--kernels 300] [--cccl DIR --cuda DIR]

Prints one line per figure with the target it is held against. `--cccl` is a folder with
`cuda/std` and `cub` in it, `--cuda` one with `cuda_runtime_api.h`; without them the rows that
need CCCL are left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from max_build import load_settings, open_cache
from max_build.compilers import Job, nvrtc
from max_build.compilers.cuda import CudaCompiler
from max_build.key import changes
from max_build.pipeline import build
from max_build.target import Target

TARGET = "sm_90a"
PYPROJECT = """
[build-system]
requires = ["hatchling", "max-build"]
build-backend = "hatchling.build"
[project]
name = "many"
version = "1"
[tool.hatch.build.targets.wheel]
packages = ["many"]
[tool.hatch.build.targets.wheel.hooks.max-build]
[tool.max-build]
targets = ["sm_90a"]
"""
SMALL = """
#include "common.cuh"
extern "C" __global__ void kernel{n}(float* x, int count) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] = scaled(x[i]) + {n}.0f;
}}
"""
COMMON = "#pragma once\n__device__ inline float scaled(float x) { return 2.0f * x; }\n"
# Enough templates for NVRTC to be busy for about 200 ms.
MIDDLE = """
template <int K, int N> struct Sum { static __device__ float of(const float* x) {
  return x[N] * x[K + 1] + Sum<K, N - 1>::of(x + (N & 1)); } };
template <int K> struct Sum<K, 0> { static __device__ float of(const float* x) { return x[K]; } };
extern "C" __global__ void middle(float* x) {
  x[threadIdx.x] = Sum<1, 99>::of(x) + Sum<2, 99>::of(x) + Sum<3, 99>::of(x) + EDIT;
}
"""
LARGE = """
#include <cuda/std/algorithm>
#include <cuda/std/array>
#include <cuda/std/tuple>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_radix_sort.cuh>
extern "C" __global__ void large(float* x) {
  using Reduce = cub::BlockReduce<float, 128>;
  __shared__ typename Reduce::TempStorage storage;
  float total = Reduce(storage).Sum(x[threadIdx.x]);
  if (threadIdx.x == 0) x[0] = total + EDIT;
}
"""


def project(root: Path, units: dict[str, tuple[str, str]]) -> Path:
    """A repo with one kernel module per name: (source, further lines of its table)."""
    (root / "many").mkdir(parents=True)
    (root / "many" / "__init__.py").touch()
    (root / "kernels").mkdir()
    (root / "kernels" / "common.cuh").write_text(COMMON)
    tables = []
    for name, (source, more) in units.items():
        (root / "kernels" / f"{name}.cu").write_text(source)
        tables.append(f'[tool.max-build.kernels.{name}]\nsource = "kernels/{name}.cu"\n{more}')
    (root / "pyproject.toml").write_text(PYPROJECT + "\n".join(tables))
    return root


def timed(work: Callable[[], object]) -> float:
    """Seconds of wall time."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def show(what: str, measured: str, target: str) -> None:
    """One row."""
    print(f"{what:<58} {measured:>24}   {target}", flush=True)


def hatchling(root: Path) -> None:
    """One build of a wheel in a process of its own."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(root / "dist")]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


def settle() -> None:
    """Wait until no file is too young for the memory: what a build an hour later finds."""
    time.sleep(2.1)


def many(base: Path, count: int) -> None:
    """All hits, and many misses on one CPU and on all."""
    units = {f"k{n}": (SMALL.format(n=n), "") for n in range(count)}
    root = project(base / "many-repo", units)
    hatchling(root)
    settle()
    hatchling(root)
    best = min(timed(lambda: hatchling(root)) for _ in range(5))
    show(f"{count} kernels, all hits, one hatchling process", f"{best:.3f} s", "<= 0.6 s for 300")
    seconds = {}
    for jobs in ("1", "2"):
        forty = {f"m{n}": (MIDDLE.replace("EDIT", f"{n}.{jobs}f"), "") for n in range(40)}
        root = project(base / f"forty-{jobs}", forty)
        os.environ["MAX_BUILD_JOBS"] = jobs
        settings = load_settings(root)
        with open_cache(settings.cache) as cache:
            started = time.perf_counter()
            build(settings, cache)
            seconds[jobs] = time.perf_counter() - started
    os.environ.pop("MAX_BUILD_JOBS")
    ratio = seconds["1"] / seconds["2"]
    text = f"{seconds['1']:.2f} / {seconds['2']:.2f} s = {ratio:.2f}x"
    show("40 misses, 1 worker / 2 workers", text, ">= 1.7x")


def headers(base: Path, include: list[str]) -> None:
    """An all-hit check of a unit with a thousand headers, with its memory and without."""
    dirs = ", ".join(f'"{one}"' for one in include)
    more = f"include-dirs = [{dirs}]\noptions = {{ defines = {{ EDIT = 0 }} }}\n"
    root = project(base / "headers-repo", {"large": (LARGE, more)})
    settings = load_settings(root)
    settle()
    with open_cache(settings.cache) as cache:
        for note in ("first time", "a new process's first"):
            memory = cache.memo
            job = Job(settings.units[0], Target(TARGET), root, settings.python_path, base, memory)
            adapter = CudaCompiler()
            started = time.perf_counter()
            adapter.derive(job)
            seconds = time.perf_counter() - started
            found = adapter.derive(job).components
            target = "<= 20 ms for 1,100" if note != "first time" else ""
            count = len(found.dependencies)
            show(f"check of {count} headers, {note}", f"{1000 * seconds:.1f} ms", target)
        again = min(timed(lambda: adapter.derive(job)) for _ in range(5))
        show(f"check of {count} headers, again", f"{1000 * again:.1f} ms", "<= 20 ms for 1,100")
        bare = Job(settings.units[0], Target(TARGET), root, settings.python_path, base)
        other = changes(found, CudaCompiler().derive(bare).components)
        assert not other, f"the memory changed the key: {other}"


def miss(base: Path, name: str, source: str, include: list[str]) -> None:
    """Misses of edited sources in a warm worker, beside the same compiles by NVRTC alone."""
    dirs = ", ".join(f'"{one}"' for one in include)
    arguments = ["--std=c++17", *(f"-I{one}" for one in include)]
    os.environ["MAX_BUILD_JOBS"] = "1"
    nvrtc.compile_cubin(b'extern "C" __global__ void f() {}', "f.cu", TARGET)
    bare, whole = [], []
    for turn in range(3):  # by turns, so that another process's load falls on both
        texts = {f"{name}{n}": source.replace("EDIT", f"{turn}.{n}f") for n in range(5)}
        units = {unit: (text, f"include-dirs = [{dirs}]\n") for unit, text in texts.items()}
        root = project(base / f"{name}-{turn}", units)
        settings = load_settings(root)
        settle()
        with open_cache(settings.cache) as cache:
            # The first one starts the worker, and reads what no later one reads again.
            result = build(settings, cache)
            assert {one.state for one in result.outcomes} == {"compiled"}, result.outcomes
            whole += [one.seconds for one in result.outcomes[1:]]
        for text in list(texts.values())[1:]:
            started = time.perf_counter()
            nvrtc.compile_cubin(text.encode(), f"{root}/kernels/x.cu", TARGET, arguments)
            bare.append(time.perf_counter() - started)
    os.environ.pop("MAX_BUILD_JOBS")
    alone, all_in = min(bare), min(whole)
    text = f"{1000 * all_in:.0f} / {1000 * alone:.0f} ms = +{100 * (all_in / alone - 1):.1f} %"
    show(f"a miss / NVRTC alone, {name} source", text, "<= +5 %")


def main() -> None:
    """Run everything in a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=300, help="0 leaves that part out")
    parser.add_argument("--cccl", default="")
    parser.add_argument("--cuda", default="")
    options = parser.parse_args()
    include = [one for one in (options.cccl, options.cuda) if one]
    base = Path(tempfile.mkdtemp(prefix="max-build-bench-"))
    os.environ["MAX_BUILD_CACHE_DIR"] = str(base / "cache")
    try:
        if options.kernels:
            many(base, options.kernels)
        miss(base, "middle", MIDDLE, [])
        if include:
            headers(base, include)
            miss(base, "large", LARGE, include)
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
