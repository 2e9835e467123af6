"""Standard streams that are closed, full, or of another encoding; readers that leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import toy_repo as toy

COMMAND = f'"{sys.executable}" -m max_build'


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, `max-build` being ours, which says the status of all of a pipe."""
    script = f'max-build() {{ {COMMAND} "$@"; }}\n{line}\necho "status ${{PIPESTATUS[*]}}" >&2'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=300,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repo whose unit compiles at once, for several targets."""
    toy.install(tmp_path / "site", monkeypatch)
    unit = "def build(target):\n    return f'\\N{RIGHTWARDS ARROW} {target}'\n"
    root = toy.write_project(tmp_path / "repo", unit=unit)
    text = (root / "pyproject.toml").read_text()
    (root / "pyproject.toml").write_text(text.replace('["cpu"]', '["cpu", "sm_80", "sm_90a"]'))
    return root


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["stats", "--version"])
def test_a_reader_of_stdout_that_leaves(
    command: str, unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = shell(f"max-build {command} | exec 0<&-", tmp_path)
    assert done.stderr == "status 141 0\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_stdout(
    unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = shell("max-build stats > /dev/full", tmp_path)
    assert done.stderr == (
        "max-build: standard output cannot be written: No space left on device\nstatus 1\n"
    )


def test_a_build_goes_on_when_nobody_reads_what_it_says(repo: Path) -> None:
    done = shell("max-build build 2>&1 | exec 0<&-", repo)
    assert done.stderr == "status 0 0\n"
    assert shell("max-build status", repo).stdout.count(" hit ") == 3


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", ">&- 2>&- <&-", "2>/dev/full"])
def test_streams_that_are_closed(closed: str, repo: Path) -> None:
    done = shell(f"max-build build {closed}", repo)
    assert "status 0" in done.stderr
    assert shell("max-build status", repo).stdout.count(" hit ") == 3


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_that_lacks_a_character(
    encoding: str, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    built = shell("max-build build", repo)
    assert "status 0" in built.stderr
    assert "warning" not in built.stderr
    done = shell("max-build show unit -t cpu", repo)
    assert "status 0" in done.stderr, done.stderr
    missing = shell("max-build show unit -t sm_86 --json", repo)
    assert json.loads(missing.stdout) == []
    assert "status 1" in missing.stderr
