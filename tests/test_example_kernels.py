"""The example repo of kernels, as its users meet it: build, wheel, tests, load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from max_build.compilers.cubin import read_cubin
from max_build.runtime.kernels import load_kernels

for module in ("cuda.core", "triton"):
    pytest.importorskip(module, reason=f"`{module}` is not installed")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "kernels"


def python(*arguments: str, cwd: Path, **variables: object) -> str:
    """Run Python in `cwd`; what it said."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A wheel from each of two checkouts, with a cache each."""
    base = tmp_path_factory.mktemp("example")
    found = []
    for name in ("one", "another/place"):
        checkout = base / name / "kernels"
        shutil.copytree(EXAMPLE, checkout)
        said = python(
            *("-m", "hatchling", "build", "-t", "wheel", "-d", "dist"),
            cwd=checkout,
            MAX_BUILD_CACHE_DIR=base / name / "cache",
        )
        assert "3 units × 3 targets: 9 compiled" in said
        found += (checkout / "dist").glob("*.whl")
    return found


def test_two_checkouts_give_the_same_wheel_for_every_platform(wheels: list[Path]) -> None:
    assert {wheel.name for wheel in wheels} == {"rowops-0.1.0-py3-none-any.whl"}
    one, other = (
        {name: archive.read(name) for name in archive.namelist()}
        for archive in map(zipfile.ZipFile, wheels)
    )
    assert one == other
    cubins = [read_cubin(data) for name, data in one.items() if name.endswith(".cubin")]
    assert {cubin.arch for cubin in cubins} == {"sm_80", "sm_90a", "sm_120a"}
    assert len(cubins) == 3 * 4
    assert not any("ttir" in name or name.endswith(".ir") for name in one)


def test_the_wheel_loads_for_each_device(wheels: list[Path], tmp_path: Path) -> None:
    shutil.unpack_archive(wheels[0], tmp_path, "zip")
    folder = tmp_path / "rowops" / "_max_build"
    chosen = {
        device: load_kernels(folder, "reduce", device=device)
        for device in ("sm_80", "sm_89", "sm_90", "sm_120", "sm_121")
    }
    assert {device: (one.target, one.role) for device, one in chosen.items()} == {
        "sm_80": ("sm_80", "cubin"),
        "sm_89": ("sm_80", "cubin"),
        "sm_90": ("sm_90a", "cubin"),
        "sm_120": ("sm_120a", "cubin"),
        "sm_121": ("sm_80", "ptx"),
    }


def test_the_examples_own_tests_pass_from_the_cache(wheels: list[Path]) -> None:
    checkout = wheels[0].parents[1]
    said = python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        cwd=checkout,
        MAX_BUILD_CACHE_DIR=checkout.parent / "cache",
        PYTHONPATH=checkout / "src",
    )
    assert "passed" in said


def test_the_repo_is_left_as_it_was(wheels: list[Path]) -> None:
    checkout = wheels[1].parents[1]
    mine = {str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file()}
    theirs = {str(path.relative_to(EXAMPLE)) for path in EXAMPLE.rglob("*") if path.is_file()}
    assert mine - theirs == {"dist/rowops-0.1.0-py3-none-any.whl"}
