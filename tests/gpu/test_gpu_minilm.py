"""MiniLM on the GPU beside the CPU: the same embeddings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from max_build.target import native

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

EMBED = """
import sys
import numpy as np
import max_build
model = max_build.load(sys.argv[1], "encoder", device=sys.argv[2], warm=True)
ids = np.array([[101, 7592, 2088, 102], [101, 7592, 102, 0]], np.int64)
(out,) = model(ids, (ids != 0).astype(np.int64))
np.save(sys.argv[3], out.to_numpy())
"""


def run(*arguments: str, cwd: Path) -> None:
    """Run Python in a process of its own."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_gpu_and_cpu_agree(
    capability: tuple[int, int], tmp_path: Path, note: Callable[[str, str], None]
) -> None:
    pytest.importorskip("max", reason="MAX is not installed")
    project = tmp_path / "minilm"
    shutil.copytree(ROOT / "examples" / "minilm", project)
    target = str(native())
    project.joinpath("pyproject.toml").write_text(
        (project / "pyproject.toml")
        .read_text()
        .replace('targets = ["cpu"]', f'targets = ["cpu", "{target}"]')
    )
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=project)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "unpacked", "zip")
    folder = tmp_path / "unpacked" / "minilm" / "_max_build"
    found = {}
    for device in ("cpu", "gpu"):
        path = tmp_path / f"{device}.npy"
        run("-c", EMBED, str(folder), device, str(path), cwd=tmp_path)
        found[device] = np.load(path)
    difference = float(np.abs(found["gpu"] - found["cpu"]).max())
    assert difference < 1e-3
    note(f"MiniLM for {target} against the CPU", f"differ by {difference:.1e} at most")
