"""`max-build run -- CMD …`: a MAX program through the cache, unchanged."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from max_build.cli.project import project_of
from max_build.errors import ConfigError
from max_build.layers import read_toml, table_of
from max_build.runtime.transparent import environment

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run",
        help="run a MAX program whose graphs go through the cache",
        description="Run a command in whose Python processes every graph that MAX would compile "
        "is looked up first and published after a miss. The code needs no change.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host",
        metavar="BASELINE",
        type=_host,
        help="compile host code for this CPU baseline (`x86-64-v3`) and not for this machine's "
        "CPU, so that other machines can use it",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD …")
    parser.set_defaults(run=run, misused=parser.error)


def run(options: argparse.Namespace) -> int:
    """Become the command; 127 if there is no such command, 126 if it cannot be run."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        options.misused("`max-build run` needs a command, such as `-- python serve.py`")
    if options.host:
        _check_host(options.host)
    program = shutil.which(command[0])
    if program is None:
        return _no_program(command[0])
    found = environment(
        os.environ,
        project=_project(project_of(options)),
        host=options.host or "",
        verbose=options.verbose,
    )
    sys.stdout.flush()
    try:
        os.execve(program, command, found)
    except OSError as error:
        return _cannot_run(program, error.strerror or str(error))
    raise AssertionError  # it does not return


def _no_program(command: str) -> int:
    found = shutil.which(command, mode=os.F_OK)
    if found is not None:
        return _cannot_run(found, os.strerror(errno.EACCES))
    if os.path.dirname(command) and os.path.isdir(command):
        return _cannot_run(command, os.strerror(errno.EISDIR))
    print(f"max-build: no command `{command}`", file=sys.stderr)
    return 127


def _cannot_run(program: str, why: str) -> int:
    print(f"max-build: `{program}` cannot be run: {why}", file=sys.stderr)
    return 126


def _host(text: str) -> str:
    from max_build.compilers.max_graph import HOSTS

    if text not in HOSTS:
        message = f"must be one of {', '.join(HOSTS)}, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return text


def _check_host(host: str) -> None:
    from max_build.runtime.host import missing_features

    if lacking := missing_features(host):
        message = f"what is compiled for `--host {host}` cannot run here: {lacking}"
        raise ConfigError(message)


def _project(directory: Path) -> str:
    """The project whose cache settings hold, if the directory has one."""
    path = directory / "pyproject.toml"
    if not path.is_file():
        return ""
    document = read_toml(path)
    tool = table_of(document, "tool") or {}
    return str(directory.resolve()) if "max-build" in tool else ""
