"""The console script `max-build`: data on stdout, talk on stderr, exit status 0, 1 or 2."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

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
    top.add_argument(
        "-C",
        "--project",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="the model repo (default: this directory)",
    )
    top.add_argument("-v", "--verbose", action="store_true", help="show compilers' logs as well")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    named = _named(arguments)
    for name in (named,) if named in COMMANDS else COMMANDS:
        module = name.replace("-", "_")
        importlib.import_module(f"max_build.cli.{module}").register(commands)
    return top


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
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path or a terminal may not be UTF-8
    options = (top := parser(arguments)).parse_args(arguments)
    if options.version:
        from importlib.metadata import version

        print(f"max-build {version('max-build')}")
        return 0
    if not hasattr(options, "run"):
        top.print_help(sys.stderr)
        return 2
    try:
        return int(options.run(options))
    except MaxBuildError as error:
        print(f"max-build: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # the reader has seen enough: leave without a second complaint at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("max-build: interrupted", file=sys.stderr)
        return 130
