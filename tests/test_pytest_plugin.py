"""The pytest plugin, in pytest runs of their own over a repo with one cheap kernel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import run

PYPROJECT = """
[project]
name = "rows"
[tool.max-build]
targets = ["sm_80"]
[tool.max-build.kernels.scale]
source = "scale.cu"
"""
SOURCE = """
extern "C" __global__ void scale(float* x, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}
"""
TESTS = """
import pytest

def test_artifact(max_build_artifact):
    found = max_build_artifact("scale", target="sm_80")
    assert found.cubins()[0].read_bytes()[:4] == b"\\x7fELF"

def test_kernels(max_build_kernels):
    assert list(max_build_kernels("scale", "sm_80")) == ["scale"]
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    root = tmp_path / "rows"
    root.mkdir()
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "scale.cu").write_text(SOURCE)
    (root / "test_rows.py").write_text(TESTS)
    return root


def pytest_in(root: Path, *arguments: str, **env: str | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return run(command, cwd=root, env={"CI": None, **env})


def test_a_miss_fails_the_test_with_the_command_and_compiles_nothing(rows: Path) -> None:
    done = pytest_in(rows)
    assert done.returncode == 1
    assert "run `max-build build scale --target sm_80`, or pytest --max-build-compile" in (
        done.stdout
    )
    assert "max-build: 2 missed" in done.stdout
    # the test's line and what is wrong, and nothing of max-build's source
    assert "max_build/" not in done.stdout.replace("max_build/errors", "")
    assert len(done.stdout.splitlines()) < 50


def test_what_the_project_does_not_declare_is_named(rows: Path) -> None:
    (rows / "test_rows.py").write_text(
        "def test_target(max_build_artifact): max_build_artifact('scale', 'sm_9x')\n"
        "def test_kind(max_build_artifact): max_build_artifact('scale', 'cpu')\n"
        "def test_unit(max_build_artifact): max_build_artifact('none')\n"
    )
    done = pytest_in(rows)
    assert "`tool.max-build.kernels.scale`: `sm_9x` is an unknown target" in done.stdout
    assert "`tool.max-build.kernels.scale`: `cpu`" in done.stdout
    assert "no unit `none` in [tool.max-build]" in done.stdout
    assert "command line" not in done.stdout
    assert "max_build/" not in done.stdout


def test_asked_to_it_compiles_once_and_later_runs_hit(rows: Path) -> None:
    first = pytest_in(rows, "--max-build-compile")
    assert first.returncode == 0, first.stdout
    assert re.search(r"max-build: 1 compiled in \d+\.\d s", first.stdout)
    again = pytest_in(rows)
    assert again.returncode == 0, again.stdout
    assert "max-build: 1 cached" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "env"),
    [(["--max-build-require-hit"], {}), ([], {"CI": "true"})],
    ids=["option", "in-ci"],
)
def test_where_hits_are_required_nothing_compiles_though_asked_to(
    rows: Path, arguments: list[str], env: dict[str, str | None]
) -> None:
    done = pytest_in(rows, "--max-build-compile", *arguments, **env)
    assert done.returncode == 1
    assert "max-build: 2 missed" in done.stdout
    assert "--target sm_80`, or pytest --no-max-build-require-hit\n" in done.stdout
    neither = pytest_in(rows, *arguments, **env)
    assert "or pytest --max-build-compile --no-max-build-require-hit\n" in neither.stdout
    lifted = pytest_in(rows, "--max-build-compile", "--no-max-build-require-hit", **env)
    assert lifted.returncode == 0, lifted.stdout


def test_another_cache_directory(rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    done = pytest_in(rows, "--max-build-compile", "--max-build-cache", str(folder))
    assert done.returncode == 0, done.stdout
    assert list(folder.glob("ac/*/*"))
    assert not list((tmp_path / "cache").glob("ac/*/*"))


def test_eight_xdist_workers_on_a_cold_cache_compile_once(rows: Path, tmp_path: Path) -> None:
    for n in range(7):
        (rows / f"test_more{n}.py").write_text(TESTS)
    done = pytest_in(rows, "--max-build-compile", "-n", "8", "--dist", "loadfile")
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("max-build: ")]
    counts = {state: int(n) for n, state in re.findall(r"(\d+) (cached|compiled)", line)}
    assert counts["compiled"] == 1, line
    records = [
        one for one in (tmp_path / "cache" / "ac").glob("*/*") if b'"blobs"' in one.read_bytes()
    ]
    assert len(records) == 1


def test_a_marked_test_is_skipped_with_the_reason_where_the_machine_cannot_run_it(
    rows: Path,
) -> None:
    (rows / "test_rows.py").write_text(
        "import pytest\n"
        "@pytest.mark.max_build(target='gfx90a')\n"
        "def test_amd(): raise RuntimeError\n"
        "@pytest.mark.max_build(target=['gfx90a', 'cpu'])\n"
        "def test_either(): pass\n"
        "@pytest.mark.max_build(target='sm_9x')\n"
        "def test_wrong(): pass\n"
    )
    done = pytest_in(rows, "-rs", "--strict-markers")
    assert "1 passed, 1 skipped, 1 error" in done.stdout
    assert "`gfx90a`: it needs a GPU" in done.stdout
    assert "`sm_9x` is an unknown target" in done.stdout


def test_a_cache_of_the_tests_own(rows: Path, tmp_path: Path) -> None:
    (rows / "test_rows.py").write_text(
        "import os\n"
        "def test_it(max_build_cache, tmp_path):\n"
        "    assert os.environ['MAX_BUILD_CACHE_DIR'].startswith(str(tmp_path))\n"
        "    assert str(max_build_cache.root) == os.environ['MAX_BUILD_CACHE_DIR']\n"
        "    assert max_build_cache.lookup('0' * 64).reason == 'absent'\n"
    )
    done = pytest_in(rows)
    assert done.returncode == 0, done.stdout
    assert "max-build:" not in done.stdout


def test_loading_the_plugin_imports_nothing_heavy(rows: Path) -> None:
    (rows / "test_rows.py").write_text(
        "import json, sys\n"
        "def test_it():\n"
        "    ours = sorted(name for name in sys.modules if name.startswith('max_build'))\n"
        "    open('modules.json', 'w').write(json.dumps(ours))\n"
    )
    assert pytest_in(rows).returncode == 0
    loaded = json.loads((rows / "modules.json").read_text())
    assert loaded == ["max_build", "max_build.pytest_plugin"]
