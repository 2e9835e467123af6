"""Every miss says what changed; each class of component is named, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import toy_repo as toy
from max_build.cli import main
from max_build.explain import explain_miss, first_change, graph_diff, told
from max_build.key import Components, changes
from max_build.store import CacheSettings, Miss, open_cache

BASE = {
    "compiler": {"max": "26.6.0+aaaaaaaaaaaaaaaa"},
    "target": "sm_90a",
    "host": "x86-64-v3",
    "options": {"std": "c++17"},
    "sources": {"ir": "0" * 64},
    "dependencies": {"include/tile.cuh": "0" * 64},
    "environment": {"MODULAR_X": "1"},
}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("compiler", {"max": "26.7.0+aaaaaaaaaaaaaaaa"}, "`max` 26.6.0 → 26.7.0"),
        ("compiler", {"max": "26.6.0+bbbbbbbbbbbbbbbb"}, "`max` 26.6.0: another build of it"),
        ("target", "sm_90", "target sm_90a → sm_90"),
        ("host", "generic", "host x86-64-v3 → generic"),
        ("options", {"std": "c++20"}, "options std c++17 → c++20"),
        ("options", {}, "options std c++17 → unset"),
        ("sources", {"ir": "1" * 64}, "graph changed"),
        ("dependencies", {"include/tile.cuh": "1" * 64}, "header `include/tile.cuh` changed"),
        ("dependencies", {}, "header `include/tile.cuh` removed"),
        ("environment", {"MODULAR_X": "2"}, "environment `MODULAR_X` changed"),
        ("environment", {}, "environment `MODULAR_X` unset"),
        ("environment", {"MODULAR_X": "1", "MODULAR_Y": "1"}, "environment `MODULAR_Y` set"),
    ],
)
def test_each_class_of_component_is_named_and_no_other(
    field: str, value: object, words: str
) -> None:
    before, after = Components(**BASE), Components(**{**BASE, field: value})  # type: ignore[arg-type]
    assert [told(*one) for one in changes(before, after)] == [words]


GRAPH = """module {
  mo.graph @toy(%arg0: !mo.tensor<[n, 4], f32>) {
    %0 = mo.constant {value = #M.dense<1.0>} : !mo.tensor<[4], f32>
    %1 = rmo.mul(%arg0, %0) : !mo.tensor<[n, 4], f32>
    mo.output %1 : !mo.tensor<[n, 4], f32>
  }
}
"""


def test_the_first_changed_operation() -> None:
    assert first_change(GRAPH, GRAPH.replace("1.0", "2.0")) == "`mo.constant` at op 2"
    assert first_change(GRAPH, GRAPH.replace("rmo.mul", "rmo.add")) == "`rmo.add` at op 3"


def test_the_diff_of_a_graph_ignores_the_numbers_of_values() -> None:
    added = '    %0 = mo.constant.external {name = "w"} : !mo.tensor<[4], f32>\n'
    head, tail = GRAPH.split("    %0 ", 1)
    renumbered = tail.replace("%1", "%2").replace("%0", "%1")
    assert graph_diff(GRAPH, f"{head}{added}    %1 {renumbered}") == [f"+ {added.strip()}"]
    assert graph_diff("a\n" * 3, "b\n" * 60)[-1] == "… 39 lines more"


# --- the command

UNIT = """
from toy.part import N

def build(target):
    return f"mo.graph @unit\\n  mo.constant {N}\\n  mo.output"
"""


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    toy.install(tmp_path / "site", monkeypatch)
    return toy.write_project(tmp_path / "repo", unit=UNIT, part="N = 1")


def explained(repo: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert main(["-C", str(repo), "explain", "unit", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    return dict(found)


def test_explain_names_the_file_the_operation_and_the_lines(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(repo, capsys)["reason"] == "never compiled before"
    assert main(["-C", str(repo), "build"]) == 0
    (repo / "src/toy/part.py").write_text("N = 2")
    found = explained(repo, capsys)
    assert found["reason"] == "graph changed: `mo.constant` at op 2 (`src/toy/part.py` changed)"
    assert found["graph"] == ["- mo.constant 1", "+ mo.constant 2"]
    assert main(["-C", str(repo), "build"]) == 0
    again = explained(repo, capsys)
    assert again["state"] == "cached"
    assert again["words"] == ["graph changed: `mo.constant` at op 2"]
    assert main(["-C", str(repo), "explain", "unit"]) == 0
    assert "- mo.constant 1" in capsys.readouterr().out


def test_a_miss_line_says_what_changed(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-C", str(repo), "build"]) == 0
    (repo / "src/toy/part.py").write_text("N = 2")
    capsys.readouterr()
    assert main(["-C", str(repo), "build", "--require-hit"]) == 1
    assert "graph changed: `mo.constant` at op 2" in capsys.readouterr().err


def test_a_fault_of_the_cache_is_told_in_a_sentence(
    repo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-C", str(repo), "build"]) == 0
    for entry in (tmp_path / "cache" / "ac").glob("*/*"):  # the recipe too: else it finds it first
        entry.chmod(0o600)
        entry.write_bytes(b"{}\n{}\n")
    capsys.readouterr()
    assert main(["-C", str(repo), "build"]) == 0
    told = capsys.readouterr().err
    assert re.search(r"compiled in .*: its entry in the cache was damaged \(.+\)\n", told), told


@pytest.mark.parametrize("reason", ["altered", "damaged", "dangling", "fault", "unsigned"])
def test_every_word_for_a_fault_has_a_sentence(reason: str, tmp_path: Path) -> None:
    with open_cache(CacheSettings(dir=str(tmp_path / "cache"))) as cache:
        miss = Miss(reason, "remote cache, key 0123: why")
        told, _ = explain_miss(cache, "unit", Components(**BASE), None, miss, "")  # type: ignore[arg-type]
    assert re.fullmatch(r"[\w `-]{10,} \(remote cache, key 0123: why\)", told)


def test_check_determinism_tells_compilers_and_derivations_that_vary(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ["-C", str(repo), "build", "--check-determinism"]
    assert main(build) == 0
    assert "`unit` × `cpu` (toy): reproducible" in capsys.readouterr().out
    (repo / "src/toy/part.py").write_text("N = 'noisy'")
    assert main(build) == 0
    assert "same key, other bytes each time: ptx" in capsys.readouterr().out
    (repo / "src/toy/part.py").write_text("import os\nN = os.urandom(4).hex()")
    assert main(build) == 1
    assert "derives to another key each time: graph changed" in capsys.readouterr().out
