"""The example language model on its real weights: right, small, and speaking from its wheel.

Slow: the whole model is compiled once, which takes minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from support import ROOT, max_build, run

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "smollm2"


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory in which `examples/smollm2` is compiled for `cpu`."""
    cache = tmp_path_factory.mktemp("smollm2") / "cache"
    done = max_build("build", cwd=EXAMPLE, env={"MAX_BUILD_CACHE_DIR": cache}, timeout=3600)
    assert done.returncode == 0, done.stderr
    return cache


def test_it_agrees_with_an_independent_forward_pass(smollm2: Path) -> None:
    """The example's own tests: logits to 1e-3 of float64 NumPy, and the same greedy tokens."""
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=EXAMPLE,
        env={"MAX_BUILD_CACHE_DIR": smollm2, "PYTHONPATH": EXAMPLE / "src"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_artifact_is_small_and_names_every_weight(smollm2: Path) -> None:
    env = {"MAX_BUILD_CACHE_DIR": smollm2}
    done = max_build("show", "decoder", "--json", cwd=EXAMPLE, env=env)
    (shown,) = json.loads(done.stdout)
    (artifact,) = [blob for blob in shown["blobs"] if blob["role"] == "mef"]
    assert artifact["size"] < 10_000_000
    # 30 layers of 9, the embedding and the last norm; none lies in a subgraph out of sight.
    assert len(shown["weights"]) == 272
    assert {one["dtype"] for one in shown["weights"]} == {"float32"}


def test_its_wheel_speaks_without_a_cache_and_without_a_compiler(
    smollm2: Path, tmp_path: Path
) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(EXAMPLE, repo, ignore=shutil.ignore_patterns("dist", "__pycache__", ".*"))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = run(build, cwd=repo, env={"MAX_BUILD_CACHE_DIR": smollm2, "MAX_BUILD_REQUIRE_HIT": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    said = run(
        [sys.executable, "-m", "smollm2", "What is the capital of France?"],
        cwd=tmp_path,
        env={"PYTHONPATH": path, "MAX_BUILD_CACHE_DIR": tmp_path / "none"},
    )
    assert said.stdout == "The capital of France is Paris.\n", said.stderr
    assert "tokens/s" in said.stderr
