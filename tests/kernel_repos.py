"""Small repos of kernels for the tests, and one build of one unit of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from max_build import load_settings, open_cache
from max_build.outcomes import Build, Mode, Outcome
from max_build.pipeline import build
from max_build.record import Record

SAXPY = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
"""

# A chain of three headers in two include directories, one of them angled.
CHAIN = {
    "kernels/chain.cu": '#include "first.cuh"\n'
    'extern "C" __global__ void chain(float* x) { x[threadIdx.x] = first(x[threadIdx.x]); }\n',
    "kernels/first.cuh": "#pragma once\n#include <second.cuh>\n"
    "__device__ inline float first(float x) { return second(x) + 1.0f; }\n",
    "include/second.cuh": '#pragma once\n#include "deep/third.cuh"\n'
    "__device__ inline float second(float x) { return third(x) * 2.0f; }\n",
    "include/deep/third.cuh": "#pragma once\n"
    "__device__ inline float third(float x) { return x - 3.0f; }\n",
}


@dataclass(frozen=True)
class Repo:
    """A repo with kernel modules at `root`."""

    root: Path

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def configure(self, tables: Mapping[str, str], targets: str = '["sm_90a"]') -> None:
        """Declare units: name → the lines of its table."""
        text = "".join(
            f"[tool.max-build.kernels.{name}]\n{lines}\n" for name, lines in tables.items()
        )
        self.write(
            {
                "pyproject.toml": '[project]\nname = "repo"\nversion = "1"\n'
                f"[tool.max-build]\ntargets = {targets}\n{text}"
            }
        )

    def build(self, mode: Mode = "build") -> Build:
        settings = load_settings(self.root)
        with open_cache(settings.cache) as cache:
            return build(settings, cache, mode=mode)

    def one(self) -> Outcome:
        """Build, and the outcome of the only unit and target."""
        (outcome,) = self.build().outcomes
        return outcome

    def cubin(self, record: Record | None) -> bytes:
        assert record is not None
        blob = record.blob("cubin")
        assert blob is not None
        with open_cache(load_settings(self.root).cache) as cache:
            return cache.path(blob).read_bytes()


def make(root: Path, files: Mapping[str, str], tables: Mapping[str, str]) -> Repo:
    """A repo with those files and units."""
    repo = Repo(root)
    repo.write(files)
    repo.configure(tables)
    return repo


def saxpy(root: Path, more: str = "") -> Repo:
    """A repo with one lone source."""
    table = f'source = "kernels/saxpy.cu"\n{more}'
    return make(root, {"kernels/saxpy.cu": SAXPY}, {"saxpy": table})


def chain(root: Path, more: str = "") -> Repo:
    """A repo with a chain of three headers."""
    table = f'source = "kernels/chain.cu"\ninclude-dirs = ["include"]\n{more}'
    return make(root, CHAIN, {"chain": table})
