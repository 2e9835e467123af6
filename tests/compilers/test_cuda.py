"""The `cuda` adapter in whole builds: what its key follows, what it does not, what comes out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_repos import CHAIN, SAXPY, Repo, chain, make, saxpy
from max_build import load_settings
from max_build.compilers import Job, Memory
from max_build.compilers.cubin import read_cubin
from max_build.compilers.cuda import CudaCompiler
from max_build.errors import ConfigError, ToolchainError
from max_build.key import Components, changes
from max_build.target import Target

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

TEMPLATE = """
namespace blas {
template <class T> __global__ void axpby(T a, const T* x, T b, T* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + b * y[i];
}
}
extern "C" __global__ void plain(float* x) { *x = 0; }
"""


class Remembered(dict[tuple[str, str], bytes]):
    """A memory for one test run: what NVRTC's 100 MB hash to, above all."""

    def get(self, namespace: str, key: str) -> bytes | None:
        return super().get((namespace, key))

    def under(self, namespace: str, prefix: str) -> dict[str, bytes]:
        return {
            key: value
            for (space, key), value in self.items()
            if space == namespace and key.startswith(prefix)
        }

    def set(self, namespace: str, key: str, value: bytes) -> None:
        self[namespace, key] = value


MEMORY = Remembered()


def components(repo: Repo, target: str = "sm_90a", memory: Memory | None = MEMORY) -> Components:
    unit = load_settings(repo.root).units[0]
    job = Job(unit, Target(target), repo.root, (), repo.root / "unused", memory)
    return CudaCompiler().derive(job).components


@pytest.mark.parametrize(
    "target",
    ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100f", "sm_103a", "sm_121a"],
)
def test_each_target_gives_code_for_exactly_it(tmp_path: Path, target: str) -> None:
    repo = saxpy(tmp_path, f'targets = ["{target}"]')
    found = read_cubin(repo.cubin(repo.one().record))
    assert found.arch == target
    assert found.entry_points == ("saxpy",)


def test_names_are_lowered_and_survive_a_hit(tmp_path: Path) -> None:
    names = 'names = ["blas::axpby<float>", "blas::axpby<double>", "plain"]'
    repo = make(tmp_path, {"k.cu": TEMPLATE}, {"axpby": f'source = "k.cu"\n{names}'})
    compiled, cached = repo.one(), repo.one()
    assert (compiled.state, cached.state) == ("compiled", "cached")
    assert cached.record is not None
    assert compiled.record is not None
    assert cached.record.kernels == compiled.record.kernels
    lowered = {name: kernel.lowered for name, kernel in cached.record.kernels.items()}
    assert lowered["plain"] == "plain"
    assert lowered["blas::axpby<float>"].startswith("_ZN4blas5axpbyIfE")
    assert set(lowered.values()) == set(read_cubin(repo.cubin(cached.record)).entry_points)


def test_without_names_every_kernel_of_the_cubin_is_there(tmp_path: Path) -> None:
    source = SAXPY + 'extern "C" __global__ void other(float* x) { *x = 1; }'
    repo = make(tmp_path, {"k.cu": source}, {"both": 'source = "k.cu"'})
    record = repo.one().record
    assert record is not None
    assert set(record.kernels) == {"other", "saxpy"}


def test_a_name_that_is_not_there_is_told(tmp_path: Path) -> None:
    repo = saxpy(tmp_path, 'names = ["daxpy"]')
    outcome = repo.one()
    assert outcome.state == "failed"
    assert "daxpy" in str(outcome.error)


def test_a_refusal_names_the_users_files(tmp_path: Path) -> None:
    repo = chain(tmp_path)
    repo.write({"include/second.cuh": "#pragma once\n#include <nothing/here.h>\nbroken;\n"})
    outcome = repo.one()
    assert outcome.state == "failed"
    text = str(outcome.error)
    assert "include/second.cuh" in text
    assert "/proc/" not in text
    assert "include-dirs" in text


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("options = { std = 'c++98', speed = 1 }", ("options.std", "options.speed")),
        ("options = { extra = ['-Ifoo'] }", ("options.extra",)),
        ("num-warps = 8", ("num-warps",)),
        ("constexprs = { N = 8 }", ("constexprs",)),
        ("targets = ['cpu', 'sm_91']", ("`cpu` is not", "`sm_91` is an unknown")),
    ],
)
def test_every_wrong_setting_is_told(tmp_path: Path, more: str, told: tuple[str, ...]) -> None:
    repo = saxpy(tmp_path, more)
    with pytest.raises(ConfigError) as caught:
        load_settings(repo.root)
    for part in told:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("", "options = {}", True),
        ("", 'options = { std = "c++17", fmad = true, optimize = "full" }', True),
        ("options = { defines = { N = 1 } }", "options = { defines = { N = true } }", True),
        ("", "options = { defines = { N = 1 } }", False),
        ("", 'options = { std = "c++20" }', False),
        ("", 'options = { optimize = "fast-compile" }', False),
        ("", "options = { lineinfo = true }", False),
        ("", 'options = { extra = ["-restrict"] }', False),
        ("", "keep-ptx = true", False),
        ("", 'names = ["saxpy"]', False),
        ("", 'include-dirs = ["include"]', False),
    ],
)
def test_equal_effect_is_an_equal_key(tmp_path: Path, one: str, other: str, same: bool) -> None:
    keys = [components(saxpy(tmp_path / name, more)) for name, more in (("a", one), ("b", other))]
    assert (changes(*keys) == ()) is same


