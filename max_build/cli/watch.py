"""`max-build watch`: build on every change."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from max_build.cli.project import add_jobs, add_selection, settings_of
from max_build.config import Settings
from max_build.errors import ToolchainError
from max_build.recipes.inotify import Overflow
from max_build.store.opening import default_root
from max_build.watch import watch

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "watch",
        help="build on every change, giving up a compile that is out of date",
        description="Build, then wait for changes of the project's files and build again. A "
        "change during a compile interrupts it. Ends with Ctrl-C.",
        allow_abbrev=False,
    )
    add_selection(parser)
    add_jobs(parser, "workers at once")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Watch until interrupted."""
    settings = settings_of(options)
    command = [
        sys.executable,
        "-P",
        "-m",
        "max_build",
        *(["-v"] if options.verbose else []),
        "-C",
        settings.root,
        "build",
        *options.units,
        *(f"--target={one}" for one in options.targets or ()),
        *(["--json"] if options.json else []),
        *([f"--jobs={options.jobs}"] if options.jobs is not None else []),
    ]
    try:
        watch(_roots(settings), command, ignored=_ignored(settings), told=_told)
    except (OSError, Overflow) as error:
        message = f"the project cannot be watched: {error}"
        hint = "raise `fs.inotify.max_user_watches`, or keep large trees out of the project"
        raise ToolchainError(message, hint=hint) from error
    return 0


def _roots(settings: Settings) -> list[str]:
    inside = settings.root + os.sep
    return [
        settings.root,
        *(one for one in settings.python_path if not f"{one}/".startswith(inside)),
    ]


def _ignored(settings: Settings) -> list[str]:
    cache = os.path.abspath(settings.cache.dir or default_root())
    return [cache, *(os.path.join(settings.root, name) for name in ("build", "dist"))]


def _told(line: str) -> None:
    print(f"max-build: {line}", file=sys.stderr, flush=True)
