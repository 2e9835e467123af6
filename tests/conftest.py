"""What every test shares: a cache of its own, small model repos, and graphs compiled once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PYPROJECT = """
[build-system]
requires = ["hatchling", "max-build"]
build-backend = "hatchling.build"

[project]
name = "toy"
version = "1.0"

[tool.hatch.build.targets.wheel]
packages = ["src/toy"]

[tool.hatch.build.targets.wheel.hooks.max-build]

[tool.max-build]
targets = ["cpu"]

[tool.max-build.graphs.affine]
entry = "toy.graph:build"
weights = "bias.safetensors"
"""

GRAPH = """
import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, Weight, ops

SCALE = [1.0, 2.0, 3.0, 4.0]


def build(target):
    device = DeviceRef.CPU() if target.is_cpu else DeviceRef.GPU()
    with Graph("affine", input_types=[TensorType(DType.float32, ["n", 4], device)]) as graph:
        x = graph.inputs[0].tensor
        scale = ops.constant(np.array(SCALE, np.float32), DType.float32, device=DeviceRef.CPU())
        bias = Weight("bias", DType.float32, [4], device)
        graph.output(x * scale.to(device) + bias)
    return graph
"""


def write_project(root: Path, **changes: str) -> Path:
    """Write the toy repo at `root`; `changes` replace its `pyproject` or `graph` text."""
    package = root / "src" / "toy"
    package.mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").write_text(changes.get("pyproject", PYPROJECT))
    (package / "__init__.py").write_text("")
    (package / "graph.py").write_text(textwrap.dedent(changes.get("graph", GRAPH)))
    return root


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's cache, settings and variables out of every test."""
    for name in [name for name in os.environ if name.startswith("MAX_BUILD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The toy repo: one graph, `x * scale + bias`, for the CPU."""
    return write_project(tmp_path / "toy")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory in which the toy graph is compiled for `cpu` and `sm_90a`.

    Use a copy of it (`toy_cache`): this one is shared by the whole session.
    """
    base = tmp_path_factory.mktemp("compiled")
    root = write_project(base / "toy")
    done = max_build(
        "build", "-t", "cpu", "-t", "sm_90a", cwd=root, env={"MAX_BUILD_CACHE_DIR": base / "cache"}
    )
    assert done.returncode == 0, done.stderr
    return base / "cache"


@pytest.fixture
def toy_cache(compiled: Path, tmp_path: Path) -> Path:
    """This test's own cache (`MAX_BUILD_CACHE_DIR`), with the toy graph in it."""
    target = tmp_path / "cache"
    shutil.copytree(compiled, target, dirs_exist_ok=True)
    return target


def max_build(
    *arguments: str, cwd: Path, env: Mapping[str, object] | None = None, timeout: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run the console script as a user does, and return what it said."""
    command = [sys.executable, "-c", "import sys; from max_build.cli import main; sys.exit(main())"]
    return run([*command, *arguments], cwd=cwd, env=env, timeout=timeout)


def run(
    command: list[str],
    *,
    cwd: Path,
    env: Mapping[str, object] | None = None,
    timeout: float = 900,
) -> subprocess.CompletedProcess[str]:
    """Run a command; variables given as None are removed."""
    environment = dict(os.environ)
    for name, value in (env or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = str(value)
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=timeout,
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of a given size (`64k`) below the test's directory; needs root."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
            pytest.skip("a tmpfs cannot be mounted here (needs root)")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=False)


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory in which `examples/minilm` is compiled for `cpu`."""
    cache = tmp_path_factory.mktemp("minilm") / "cache"
    done = max_build("build", cwd=ROOT / "examples" / "minilm", env={"MAX_BUILD_CACHE_DIR": cache})
    assert done.returncode == 0, done.stderr
    return cache
