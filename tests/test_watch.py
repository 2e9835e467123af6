"""`max-build watch`: builds on change, and gives up what is out of date."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import toy_repo as toy

UNIT = """
import time
from toy.part import N

def build(target):
    while N == "slow":
        time.sleep(0.1)
    return f"mo.constant {N}"
"""


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    toy.install(tmp_path / "site", monkeypatch)
    yield toy.write_project(tmp_path / "repo", unit=UNIT, part="N = 1")
    toy.forget()


class Watching:
    """A running `max-build watch`, and what it has said so far."""

    def __init__(self, repo: Path, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "max_build", "watch"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=repo, stderr=file)

    def wait_for(self, text: str, times: int = 1) -> str:
        for _ in range(2400):
            said = self.log.read_text()
            if said.count(text) >= times:
                return said
            assert self.process.poll() is None, said
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=120)


@pytest.fixture
def watching(repo: Path, tmp_path: Path) -> Iterator[Watching]:
    found = Watching(repo, tmp_path / "log")
    yield found
    found.stop()


def test_each_change_is_built_and_named(repo: Path, watching: Watching) -> None:
    part = repo / "src/toy/part.py"
    watching.wait_for("1 compiled in")
    part.write_text("N = 2")
    said = watching.wait_for("1 compiled in", 2)
    assert "max-build: `src/toy/part.py` changed" in said
    (repo / "src/toy/new").mkdir()
    (repo / "src/toy/new/module.py").write_text("")
    watching.wait_for("`src/toy/new/module.py` changed")
    watching.wait_for("1 cached in")


def test_a_build_that_is_out_of_date_is_given_up(repo: Path, watching: Watching) -> None:
    part = repo / "src/toy/part.py"
    watching.wait_for("1 compiled in")
    part.write_text("N = 'slow'")
    watching.wait_for("changed")
    time.sleep(0.5)
    part.write_text("N = 3")
    watching.wait_for("1 compiled in", 2)
    assert "memory" not in watching.log.read_text()
