"""The console script `max-build`: data on stdout, talk on stderr, exit status 0, 1 or 2."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from max_build.cli import streams
from max_build.errors import MaxBuildError

__all__ = ["main", "parser"]

COMMANDS = (
    *("build", "status", "show", "explain", "watch", "report", "run", "warm-interpreter"),
    *("weights", "push", "pull", "pack", "unpack", "gc", "verify", "stats", "doctor", "key"),
)


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The command line; each command's module registers its own part.

    Only the command that `arguments` name is imported, and all of them where they name none.
    """
    top = argparse.ArgumentParser(
        prog="max-build",
        description="Compile a model repo's graphs and kernels once, and share what came out.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="store_true", help="print the version and leave")
    top.set_defaults(project=None, verbose=False)
    _add_common(top)
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    named = _named(arguments)
    for name in (named,) if named in COMMANDS else COMMANDS:
        module = name.replace("-", "_")
        importlib.import_module(f"max_build.cli.{module}").register(commands)
    for one in commands.choices.values():
        _add_common(one)
    return top


def _add_common(one: argparse.ArgumentParser) -> None:
    """Add what stands before a command or after it; the default is the top's alone."""
    one.add_argument(
        "-C",
        "--project",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="the model repo (default: the one that this directory is in)",
    )
    one.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show compilers' logs as well",
    )


def _named(arguments: Sequence[str]) -> str:
    """The first argument that is neither an option nor the value of one."""
    words = iter(arguments)
    for word in words:
        if word in ("-C", "--project"):
            next(words, None)
        elif not word.startswith("-"):
            return word
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit status."""
    if arguments is None:
        streams.prepare()
        arguments = sys.argv[1:]
    status = 1
    with streams.outputs() as faults:
        status = _run(arguments)
    return faults[0] if faults else status


def _run(arguments: Sequence[str]) -> int:
    options = (top := parser(arguments)).parse_args(arguments)
    if options.version:
        from importlib.metadata import version

        print(f"max-build {version('max-build')}")
        return 0
    if not hasattr(options, "run"):
        top.print_help(sys.stderr)
        return 2
    if options.project is not None and not options.project.is_dir():
        top.error(f"argument -C/--project: `{options.project}` is not a directory")
    try:
        return int(options.run(options))
    except MaxBuildError as error:
        print(f"max-build: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("max-build: interrupted", file=sys.stderr)
        return 130
