"""An editable install's artifact, after its sources were edited."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import toy_repo as toy
from max_build.config import load_settings
from max_build.errors import LoadError
from max_build.pipeline import build
from max_build.record import Record
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


def test_a_unit_that_is_gone_and_a_value_that_is_none(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = built(repo)
    with pytest.warns(StaleWarning, match="declares no such unit"):
        current(repo, "another", "cpu", record)
    monkeypatch.setenv("MAX_BUILD_STALE", "maybe")
    with pytest.raises(LoadError, match="must be one of"):
        current(repo, "unit", "cpu", record)
