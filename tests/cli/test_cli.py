from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from max_build.cli import COMMANDS, main, parser
from support import max_build, run


def test_every_command_is_in_the_help_with_what_it_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([]) == 2
    told = capsys.readouterr().err
    for name in COMMANDS:
        assert f"\n    {name} " in told or f"\n    {name}\n" in told


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert f"usage: max-build {name}" in capsys.readouterr().out


def test_only_the_command_that_is_named_is_loaded() -> None:
    assert set(parser(["-C", "status", "build"])._subparsers._group_actions[0].choices) == {"build"}  # type: ignore[union-attr]
    assert len(parser(["biuld"])._subparsers._group_actions[0].choices) == len(COMMANDS)  # type: ignore[arg-type,union-attr]


def test_a_command_that_is_none_is_told_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["biuld"])
    assert left.value.code == 2
    assert "invalid choice: 'biuld'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("max-build ")


def test_a_closed_pipe_is_no_traceback(project: Path) -> None:
    shell = f'"{sys.executable}" -m max_build build --help | head -c 1'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_another_directory_can_be_named(project: Path, tmp_path: Path) -> None:
    done = max_build("-C", str(project), "status", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    missing = max_build("-C", str(tmp_path), "status", cwd=tmp_path)
    assert missing.returncode == 1
    assert "no `pyproject.toml`" in missing.stderr


def test_importing_the_package_and_its_plugins_loads_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys, max_build, max_build.hatch_plugin, max_build.pytest_plugin\n"
        "heavy = {'numpy', 'max', 'cuda', 'triton', 'gguf', 'safetensors', 'diskcache', 'rich',\n"
        "         'max_build.pipeline', 'max_build.config', 'max_build.store'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = run([sys.executable, "-c", program], cwd=tmp_path)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("command", [["doctor"], ["stats"], ["verify"], ["gc", "-n"], ["pull"]])
def test_commands_about_the_cache_work_outside_a_repo(command: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    folder.mkdir()
    done = max_build(*command, cwd=folder)
    assert "no `pyproject.toml`" not in done.stderr
    assert "Traceback" not in done.stderr
