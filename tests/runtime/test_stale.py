"""An editable install's artifact, after its sources were edited."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import toy_repo as toy
from max_build import manifest as manifests
from max_build.config import load_settings
from max_build.errors import LoadError
from max_build.pipeline import build
from max_build.record import Record
from max_build.runtime.locate import Installed
from max_build.runtime.stale import StaleWarning, current
from max_build.store import open_cache

UNIT = "from toy.part import N\ndef build(target): return f'mo.constant {N}'"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    toy.install(tmp_path / "site", monkeypatch)
    yield toy.write_project(tmp_path / "repo", unit=UNIT, part="N = 1")
    toy.forget()


def built(repo: Path) -> Record:
    settings = load_settings(repo)
    with open_cache(settings.cache) as cache:
        (outcome,) = build(settings, cache).outcomes
    assert outcome.record is not None
    return outcome.record


def test_an_artifact_of_the_sources_as_they_are(repo: Path) -> None:
    record = built(repo)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert current(repo, "unit", "cpu", record) is record


def test_an_edited_source_is_named(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = built(repo)
    (repo / "src/toy/part.py").write_text("N = 2")
    with pytest.warns(StaleWarning, match="`src/toy/part.py` changed"):
        assert current(repo, "unit", "cpu", record) is record
    monkeypatch.setenv("MAX_BUILD_STALE", "error")
    with pytest.raises(LoadError, match=r"stale: `src/toy/part\.py` changed"):
        current(repo, "unit", "cpu", record)
    monkeypatch.setenv("MAX_BUILD_STALE", "ignore")
    assert current(repo, "unit", "cpu", record) is record


def test_it_is_built_anew_where_that_is_asked_for(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = built(repo)
    (repo / "src/toy/part.py").write_text("N = 2")
    monkeypatch.setenv("MAX_BUILD_STALE", "build")
    again = current(repo, "unit", "cpu", record)
    assert again.key != record.key
    assert current(repo, "unit", "cpu", again) is again


def test_sources_that_were_built_since_but_not_installed(repo: Path) -> None:
    record = built(repo)
    (repo / "src/toy/part.py").write_text("N = 2")
    built(repo)
    with pytest.warns(StaleWarning, match="graph changed: `mo.constant` at op 1"):
        current(repo, "unit", "cpu", record)


def edited_declaration(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (repo / "pyproject.toml").read_text()
    (repo / "pyproject.toml").write_text(text.replace("toy.unit:build", "toy.unit:another"))


def edited_option(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (repo / "pyproject.toml").open("a") as file:
        file.write('options = { optimize = "fast-compile" }\n')


def a_variable_of_the_compiler(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_SPEED", "9")


@pytest.mark.parametrize(
    "edit",
    [edited_declaration, edited_option, a_variable_of_the_compiler],
    ids=lambda one: one.__name__,
)
def test_an_edit_outside_of_the_sources_may_have_made_it_stale(
    repo: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    (repo / "src/toy/unit.py").write_text(UNIT + "\ndef another(target): return 'mo.other'")
    record = built(repo)
    edit(repo, monkeypatch)
    with pytest.warns(StaleWarning, match="may be stale: no recipe says what it was compiled from"):
        assert current(repo, "unit", "cpu", record) is record
    monkeypatch.setenv("MAX_BUILD_STALE", "error")
    with pytest.raises(LoadError, match="may be stale"):
        current(repo, "unit", "cpu", record)
    monkeypatch.setenv("MAX_BUILD_STALE", "build")
    again = current(repo, "unit", "cpu", record)
    assert again.key != record.key
    monkeypatch.setenv("MAX_BUILD_STALE", "error")
    assert current(repo, "unit", "cpu", again) is again


def test_a_build_where_no_directory_takes_the_artifact_can_be_loaded(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = built(repo)
    (repo / "src/toy/part.py").write_text("N = 2")
    (tmp_path / f"max-build-{os.getuid()}").touch()  # where a cache would fall back to
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(repo / "pyproject.toml" / "none"))
    monkeypatch.setenv("MAX_BUILD_STALE", "build")
    made = current(repo, "unit", "cpu", record)
    manifest = manifests.make("toy", [], embedded=False)
    installed = Installed(manifest, "", project=repo)
    (blob,) = (one for one in made.blobs if one.role == "ptx")
    assert installed.artifact(blob).read_text() == "mo.constant 2"


def test_a_unit_that_is_gone_and_a_value_that_is_none(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = built(repo)
    with pytest.warns(StaleWarning, match="declares no such unit"):
        current(repo, "another", "cpu", record)
    monkeypatch.setenv("MAX_BUILD_STALE", "maybe")
    with pytest.raises(LoadError, match="must be one of"):
        current(repo, "unit", "cpu", record)
