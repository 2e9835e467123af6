"""The hook under hatchling itself: what lands in a wheel, and what never does."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from support import GRAPH, PYPROJECT, run, write_project


def hatchling(project: Path, *arguments: str, **env: object) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "hatchling", "build", *arguments], cwd=project, env=env)


def wheel_of(project: Path) -> Path:
    (wheel,) = (project / "dist").glob("*.whl")
    return wheel


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def manifest(wheel: Path) -> dict[str, object]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [
            name
            for name in archive.namelist()
            if name.endswith(".dist-info/extra_metadata/max-build/manifest.json")
        ]
        found: dict[str, object] = json.loads(archive.read(name))
        return found


def test_a_wheel_carries_the_artifacts_and_the_manifest_twice(
    project: Path, toy_cache: Path
) -> None:
    before = sorted(project.rglob("*"))
    done = hatchling(project, "-t", "wheel", MAX_BUILD_TARGETS="cpu,sm_90a")
    assert done.returncode == 0, done.stderr
    assert "max-build: 1 unit × 2 targets: 2 cached in" in done.stderr
    wheel = wheel_of(project)
    assert wheel.name == "toy-1.0-py3-none-manylinux_2_34_x86_64.whl"
    inside = names(wheel)
    assert [name for name in inside if not name.endswith(".mef")] == [
        "toy-1.0.dist-info/METADATA",
        "toy-1.0.dist-info/RECORD",
        "toy-1.0.dist-info/WHEEL",
        "toy-1.0.dist-info/extra_metadata/max-build/manifest.json",
        "toy/__init__.py",
        "toy/_max_build/manifest.json",
        "toy/graph.py",
    ]
    with zipfile.ZipFile(wheel) as archive:
        artifacts = [name for name in inside if name.endswith(".mef")]
        assert len(artifacts) == 2
        for name in artifacts:
            assert hashlib.sha256(archive.read(name)).hexdigest() == Path(name).stem
        beside = json.loads(archive.read("toy/_max_build/manifest.json"))
    assert beside == manifest(wheel)
    written = set(project.rglob("*")) - set(before)
    assert written == {project / "dist", wheel}, "the source tree was written to"


def test_the_same_source_gives_the_same_wheel(project: Path, toy_cache: Path) -> None:
    digests = set()
    for _ in range(2):
        assert hatchling(project, "-t", "wheel").returncode == 0
        digests.add(hashlib.sha256(wheel_of(project).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_manifest_holds_no_path_user_time_or_log(project: Path, toy_cache: Path) -> None:
    assert hatchling(project, "-t", "wheel").returncode == 0
    text = json.dumps(manifest(wheel_of(project)))
    assert str(project.parent) not in text
    record = manifest(wheel_of(project))["units"]["affine"]["targets"]["cpu"]  # type: ignore[index]
    assert (record["log"], record["seconds"]) == ("", 0.0)
    assert [blob["role"] for blob in record["blobs"]] == ["mef"]


def test_an_sdist_never_carries_artifacts(project: Path, toy_cache: Path) -> None:
    done = hatchling(project, "-t", "sdist")
    assert done.returncode == 0, done.stderr
    (sdist,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if "max_build" in name or ".mef" in name]
    assert "max-build:" not in done.stderr


def test_embed_false_ships_the_manifest_alone(project: Path, toy_cache: Path) -> None:
    done = hatchling(project, "-t", "wheel", MAX_BUILD_EMBED="0")
    assert done.returncode == 0, done.stderr
    wheel = wheel_of(project)
    assert wheel.name == "toy-1.0-py3-none-any.whl"
    assert not [name for name in names(wheel) if name.endswith(".mef")]
    assert manifest(wheel)["embedded"] is False


def test_a_variable_that_is_none_of_ours_is_warned_of(project: Path, toy_cache: Path) -> None:
    done = hatchling(project, "-t", "wheel", MAX_BUILD_JBOS="2")
    assert done.returncode == 0, done.stderr
    assert "environment variable `MAX_BUILD_JBOS` is unknown: did you mean" in done.stderr


def test_disabled_it_does_nothing_at_all(project: Path) -> None:
    write_project(project, graph="raise SystemExit")
    done = hatchling(project, "-t", "wheel", MAX_BUILD_DISABLE="1")
    assert done.returncode == 0, done.stderr
    assert not [name for name in names(wheel_of(project)) if "max_build" in name]


def test_wrong_settings_end_in_one_message_and_nothing_is_built(project: Path) -> None:
    write_project(project, pyproject=PYPROJECT.replace("targets =", "targest ="))
    done = hatchling(project, "-t", "wheel")
    assert done.returncode == 1
    assert "`tool.max-build.targest` is unknown: did you mean `targets`?" in done.stderr
    assert "`tool.max-build.graphs.affine` has no targets" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(project.glob("dist/*.whl"))


def test_a_unit_that_fails_ends_the_build_without_a_traceback(project: Path) -> None:
    write_project(project, graph="def build(target):\n    raise ValueError('no such layer')\n")
    done = hatchling(project, "-t", "wheel")
    assert done.returncode == 1
    assert "`affine` × `cpu` failed: `toy.graph:build` raised ValueError: no such layer" in (
        done.stderr
    )
    assert "Traceback" not in done.stderr
    assert not list(project.glob("dist/*.whl"))


def test_a_miss_where_a_hit_is_required(project: Path, toy_cache: Path) -> None:
    write_project(project, graph=GRAPH.replace("4.0]", "7.0]"))
    done = hatchling(project, "-t", "wheel", MAX_BUILD_REQUIRE_HIT="1")
    assert done.returncode == 1
    assert "`affine` × `cpu` is not in the cache: graph changed" in done.stderr
    assert "hint: build without `require-hit`" in done.stderr


def test_the_package_that_carries_artifacts_has_to_be_clear(project: Path, toy_cache: Path) -> None:
    (project / "src" / "more").mkdir()
    (project / "src" / "more" / "__init__.py").write_text("")
    two = PYPROJECT.replace('["src/toy"]', '["src/toy", "src/more"]')
    write_project(project, pyproject=two)
    done = hatchling(project, "-t", "wheel")
    assert done.returncode == 1
    assert "`tool.max-build.package` is missing: the wheel has the packages `more`, `toy`" in (
        done.stderr
    )
    write_project(project, pyproject=two.replace("targets =", 'package = "more"\ntargets =', 1))
    assert hatchling(project, "-t", "wheel").returncode == 0
    assert "more/_max_build/manifest.json" in names(wheel_of(project))


@pytest.mark.parametrize("table", ["targets.wheel.hooks", "hooks"])
def test_the_hooks_own_table_overrides_the_projects(
    project: Path, toy_cache: Path, table: str
) -> None:
    text = PYPROJECT.replace("[tool.hatch.build.targets.wheel.hooks.max-build]\n", "")
    hook = f"[tool.hatch.build.{table}.max-build]\nembed = false\n"
    write_project(project, pyproject=text + hook)
    done = hatchling(project)
    assert done.returncode == 0, done.stderr
    assert manifest(wheel_of(project))["embedded"] is False