def test_the_target_with_its_suffix_is_in_the_key(tmp_path: Path) -> None:
    repo = saxpy(tmp_path)
    assert components(repo, "sm_90") != components(repo, "sm_90a")


def test_fast_compile_is_a_build_of_its_own(tmp_path: Path) -> None:
    repo = saxpy(tmp_path, 'options = { optimize = "fast-compile" }')
    outcome = repo.one()
    assert outcome.state == "compiled"
    assert outcome.record is not None
    assert outcome.record.components.options["optimize"] == "fast-compile"


def test_ptx_is_kept_where_asked(tmp_path: Path) -> None:
    repo = saxpy(tmp_path, "keep-ptx = true")
    record = repo.one().record
    assert record is not None
    assert [blob.role for blob in record.blobs] == ["cubin", "ptx"]


@pytest.mark.parametrize("options", ["{}", "{ lineinfo = true }", "{ debug = true }"])
def test_two_checkouts_are_one_key_and_the_same_bytes(tmp_path: Path, options: str) -> None:
    more = f"options = {options}"
    repos = [chain(tmp_path / "a", more), chain(tmp_path / "somewhere" / "b", more)]
    cubins = []
    for position, repo in enumerate(repos):
        for path in repo.root.rglob("*"):
            os.utime(path, (1e9 + position, 1e9 + position))
        os.environ["MAX_BUILD_CACHE_DIR"] = str(tmp_path / f"cache-{position}")
        outcome = repo.one()
        assert outcome.state == "compiled"
        cubins.append(repo.cubin(outcome.record))
    assert cubins[0] == cubins[1]
    assert str(tmp_path).encode() not in cubins[0]
    assert components(repos[0]) == components(repos[1])


def test_the_components_hold_no_path_of_this_machine(tmp_path: Path) -> None:
    outside = tmp_path / "sdk"
    outside.mkdir()
    (outside / "sdk.cuh").write_text("#define TWO 2\n")
    source = '#include <sdk.cuh>\n#include "first.cuh"\n' + CHAIN["kernels/chain.cu"]
    table = f'source = "kernels/chain.cu"\ninclude-dirs = ["include", "{outside}"]\n'
    repo = make(tmp_path / "repo", {**CHAIN, "kernels/chain.cu": source}, {"chain": table})
    found = components(repo)
    assert str(tmp_path) not in repr(found)
    assert "include-0/sdk.cuh" in found.dependencies
    assert repo.one().state == "compiled"


def test_deriving_loads_no_compiler(tmp_path: Path) -> None:
    repo = saxpy(tmp_path)
    assert repo.one().state == "compiled"
    code = (
        "import sys; from kernel_repos import Repo; from pathlib import Path\n"
        f"assert Repo(Path({str(repo.root)!r})).one().state == 'cached'\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'cuda', 'numpy', 'max', 'triton', 'torch'}, loaded\n"
        "assert 'nvrtc' not in Path('/proc/self/maps').read_text()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_another_build_of_the_library_is_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from max_build.compilers.cuda_libraries import NVRTC

    repo = saxpy(tmp_path / "repo")
    before = components(repo)
    library = NVRTC.find()
    copy = tmp_path / "site" / library.parent.relative_to(library.parents[3])
    shutil.copytree(
        library.parent,
        copy,
        ignore=lambda _, names: [name for name in names if not name.startswith("libnvrtc")],
    )
    with (copy / library.name).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert [name for name, *_ in changes(before, components(repo))] == ["compiler.nvrtc"]


def test_a_machine_without_nvrtc_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = saxpy(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(ToolchainError, match=r"max-build\[cuda\]"):
        components(repo)


def test_the_memory_never_changes_an_answer(tmp_path: Path) -> None:
    """An edit, its taking back, and a new header, each with the memory and without."""
    repo = chain(tmp_path)
    steps: list[Callable[[], None]] = [
        lambda: None,
        lambda: repo.write({"include/deep/third.cuh": "__device__ float third(float x); // new"}),
        lambda: repo.write(CHAIN),
        lambda: repo.write({"kernels/second.cuh": CHAIN["include/second.cuh"]}),
        lambda: repo.write({"include/first.cuh": CHAIN["kernels/first.cuh"]}),
    ]
    unit = load_settings(repo.root).units[0]
    adapter = CudaCompiler()
    for step in steps:
        step()
        expected = components(repo, memory=None)
        job = Job(unit, Target("sm_90a"), repo.root, (), tmp_path, MEMORY)
        assert adapter.derive(job).components == expected
        assert components(repo) == expected
