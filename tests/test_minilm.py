"""The example model on its real weights: right, small, and the same for everybody."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from max_build.compilers.elf_headers import CUDA
from support import ROOT, max_build, run

EXAMPLE = ROOT / "examples" / "minilm"


def test_embeddings_agree_with_an_independent_forward_pass(minilm: Path) -> None:
    """The example's own tests: 1e-5 absolute against float64 NumPy, through the pytest plugin."""
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=EXAMPLE,
        env={"MAX_BUILD_CACHE_DIR": minilm, "PYTHONPATH": EXAMPLE / "src"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_artifact_is_small_and_holds_no_weights(minilm: Path) -> None:
    done = max_build("show", "encoder", "--json", cwd=EXAMPLE, env={"MAX_BUILD_CACHE_DIR": minilm})
    (shown,) = json.loads(done.stdout)
    (artifact,) = [blob for blob in shown["blobs"] if blob["role"] == "mef"]
    assert artifact["size"] < 5_000_000
    assert len(shown["weights"]) == 101
    assert {image["arch"] for image in artifact["images"]} == {"x86-64"}


def test_a_fixture_without_its_artifact_names_the_command_and_compiles_nothing(
    tmp_path: Path,
) -> None:
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"],
        cwd=EXAMPLE,
        env={"PYTHONPATH": EXAMPLE / "src"},
    )
    assert done.returncode == 1
    assert "`encoder` × `cpu` is not in the cache" in done.stdout
    assert "run `max-build build encoder --target cpu`" in done.stdout
    assert not list((tmp_path / "cache").glob("cas/*/*"))


@pytest.mark.slow
def test_every_kernel_for_hopper_is_hoppers(minilm: Path, tmp_path: Path) -> None:
    env = {"MAX_BUILD_CACHE_DIR": tmp_path / "cache"}
    shutil.copytree(minilm, tmp_path / "cache")
    done = max_build("build", "-t", "sm_90a", cwd=EXAMPLE, env=env)
    assert done.returncode == 0, done.stderr
    shown = max_build("show", "encoder", "-t", "sm_90a", "--json", cwd=EXAMPLE, env=env)
    (artifact,) = [blob for blob in json.loads(shown.stdout)[0]["blobs"] if blob["role"] == "mef"]
    device = [image["arch"] for image in artifact["images"] if image["machine"] == CUDA]
    assert len(device) > 50
    assert set(device) == {"sm_90a"}
