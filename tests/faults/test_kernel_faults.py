"""What went wrong in other compile caches for kernels, each tried here.

The rows are those of the faults that other projects' users reported: stale hits, keys that never
hit, rubbish that was published.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_repos import CHAIN, SAXPY, Repo, chain, make, saxpy
from max_build import load_settings, open_cache
from max_build.compilers import Job
from max_build.compilers.cuda import CudaCompiler
from max_build.errors import CompileError
from max_build.pipeline import build
from max_build.target import Target

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

ADAPTER = """
import os
from pathlib import Path

from max_build.compilers import Product
from max_build.compilers.cuda import CudaCompiler


class Compiler(CudaCompiler):
    name = "{name}"

    def compile(self, job, derivation):
        product = super().compile(job, derivation)
        cubin = product.files["cubin"]
        data = cubin.read_bytes()
        {body}
        return product
"""


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Installs a third party's compiler: NVRTC, and then something done to what it made."""

    def install(name: str, body: str) -> None:
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        (site / f"{name}_adapter.py").write_text(ADAPTER.format(name=name, body=body))
        info = site / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[max_build.compilers]\n{name} = {name}_adapter:Compiler\n"
        )
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.setenv("PYTHONPATH", str(site))

    return install


@pytest.fixture
def sabotage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs a text in each new Python process, workers among them, before anything else."""

    def install(text: str) -> None:
        site = tmp_path / "sabotage"
        site.mkdir()
        (site / "sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(site))

    return install


def stored(kind: str) -> list[Path]:
    """The files of the cache in `ac` or `cas`."""
    return [
        path for path in Path(os.environ["MAX_BUILD_CACHE_DIR"], kind).rglob("*") if path.is_file()
    ]


# --- row 1: the text that only the host compiler sees


def test_text_under_ifndef_cuda_arch_is_keyed(tmp_path: Path) -> None:
    host = "#ifndef __CUDA_ARCH__\nconstexpr int block = 128;\n#endif\n" + SAXPY
    repo = make(tmp_path, {"k.cu": host}, {"k": 'source = "k.cu"'})
    first = repo.one()
    repo.write({"k.cu": host.replace("128", "256")})
    second = repo.one()
    assert (first.state, second.state) == ("compiled", "compiled")
    assert first.key != second.key


# --- rows 2 and 3: headers, those that are there and those that are not


@pytest.mark.parametrize("leaf", list(CHAIN))
def test_an_edit_anywhere_in_the_chain_misses_and_taking_it_back_hits(
    tmp_path: Path, leaf: str
) -> None:
    repo = chain(tmp_path)
    first = repo.one()
    assert repo.one().state == "cached"
    repo.write({leaf: CHAIN[leaf] + "\n// one byte more or less\n"})
    edited = repo.one()
    assert edited.state == "compiled"
    assert (leaf.rpartition("/")[2] in edited.reason) or leaf == "kernels/chain.cu"
    repo.write({leaf: CHAIN[leaf]})
    again = repo.one()
    assert (again.state, again.key) == ("cached", first.key)


def test_an_edit_of_equal_size_within_one_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    repo = chain(tmp_path)
    path = tmp_path / "include" / "deep" / "third.cuh"
    keys = set()
    for digit in "3456":
        path.write_text(CHAIN["include/deep/third.cuh"].replace("3.0f", f"{digit}.0f"))
        os.utime(path, ns=(10**18, 10**18))
        outcome = repo.one()
        assert outcome.state == "compiled"
        keys.add(outcome.key)
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("include", "new"),
    [
        ("#include <second.cuh>", "early/second.cuh"),
        ('#include "second.cuh"', "early/second.cuh"),
        ('#include "second.cuh"', "kernels/second.cuh"),
        ('#if __has_include("tuned.cuh")\n#include "tuned.cuh"\n#endif', "early/tuned.cuh"),
        ("#if 0\n#include <never.cuh>\n#endif", "early/never.cuh"),
    ],
)
def test_a_header_that_comes_to_be_found_first_misses(
    tmp_path: Path, include: str, new: str
) -> None:
    files = {**CHAIN, "kernels/chain.cu": f"{include}\n{CHAIN['kernels/chain.cu']}"}
    table = 'source = "kernels/chain.cu"\ninclude-dirs = ["early", "include"]\n'
    repo = make(tmp_path, files, {"chain": table})
    (tmp_path / "early").mkdir()
    before = repo.one()
    assert repo.one().state == "cached"
    other = CHAIN["include/second.cuh"].replace("2.0f", "4.0f")
    repo.write({new: other if new == "early/second.cuh" else "#include <second.cuh>\n"})
    after = repo.one()
    assert after.state == "compiled"
    assert after.key != before.key
    (tmp_path / new).unlink()
    again = repo.one()
    assert (again.state, again.key) == ("cached", before.key)


def test_a_computed_include_is_compiled_and_not_kept(tmp_path: Path) -> None:
    source = '#define WHICH "first.cuh"\n#include WHICH\n' + CHAIN["kernels/chain.cu"]
    repo = chain(tmp_path)
    repo.write({"kernels/chain.cu": source})
    for _ in range(2):
        outcome = repo.one()
        assert outcome.state == "uncached"
        assert "kernels/chain.cu:2" in outcome.reason
    assert stored("ac") == []
    repo.write({"include/deep/third.cuh": CHAIN["include/deep/third.cuh"].replace("3", "4")})
    assert repo.cubin(repo.one().record) is not None


@pytest.mark.parametrize("macro", ["__TIME__", "__DATE__"])
def test_what_differs_in_every_compile_is_not_kept(tmp_path: Path, macro: str) -> None:
    source = f"__device__ const char* when = {macro};\n"
    repo = make(tmp_path, {"k.cu": source + SAXPY}, {"k": 'source = "k.cu"'})
    assert repo.one().state == "uncached"


# --- row 7: a compiler that is not deterministic


def test_a_compiler_that_adds_chance_still_hits(
    tmp_path: Path, adapter: Callable[[str, str], None]
) -> None:
    body = 'ptx = product.files["ptx"]; ptx.write_bytes(ptx.read_bytes() + os.urandom(8))'
    adapter("noisy", body)
    repo = saxpy(tmp_path / "repo", 'compiler = "noisy"\nkeep-ptx = true')
    first, second = repo.one(), repo.one()
    assert (first.state, second.state) == ("compiled", "cached")
    assert first.record is not None
    assert second.record is not None
    assert first.record.blobs == second.record.blobs


# --- rows 6, 10 and 12: what is not the compiler's business


def test_another_place_user_and_rank_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = chain(tmp_path / "alice" / "work").one()
    moved = tmp_path / "srv" / "ci" / "checkout-7"
    shutil.copytree(tmp_path / "alice" / "work", moved)
    shutil.rmtree(tmp_path / "alice")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "bob")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("CPATH", str(moved))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    outcome = Repo(moved).one()
    assert (outcome.state, outcome.key) == ("cached", first.key)


def test_new_times_hit(tmp_path: Path) -> None:
    repo = chain(tmp_path / "repo")
    repo.one()
    for path in (tmp_path / "repo").rglob("*"):
        os.utime(path)
    assert repo.one().state == "cached"
    for name, text in CHAIN.items():
        (tmp_path / "repo" / name).unlink()
        repo.write({name: text})
    assert repo.one().state == "cached"


# --- row 15: rubbish is never published


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('raise OSError(24, "Too many open files")', "Too many open files"),
        ('cubin.write_bytes(b"")', "empty cubin"),
        ("cubin.unlink()", "cannot be read"),
        ("cubin.write_bytes(data[: len(data) // 2])", "truncated"),
        ('cubin.write_bytes(b"error: out of memory")', "not an ELF file"),
        ('cubin.write_bytes(Path("/proc/self/exe").read_bytes())', "another machine"),
        ("os._exit(0)", "left with status 0"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_rubbish_is_told_and_not_published(
    tmp_path: Path, adapter: Callable[[str, str], None], body: str, told: str
) -> None:
    adapter("rubbish", body)
    repo = saxpy(tmp_path / "repo", 'compiler = "rubbish"')
    outcome = repo.one()
    assert outcome.state == "failed"
    assert told in str(outcome.error)
    assert (stored("ac"), stored("cas")) == ([], [])


def test_code_for_another_architecture_is_not_published(
    tmp_path: Path, adapter: Callable[[str, str], None]
) -> None:
    other = saxpy(tmp_path / "other", 'targets = ["sm_90"]')
    cubin = tmp_path / "sm_90.cubin"
    cubin.write_bytes(other.cubin(other.one().record))
    adapter("wrong", f"cubin.write_bytes(Path({str(cubin)!r}).read_bytes())")
    outcome = saxpy(tmp_path / "repo", 'compiler = "wrong"').one()
    assert outcome.state == "failed"
    assert "code for `sm_90`, not for `sm_90a`" in str(outcome.error)


def test_an_nvrtc_that_returns_rubbish_is_not_believed(
    tmp_path: Path, sabotage: Callable[[str], None]
) -> None:
    sabotage(
        "import ctypes\nfrom cuda.bindings import nvrtc\noriginal = nvrtc.nvrtcGetCUBIN\n"
        "def rubbish(program, buffer):\n"
        "    answer = original(program, buffer)\n"
        "    ctypes.memset(id(buffer) + bytes.__basicsize__ - 1, 0, 4)\n"
        "    return answer\n"
        "nvrtc.nvrtcGetCUBIN = rubbish\n"
    )
    outcome = saxpy(tmp_path / "repo").one()
    assert outcome.state == "failed"
    assert "not an ELF file" in str(outcome.error)
    assert (stored("ac"), stored("cas")) == ([], [])


# --- row 20: a source that is edited while it compiles


def test_a_header_edited_in_the_middle_of_the_compile_is_not_in_what_is_kept(
    tmp_path: Path, sabotage: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = chain(tmp_path / "repo")
    clean = repo.one()
    expected = repo.cubin(clean.record)
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(tmp_path / "other-cache"))
    header = tmp_path / "repo" / "include" / "deep" / "third.cuh"
    new = CHAIN["include/deep/third.cuh"].replace("3.0f", "99.0f")
    sabotage(
        "from pathlib import Path\nfrom cuda.bindings import nvrtc\n"
        "original = nvrtc.nvrtcCompileProgram\n"
        "def edited(*arguments):\n"
        f"    Path({str(header)!r}).write_text({new!r})\n"
        "    return original(*arguments)\n"
        "nvrtc.nvrtcCompileProgram = edited\n"
    )
    outcome = repo.one()
    monkeypatch.delenv("PYTHONPATH")
    assert header.read_text() == new
    assert (outcome.state, outcome.key) == ("compiled", clean.key)
    assert repo.cubin(outcome.record) == expected
    after = repo.one()
    assert after.state == "compiled"
    assert after.key != clean.key
    assert repo.cubin(after.record) != expected


def test_a_header_edited_between_hash_and_compile_is_an_error(tmp_path: Path) -> None:
    repo = chain(tmp_path / "repo")
    settings = load_settings(repo.root)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    job = Job(settings.units[0], Target("sm_90a"), repo.root, settings.python_path, scratch)
    derivation = CudaCompiler().derive(job)
    repo.write({"kernels/first.cuh": CHAIN["kernels/first.cuh"] + "//\n"})
    with pytest.raises(CompileError, match=r"kernels/first\.cuh` changed"):
        CudaCompiler().compile(job, derivation)


# --- row 25: names and numbers of files


def test_long_names_and_many_kernels_make_few_short_paths(tmp_path: Path) -> None:
    long = "k" + "n" * 299
    files, tables = {}, {}
    for number in range(20):
        name = f"{long}{number}"
        files[f"k{number}.cu"] = SAXPY.replace("saxpy", name)
        tables[f"u{number}"] = f'source = "k{number}.cu"\nnames = ["{name}"]'
    repo = make(tmp_path / "repo", files, tables)
    result = repo.build()
    assert {one.state for one in result.outcomes} == {"compiled"}
    assert all(one.record and long in next(iter(one.record.kernels)) for one in result.outcomes)
    root = Path(os.environ["MAX_BUILD_CACHE_DIR"])
    assert (len(stored("ac")), len(stored("cas"))) == (20, 20)
    assert max(len(str(path.relative_to(root))) for path in root.rglob("*")) <= 90


def test_each_unit_and_target_counts_once_however_often_it_is_looked_up(tmp_path: Path) -> None:
    repo = make(tmp_path, {"a.cu": SAXPY}, {"saxpy": 'source = "a.cu"'})
    repo.configure({"saxpy": 'source = "a.cu"'}, targets='["sm_80", "sm_90a"]')
    counted = []
    settings = load_settings(repo.root)
    for _ in range(2):
        with open_cache(settings.cache) as cache:
            build(settings, cache)
            counted.append((sum(cache.stats.hits.values()), sum(cache.stats.misses.values())))
    assert counted == [(0, 2), (2, 0)]
