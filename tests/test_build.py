"""From a model repo to its artifacts, through the command line, with the real MAX compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from max_build.compilers.elf_headers import CUDA
from support import GRAPH, PYPROJECT, max_build, run, write_project


def outcomes(text: str) -> dict[str, str]:
    """Target → state, of `max-build … --json`."""
    found = json.loads(text)
    listed = found["outcomes"] if isinstance(found, dict) else found
    return {one["target"]: one["state"] for one in listed}


def test_a_second_build_compiles_nothing(project: Path, toy_cache: Path) -> None:
    done = max_build("build", "-t", "cpu", "-t", "sm_90a", "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    assert outcomes(done.stdout) == {"cpu": "cached", "sm_90a": "cached"}
    assert "1 unit × 2 targets: 2 cached in" in done.stderr


def test_status_says_what_would_hit_and_what_would_compile(project: Path, toy_cache: Path) -> None:
    done = max_build("status", "-t", "cpu", "-t", "sm_80", cwd=project)
    assert done.returncode == 0, done.stderr
    hit, miss = done.stdout.splitlines()
    assert hit.split() == ["affine", "cpu", "hit", "local"]
    assert miss.startswith("affine  sm_80     compile   ")
    assert "target" in miss
    assert not any(one.name.endswith(".mef") for one in project.rglob("*"))


def test_show_tells_signature_sizes_and_architecture(project: Path, toy_cache: Path) -> None:
    done = max_build("show", "affine", "-t", "sm_90a", "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(done.stdout)
    assert shown["weights"] == [{"device": "cpu", "dtype": "float32", "name": "bias", "shape": [4]}]
    assert shown["inputs"][0]["shape"] == ["n", 4]
    (artifact,) = [blob for blob in shown["blobs"] if blob["role"] == "mef"]
    device = [image for image in artifact["images"] if image["machine"] == CUDA]
    assert device
    assert {image["arch"] for image in device} == {"sm_90a"}
    plain = max_build("show", "affine", "-t", "sm_90a", cwd=project)
    assert "registers" in plain.stdout
    missing = max_build("show", "affine", "-t", "sm_80", cwd=project)
    assert missing.returncode == 1
    assert "run `max-build build`" in missing.stderr


def test_an_artifact_of_one_checkout_serves_another_path_home_and_user(
    toy_cache: Path, tmp_path: Path
) -> None:
    root = write_project(tmp_path / "another" / "checkout")
    moved = tmp_path / "moved-cache"
    shutil.move(toy_cache, moved)
    done = max_build(
        "build",
        "--require-hit",
        cwd=root,
        env={
            "MAX_BUILD_CACHE_DIR": moved,
            "HOME": tmp_path / "home",
            "USER": "another",
            "LOGNAME": "another",
        },
    )
    assert done.returncode == 0, done.stderr


def test_home_unset(project: Path, toy_cache: Path) -> None:
    done = max_build("build", "--require-hit", cwd=project, env={"HOME": None, "USER": None})
    assert done.returncode == 0, done.stderr


def test_require_hit_compiles_nothing_and_says_what_changed(project: Path, toy_cache: Path) -> None:
    write_project(project, graph=GRAPH.replace("4.0]", "5.0]"))
    done = max_build("build", "--require-hit", "--json", cwd=project)
    assert done.returncode == 1
    assert outcomes(done.stdout) == {"cpu": "missed"}
    assert "graph changed" in done.stderr
    assert not (project / "dist").exists()


def test_one_units_fault_leaves_the_others_alone(project: Path, toy_cache: Path) -> None:
    (project / "src" / "toy" / "broken.py").write_text("def build(target):\n    raise OSError\n")
    write_project(
        project,
        pyproject=f'{PYPROJECT}\n[tool.max-build.graphs.broken]\nentry = "toy.broken:build"\n',
    )
    done = max_build("build", "--json", cwd=project)
    assert done.returncode == 1
    states = {one["unit"]: one["state"] for one in json.loads(done.stdout)["outcomes"]}
    assert states == {"affine": "cached", "broken": "failed"}
    assert "Traceback" not in done.stderr


def test_a_compile_past_its_limit_is_given_up(project: Path) -> None:
    graph = GRAPH.replace("SCALE", "import time; time.sleep(60)\nSCALE", 1)
    write_project(project, graph=graph)
    done = max_build("build", cwd=project, env={"MAX_BUILD_COMPILE_TIMEOUT": "2"})
    assert done.returncode == 1
    assert "`affine` × `cpu` failed" in done.stderr
    assert "gave up after 2 s" in done.stderr
    assert "MAX_BUILD_COMPILE_TIMEOUT" in done.stderr


def test_a_target_that_no_compiler_knows(project: Path) -> None:
    done = max_build("build", "-t", "sm_91", cwd=project)
    assert done.returncode == 1
    assert "`sm_91` is an unknown target" in done.stderr
    assert "did you mean `sm_90`" in done.stderr


def test_usage_errors_leave_with_2(project: Path) -> None:
    assert max_build("biuld", cwd=project).returncode == 2
    assert max_build(cwd=project).returncode == 2


def test_a_damaged_blob_is_a_miss_that_heals(
    project: Path, toy_cache: Path, compiled: Path
) -> None:
    blobs = [one for one in (toy_cache / "cas").rglob("*") if one.is_file()]
    for blob in blobs:
        data = bytearray(blob.read_bytes())
        data[len(data) // 2] ^= 1
        blob.chmod(0o644)
        blob.write_bytes(data)
    done = max_build("build", "--require-hit", "--json", cwd=project)
    assert done.returncode == 1
    assert outcomes(done.stdout) == {"cpu": "missed"}
    for blob in (compiled / "cas").rglob("*"):
        if blob.is_file():
            target = toy_cache / blob.relative_to(compiled)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(blob, target)
    for entry in (compiled / "ac").rglob("*"):
        if entry.is_file():
            shutil.copy(entry, toy_cache / entry.relative_to(compiled))
    assert max_build("build", "--require-hit", cwd=project).returncode == 0


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="needs setpriv")
def test_a_read_only_cache_hits_and_says_so(project: Path, toy_cache: Path, tmp_path: Path) -> None:
    subprocess.run(["chmod", "-R", "a-w,a+rX", str(toy_cache)], check=True)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    command = [sys.executable, "-m", "max_build"]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
    done = run([*command, "build", "--require-hit"], cwd=project)
    subprocess.run(["chmod", "-R", "u+w", str(toy_cache)], check=True)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_costs_the_cache_and_not_the_build(
    project: Path, compiled: Path, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("64k")
    done = max_build("build", "--json", cwd=project, env={"MAX_BUILD_CACHE_DIR": disk / "cache"})
    assert done.returncode == 0, done.stderr
    assert outcomes(done.stdout) == {"cpu": "compiled"}
    assert "warning" in done.stderr


def test_two_builds_at_once_compile_once(project: Path, tmp_path: Path) -> None:
    write_project(project, graph=GRAPH.replace("4.0]", "6.0]"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"]
    builds = [
        subprocess.Popen(
            [*command, str(tmp_path / f"dist{n}")],
            cwd=project,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for n in range(2)
    ]
    told = sorted(build.communicate(timeout=600)[0] for build in builds)
    assert [build.returncode for build in builds] == [0, 0], told
    assert sum(": 1 compiled in" in text for text in told) == 1, told
    assert sum(": 1 cached in" in text for text in told) == 1, told
