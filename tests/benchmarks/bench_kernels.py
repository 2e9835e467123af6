"""What kernels cost: all-hit builds, a unit with a thousand headers, misses beside bare NVRTC.

    python tests/benchmarks/bench_kernels.py [--quick] [--json FILE]

The rows that need CCCL take it from the toolkit of the `nvcc` on the path, and are left out where
there is none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import measure
from measure import (
    Figure,
    at_most,
    growth,
    process,
    pyproject,
    ratio_at_least,
    ratio_at_most,
    say,
    settle,
    timed,
)

from max_build import load_settings, open_cache
from max_build.compilers import Job, nvrtc
from max_build.compilers.cuda import CudaCompiler
from max_build.key import changes
from max_build.pipeline import build
from max_build.target import Target

TARGET = "sm_90a"
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
# cub is left out: its releases of 2025 have includes that are computed, so that nothing is kept.
LARGE = """
#include <cuda/atomic>
#include <cuda/barrier>
#include <cuda/std/chrono>
#include <cuda/std/complex>
#include <cuda/std/expected>
#include <cuda/std/inplace_vector>
#include <cuda/std/linalg>
#include <cuda/std/mdspan>
#include <cuda/std/ranges>
#include <cuda/std/variant>
extern "C" __global__ void large(float* x) {
  cuda::std::mdspan<float, cuda::std::extents<int, 4, cuda::std::dynamic_extent>> grid(x, 32);
  cuda::std::complex<float> z(grid(0, 1), grid(1, 0));
  x[threadIdx.x] = cuda::std::abs(z * z) + EDIT;
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
    head = pyproject("many", f'[tool.max-build]\ntargets = ["{TARGET}"]\n')
    (root / "pyproject.toml").write_text(head + "\n".join(tables))
    return root


def figures(quick: bool) -> Iterator[Figure]:
    """Everything, in a folder of its own."""
    include = _cccl()
    with measure.scratch() as base:
        yield from misses(base, "middle", MIDDLE, [], 2 if quick else 6)
        yield from side_by_side(base, 8 if quick else 40)
        yield from many(base, (20, 40, 80) if quick else (75, 150, 300), 3 if quick else 7)
        if include:
            yield from headers(base, include)
            yield from misses(base, "large", LARGE, include, 1 if quick else 3)


def many(base: Path, sizes: tuple[int, ...], rounds: int) -> Iterator[Figure]:
    """All hits in a whole hatchling process."""
    costs: dict[int, list[float]] = {}
    for count in sizes:
        say(f"a repo of {count} kernels, compiled once")
        root = project(
            base / f"many-{count}", {f"k{n}": (SMALL.format(n=n), "") for n in range(count)}
        )
        hatchling(root)
        settle()
        hatchling(root)
        ended = [hatchling(root) for _ in range(rounds)]
        costs[count] = [one.seconds for one in ended]
        limit = at_most(0.6) if count == 300 else None
        what = f"{count} kernels, all hits, whole hatchling process"
        yield Figure(what, "s", costs[count], target=limit)
        yield Figure("… its peak memory", "MB", [one.peak_mb for one in ended])
    yield growth("kernels", costs, "us", 1.5)


def side_by_side(base: Path, count: int) -> Iterator[Figure]:
    """Misses by one worker and by two, by turns."""
    taken: dict[int, list[float]] = {1: [], 2: []}
    say(f"{count} misses, by one worker and by two")
    for turn in range(2):
        for jobs, seconds in taken.items():
            units = {
                f"m{n}": (MIDDLE.replace("EDIT", f"{n}.{turn}{jobs}f"), "") for n in range(count)
            }
            root = project(base / f"misses-{turn}-{jobs}", units)
            with _jobs(jobs):
                settings = load_settings(root)
                with open_cache(settings.cache) as cache:
                    seconds.append(timed(lambda s=settings, c=cache: build(s, c)))
    what, peer = f"{count} misses, 1 worker", "2 workers"
    yield Figure(what, "s", taken[1], peer, taken[2], ratio_at_least(1.7))


def headers(base: Path, include: list[str]) -> Iterator[Figure]:
    """An all-hit check of a unit with a thousand headers, with its memory and without."""
    dirs = ", ".join(f'"{one}"' for one in include)
    more = f"include-dirs = [{dirs}]\noptions = {{ defines = {{ EDIT = 0 }} }}\n"
    root = project(base / "headers-repo", {"large": (LARGE, more)})
    settings = load_settings(root)
    unit = settings.units[0]
    settle()
    with open_cache(settings.cache) as cache:

        def job(memory: object) -> Job:
            return Job(unit, Target(TARGET), root, settings.python_path, base, memory)

        say("a unit with CCCL's headers")
        found = CudaCompiler().derive(job(cache.memo)).components
        count = f"{len(found.dependencies):,} headers"
        new = [timed(lambda: CudaCompiler().derive(job(cache.memo))) for _ in range(5)]
        adapter = CudaCompiler()
        adapter.derive(job(cache.memo))
        again = [timed(lambda: adapter.derive(job(cache.memo))) for _ in range(9)]
        bare = [timed(lambda: CudaCompiler().derive(job(None))) for _ in range(3)]
        other = changes(found, CudaCompiler().derive(job(None)).components)
        assert not other, f"the memory changed the key: {other}"
    what = f"check of {count}, with what earlier builds noted"
    peer, theirs = "reading and hashing them all", measure.each(bare, 1e3)
    yield Figure(what, "ms", measure.each(new, 1e3), peer, theirs, at_most(20))
    yield Figure(
        "… again in the same process", "ms", measure.each(again, 1e3), peer, theirs, at_most(20)
    )


def misses(base: Path, name: str, source: str, include: list[str], turns: int) -> Iterator[Figure]:
    """Misses of edited sources in a warm worker, beside the same compiles by NVRTC alone."""
    say(f"misses of a {name} source, and bare NVRTC")
    dirs = ", ".join(f'"{one}"' for one in include)
    arguments = ["--std=c++17", *(f"-I{one}" for one in include)]
    nvrtc.compile_cubin(b'extern "C" __global__ void f() {}', "f.cu", TARGET)
    bare: list[float] = []
    whole: list[float] = []
    for turn in range(turns):  # by turns, so that another process's load falls on both
        texts = {f"{name}{n}": source.replace("EDIT", f"{turn}.{n}f") for n in range(5)}
        units = {unit: (text, f"include-dirs = [{dirs}]\n") for unit, text in texts.items()}
        root = project(base / f"{name}-{turn}", units)
        settle()
        with _jobs(1):
            settings = load_settings(root)
            with open_cache(settings.cache) as cache:
                # The first one starts the worker, and reads what no later one reads again.
                result = build(settings, cache)
        states = {one.state: str(one.error or one.reason) for one in result.outcomes}
        assert states.keys() == {"compiled"}, states
        whole += [one.seconds for one in result.outcomes[1:]]
        bare += [
            timed(
                lambda text=text, root=root: nvrtc.compile_cubin(
                    text.encode(), f"{root}/kernels/x.cu", TARGET, arguments
                )
            )
            for text in list(texts.values())[1:]
        ]
    ours, theirs = measure.each(whole, 1e3), measure.each(bare, 1e3)
    yield Figure(f"a miss, {name} source", "ms", ours, "NVRTC alone", theirs, ratio_at_most(1.05))


def hatchling(root: Path) -> measure.Ended:
    """One build of a wheel in a process of its own."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", root / "dist"]
    return process(command, cwd=root, env=measure.environment())


@contextmanager
def _jobs(count: int) -> Iterator[None]:
    os.environ["MAX_BUILD_JOBS"] = str(count)
    try:
        yield
    finally:
        os.environ.pop("MAX_BUILD_JOBS")


def _cccl() -> list[str]:
    """The include directories of CCCL and of the CUDA runtime."""
    if not shutil.which("nvcc"):
        return []
    command = ["nvcc", "--dryrun", "-c", "-x", "cu", os.devnull]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    top = re.search(r"^#\$ TOP=(.+)$", told, re.MULTILINE)
    include = Path(top[1].strip()).resolve() / "include" if top else Path()
    found = [include / "cccl", include]
    whole = (found[0] / "cub").is_dir() and (include / "cuda_runtime_api.h").is_file()
    return [str(one) for one in found] if whole else []


if __name__ == "__main__":
    measure.main("kernels", figures, __doc__)
