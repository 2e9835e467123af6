"""What tests of several folders use: the toy repo's text, and commands run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

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


def max_build(
    *arguments: str, cwd: Path, env: Mapping[str, object] | None = None, timeout: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, and return what it said."""
    command = [sys.executable, "-m", "max_build"]
    return run([*command, *arguments], cwd=cwd, env=env, timeout=timeout)


def run(
    command: list[str],
    *,
    cwd: Path,
    env: Mapping[str, object] | None = None,
    timeout: float = 900,
) -> subprocess.CompletedProcess[str]:
    """Run a command; variables given as None are removed."""
    # MAX, imported by an earlier test, tells its children where this environment's copy lies, and
    # hatch that they are in one of its environments.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HATCH_", "MODULAR_M"))}
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
