"""Every frontend builds and installs the toy repo in environments of its own.

Their build environments have no MAX: what was compiled once, in this one, is all they need. The
wheels are then loaded in a clean environment that has never seen the cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from max_build.compilers.max_graph import DISTRIBUTIONS
from support import PYPROJECT, ROOT, run, write_project

PROGRAM = """
import max_build, numpy
(out,) = max_build.load("toy", weights={weights!r}, device="cpu")(numpy.ones((1, 4), numpy.float32))
print(out.to_numpy().tolist())
"""


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of max-build itself."""
    folder = tmp_path_factory.mktemp("product")
    done = run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def toy(root: Path, product: Path) -> Path:
    """The toy repo, with build requirements that can be installed and the compiler pinned."""
    # A present distribution has to be the one that the recipe saw: numpy comes with max-build.
    requires = f'"hatchling", "max-build @ {product.as_uri()}", "numpy=={np.__version__}"'
    pins = "\n".join(
        f'{name} = "{metadata.version(name)}"' for name in (*DISTRIBUTIONS, "typing-extensions")
    )
    text = PYPROJECT.replace('"hatchling", "max-build"', requires)
    return write_project(root, pyproject=f"{text}\n[tool.max-build.toolchain]\n{pins}\n")


@pytest.fixture
def repo(tmp_path: Path, product: Path, clean: Path, toy_cache: Path) -> Path:
    """The toy repo, whose graph a colleague with MAX has put into the cache, recipe and all."""
    root = toy(tmp_path / "toy", product)
    done = run([str(clean / "bin" / "max-build"), "build", "--require-hit"], cwd=root)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, product: Path) -> Path:
    """An environment with max-build and MAX, and nothing of this one."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    done = pip(folder, "install", f"max-build[max] @ {product.as_uri()}")
    assert done.returncode == 0, done.stderr
    return folder


def pip(environment: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    return run([str(part) for part in (*command, *arguments)], cwd=environment)


def loads(environment: Path, tmp_path: Path) -> str:
    """What the installed toy package computes, with a cache that knows nothing of it."""
    weights = tmp_path / "weights.safetensors"
    save_file({"bias": np.array([10, 20, 30, 40], np.float32)}, weights)
    program = PROGRAM.format(weights=str(weights))
    done = run(
        [str(environment / "bin" / "python"), "-c", program],
        cwd=tmp_path,
        env={"MAX_BUILD_CACHE_DIR": tmp_path / "unknown"},
    )
    return done.stdout or done.stderr


BUILDS = {
    "hatch": [sys.executable, "-m", "hatch", "build", "-t", "wheel"],
    "build": [sys.executable, "-m", "build"],
    "uv": [sys.executable, "-m", "uv", "build"],
}


@pytest.mark.parametrize("frontend", BUILDS)
def test_build_frontends(frontend: str, repo: Path, clean: Path, tmp_path: Path) -> None:
    done = run(BUILDS[frontend], cwd=repo, env={"HATCH_DATA_DIR": tmp_path / "hatch"})
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (repo / "dist").glob("*.whl")
    assert wheel.name == "toy-1.0-py3-none-manylinux_2_34_x86_64.whl"
    installed = pip(clean, "install", "--force-reinstall", "--no-deps", wheel)
    assert installed.returncode == 0, installed.stderr
    assert loads(clean, tmp_path) == "[[11.0, 22.0, 33.0, 44.0]]\n"


def test_the_wheel_is_the_same_where_max_is_and_where_it_is_not(
    repo: Path, clean: Path, tmp_path: Path
) -> None:
    built = {}
    for name, command in {
        "with": [str(clean / "bin" / "python"), "-m", "hatchling", "build", "-t", "wheel", "-d"],
        "without": [sys.executable, "-m", "uv", "build", "--wheel", "-o"],
    }.items():
        done = run([*command, str(tmp_path / name)], cwd=repo)
        assert done.returncode == 0, done.stdout + done.stderr
        (wheel,) = (tmp_path / name).glob("*.whl")
        built[name] = wheel.read_bytes()
    assert built["with"] == built["without"]


def test_pip_install(repo: Path, clean: Path, tmp_path: Path) -> None:
    done = pip(clean, "install", "--force-reinstall", "--no-deps", repo)
    assert done.returncode == 0, done.stdout + done.stderr
    assert loads(clean, tmp_path) == "[[11.0, 22.0, 33.0, 44.0]]\n"


def test_pip_install_editable(repo: Path, clean: Path, tmp_path: Path) -> None:
    done = pip(clean, "install", "--force-reinstall", "--no-deps", "--editable", repo)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is in no tier of the cache" in loads(clean, tmp_path)
    shutil.copytree(tmp_path / "cache", tmp_path / "unknown", dirs_exist_ok=True)
    assert loads(clean, tmp_path) == "[[11.0, 22.0, 33.0, 44.0]]\n"
    pip(clean, "uninstall", "--yes", "toy")


def test_a_miss_without_the_compiler_says_what_to_install(repo: Path, clean: Path) -> None:
    graph = repo / "src" / "toy" / "graph.py"
    graph.write_text(graph.read_text().replace("4.0]", "8.0]"))
    done = run([sys.executable, "-m", "uv", "build", "--wheel"], cwd=repo)
    assert done.returncode != 0
    assert "MAX is needed to build this graph" in done.stderr
    assert "install the extra `max-build[max]`" in done.stderr
