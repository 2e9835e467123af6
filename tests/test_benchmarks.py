"""The benchmarks' one command: it runs, and what it writes can be read. Their figures are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support import ROOT, run

BENCHMARKS = ROOT / "tests" / "benchmarks"


def test_a_section_by_name_gives_a_table_and_every_sample(tmp_path: Path) -> None:
    told = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS), "--quick", "--only", "store", "--json", str(told)]
    done = run(command, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(told.read_text())
    assert found["machine"].keys() >= {"cores", "date", "load_before", "load_after", "versions"}
    assert found["sections"].keys() == {"store"}
    (row, *_) = [one for one in found["sections"]["store"] if one["what"] == "get among 100"]
    assert row["peer"] == "plain files"
    assert min(row["samples"]) <= row["median"] <= max(row["samples"])
    assert "get among 100" in done.stdout


def test_a_section_that_there_is_not_is_refused_and_those_there_are_named(tmp_path: Path) -> None:
    done = run([sys.executable, str(BENCHMARKS), "--only", "nothing"], cwd=tmp_path)
    assert done.returncode == 2
    for name in ("startup", "hook", "hits", "kernels", "store", "remotes", "weights", "cluster"):
        assert name in done.stderr
