"""The private tree: what was hashed and nothing else, under names that are the same everywhere."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from max_build.compilers.cuda_libraries import NVRTC
from max_build.compilers.files import Disk
from max_build.compilers.includes import Closure, Layout, resolve
from max_build.compilers.nvrtc import compile_cubin, unopened_headers
from max_build.compilers.tree import CANONICAL, materialise
from max_build.errors import CompileError, ToolchainError

FILES = {
    "kernels/sum.cu": """
        #include "detail/../op.h"
        #include <shape.h>
        extern "C" __global__ void sum(float *x, int n) {
            float all = 0;
            for (int i = 0; i < n; i++) all = combine(all, x[i]);
            x[0] = all * WIDTH + sizeof(__FILE__);
        }
    """,
    "kernels/detail/unused.h": "",
    "kernels/op.h": '#pragma once\n#include "../common/float.h"\n#include "same.h"\n',
    "common/float.h": "__device__ inline float combine(float a, float b) { return a + b; }\n",
    "include/shape.h": "#pragma once\n#define WIDTH 4\n#include <cuda_like.h>\n",
}


@pytest.fixture(scope="module", autouse=True)
def _nvrtc() -> None:
    try:
        NVRTC.load()
    except ToolchainError as error:
        pytest.skip(f"needs NVRTC: {error.message}")


def checkout(root: Path) -> tuple[Path, Path]:
    """A project, and an SDK that lies elsewhere."""
    project, sdk = root / "project", root / "sdk" / "include"
    for name, text in FILES.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (project / "kernels/same.h").hardlink_to(project / "kernels/op.h")
    sdk.mkdir(parents=True)
    (sdk / "cuda_like.h").write_text("__device__ inline float unused(float x) { return x; }\n")
    return project, sdk


def resolved(project: Path, sdk: Path) -> tuple[Closure, Layout]:
    layout = Layout.of(str(project), ("include", str(sdk)))
    return resolve(str(project / "kernels/sum.cu"), layout, Disk()), layout


def build(root: str, args: list[str], answers: multiprocessing.SimpleQueue) -> None:
    """Compile in a process of its own, whose working directory is the tree."""
    project, sdk = checkout(Path(root))
    closure, layout = resolved(project, sdk)
    assert closure.problems == ()
    tree = materialise(closure, layout, Disk(), Path(root) / "tree")
    try:
        with tree.entered():
            compiled = compile_cubin(tree.source, tree.name, "sm_90", [*tree.include_args, *args])
        answers.put((closure.files, compiled.cubin))
    except CompileError as error:
        answers.put(str(error))


def compiled_in(root: Path, *args: str) -> tuple[object, bytes]:
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=build, args=(str(root), list(args), answers))
    child.start()
    answer = answers.get()
    child.join()
    assert not isinstance(answer, str), answer
    return answer


@pytest.mark.parametrize("args", [(), ("-lineinfo",), ("-G",)])
def test_two_checkouts_give_the_same_key_and_the_same_bytes(
    args: tuple[str, ...], tmp_path: Path
) -> None:
    one = compiled_in(tmp_path / "one", *args)
    time.sleep(1.1)  # the times of files reach line information in seconds
    two = compiled_in(tmp_path / "two" / "deeper", *args)
    assert one == two
    assert str(tmp_path).encode() not in one[1]
    if args:
        assert b"/proc/self/fd/250/src/" in one[1]


def test_the_tree_holds_the_closure_and_nothing_else(tmp_path: Path) -> None:
    project, sdk = checkout(tmp_path)
    (sdk / "unrelated.h").write_text("")
    closure, layout = resolved(project, sdk)
    tree = materialise(closure, layout, Disk(), tmp_path / "tree")
    files = {str(path.relative_to(tree.root)) for path in tree.root.rglob("*") if path.is_file()}
    assert files == {header.path for header in closure.files}
    assert files == {
        "include-0/cuda_like.h", "src/common/float.h", "src/include/shape.h",
        "src/kernels/op.h", "src/kernels/same.h", "src/kernels/sum.cu",
    }  # fmt: skip
    assert (tree.root / "src/kernels/detail").is_dir(), "`detail/..` passes through it"
    assert tree.source == (project / "kernels/sum.cu").read_bytes()
    assert tree.name == "/proc/self/fd/250/src/kernels/sum.cu"
    assert tree.include_args == (
        "-I/proc/self/fd/250/src/include",
        "-I/proc/self/fd/250/include-0",
    )


def test_one_file_by_two_names_is_one_file_in_the_tree(tmp_path: Path) -> None:
    closure, layout = resolved(*checkout(tmp_path))
    tree = materialise(closure, layout, Disk(), tmp_path / "tree")
    same, op = (os.stat(tree.root / "src/kernels" / name) for name in ("same.h", "op.h"))
    assert same.st_ino == op.st_ino
    assert op.st_ino != os.stat(layout.disk_path("src/kernels/op.h")).st_ino


def test_what_entering_changes_is_put_back(tmp_path: Path) -> None:
    closure, layout = resolved(*checkout(tmp_path))
    tree = materialise(closure, layout, Disk(), tmp_path / "tree")
    before = os.getcwd()
    with tree.entered():
        assert os.getcwd() == "/"
        assert Path(tree.name).read_bytes() == tree.source
        with pytest.raises(ToolchainError, match="is open in this process"), tree.entered():
            pass
        assert Path(tree.name).exists()
    assert os.getcwd() == before
    assert not Path(tree.name).exists()


@pytest.mark.parametrize("name", ["kernels/sum.cu", "common/float.h"])
def test_an_edit_after_hashing_is_not_compiled(name: str, tmp_path: Path) -> None:
    project, sdk = checkout(tmp_path)
    closure, layout = resolved(project, sdk)
    with (project / name).open("a") as file:
        file.write("// edited\n")
    with pytest.raises(CompileError, match=f"`src/{name}` changed while the unit was being built"):
        materialise(closure, layout, Disk(), tmp_path / "tree")


def test_a_header_the_closure_lacks_fails_loudly(tmp_path: Path) -> None:
    project, sdk = checkout(tmp_path)
    closure, layout = resolved(project, sdk)
    missed = Closure(
        source=closure.source,
        include_dirs=closure.include_dirs,
        files=tuple(h for h in closure.files if not h.path.endswith("float.h")),
        absent=(), detours=closure.detours, problems=(),
    )  # fmt: skip
    tree = materialise(missed, layout, Disk(), tmp_path / "tree")
    with pytest.raises(CompileError) as caught, tree.entered():
        compile_cubin(tree.source, tree.name, "sm_90", tree.include_args)
    assert unopened_headers(str(caught.value)) == ("../common/float.h",)
    assert f"{CANONICAL}/src/kernels/detail/../op.h(2)" in str(caught.value)
