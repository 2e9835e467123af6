from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import toy_repo as toy
from max_build.cli import COMMANDS, main, parser
from max_build.layers import project_at
from support import ROOT, max_build, run


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


def test_a_project_is_found_from_its_subfolders(project: Path, tmp_path: Path) -> None:
    folder = project / "cuda" / "include"
    folder.mkdir(parents=True)
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text + '[tool.max-build.cache]\nshared = "team"\n')
    done = max_build("stats", cwd=folder)
    assert f"`{project / 'team'}` is left out" in done.stderr, "the project's cache, and no other"
    unit = max_build("status", "affine", "-t", "sm_91", cwd=folder)
    assert "is an unknown target" in unit.stderr, "its units"
    (folder / "pyproject.toml").write_text("[tool.other]\n")
    assert f"`{project / 'team'}`" in max_build("stats", cwd=folder).stderr
    assert "no unit `affine`" in max_build("-C", ".", "status", "affine", cwd=folder).stderr
    (folder / "pyproject.toml").write_text("[tool.max-build]\n")
    assert "team" not in max_build("stats", cwd=folder).stderr


def test_the_nearest_project_without_our_table_stands_in(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert project_at(inner) == tmp_path
    (tmp_path / "a" / "pyproject.toml").write_text("tool = 1\n")
    assert project_at(inner) == tmp_path / "a"
    assert project_at(Path("/")) == Path("/")


@pytest.mark.parametrize("command", ["doctor", "stats", "status", "gc"])
@pytest.mark.parametrize("named", ["nowhere", "pyproject.toml"])
def test_a_project_that_is_no_directory_is_wrong_usage(
    command: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    done = max_build("-C", named, command, cwd=tmp_path)
    assert done.returncode == 2
    assert f"-C/--project: `{named}` is not a directory" in done.stderr


def test_what_stands_before_a_command_may_stand_after_it() -> None:
    for words in (["-v", "-C", "a", "build"], ["build", "-C", "a", "-v"]):
        options = parser(words).parse_args(words)
        assert (options.verbose, options.project) == (True, Path("a"))
    options = parser(["build"]).parse_args(["build"])
    assert (options.verbose, options.project) == (False, None)
    words = ["run", "-v", "--", "python", "-v", "-C", "x"]
    options = parser(words).parse_args(words)
    assert (options.verbose, options.project) == (True, None)
    assert options.command == words[2:]


def test_targets_are_taken_with_commas() -> None:
    words = ["build", "-t", "sm_80,sm_90", "-t", "cpu"]
    assert parser(words).parse_args(words).targets == ["sm_80", "sm_90", "cpu"]
    words = ["pull", "-t", "sm_80,sm_90"]
    assert parser(words).parse_args(words).targets == ["sm_80", "sm_90"]
    assert parser(["pull"]).parse_args(["pull"]).targets == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run"], "`max-build run` needs a command"),
        (["run", "--host", "x86", "true"], "argument --host: must be one of generic, x86-64"),
        (["build", "-j", "-3"], "argument -j/--jobs"),
        (["build", "-j", "many"], "must be a whole number of at least 0, got 'many'"),
    ],
)
def test_wrong_usage_is_told_apart(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert told in capsys.readouterr().err


def test_what_is_named_twice_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.install(tmp_path / "site", monkeypatch)
    repo = toy.write_project(tmp_path / "repo", unit="def build(target):\n    return 'x'\n")
    assert main(["-C", str(repo), "build", "unit", "unit", "-t", "cpu,cpu"]) == 0
    assert "1 unit × 1 target: 1 compiled" in capsys.readouterr().err


def test_a_report_goes_to_stdout_by_a_dash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--cache", "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!")
    assert not (tmp_path / "-").exists()


def test_a_build_of_nothing_says_why(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("\ufeff[tool.max-build]\n", encoding="utf-8")
    done = max_build("build", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "no units are declared in [tool.max-build]\n")


def test_a_disabled_build_does_nothing(project: Path, tmp_path: Path) -> None:
    done = max_build("build", cwd=project, env={"MAX_BUILD_DISABLE": "1"})
    assert done.returncode == 0
    assert done.stderr == "max-build: disabled (`disable` or `MAX_BUILD_DISABLE`)\n"
    assert not (tmp_path / "cache").exists()


def test_a_variable_that_is_none_of_ours_is_told_once(tmp_path: Path) -> None:
    slip = {"MAX_BUILD_REMOT": "s3://team/x"}
    done = max_build("stats", cwd=tmp_path, env=slip)
    assert done.returncode == 0
    assert done.stderr.count("`MAX_BUILD_REMOT` is unknown: did you mean `MAX_BUILD_REMOTE`") == 1


def test_a_remote_without_credentials_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="`obstore` is not installed")
    names = [name for name in os.environ if name.startswith("AZURE_")]
    env = {**dict.fromkeys(names), "MAX_BUILD_REMOTE": "az://container/x"}
    done = max_build("stats", cwd=tmp_path, env=env)
    assert done.returncode == 0
    assert "warning: remote cache is left out: it cannot be opened: " in done.stderr
    doctor = max_build("doctor", cwd=tmp_path, env=env)
    assert doctor.returncode == 1
    assert "PROBLEM  settings  remote cache is left out: " in doctor.stdout
    assert " local " in doctor.stdout


def test_the_servers_script_has_a_help(tmp_path: Path) -> None:
    script = ROOT / "cache" / "start"
    done = run(["sh", str(script), "--help"], cwd=tmp_path)
    assert done.returncode == 0
    assert "cache/start [FOLDER [PORT [TLS_PORT]]]" in done.stdout
    assert run(["sh", str(script), "--prot"], cwd=tmp_path).returncode == 2
    assert not list(tmp_path.iterdir())


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
