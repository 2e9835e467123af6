"""What every command that works on a project shares: its options, settings, cache and output."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from max_build import config
from max_build.config import Settings, load_settings
from max_build.errors import ConfigError
from max_build.fields import words
from max_build.layers import project_at
from max_build.store import Cache, CacheSettings, open_cache

__all__ = [
    "NO_UNITS",
    "add_jobs",
    "add_selection",
    "add_unit",
    "cache_of",
    "opened",
    "print_json",
    "project_of",
    "settings_of",
]


NO_UNITS = "no units are declared in [tool.max-build]"


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the units and targets that narrow a command down."""
    parser.add_argument("units", nargs="*", metavar="UNIT", help="units (default: all of them)")
    _add_targets(parser, "compile for this target in place of the declared ones; several by commas")


def add_jobs(parser: argparse.ArgumentParser, meaning: str, default: int | None = None) -> None:
    """Add how many work at once."""
    parser.add_argument("-j", "--jobs", type=_count, default=default, metavar="N", help=meaning)


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text):
        message = f"must be a whole number of at least 0, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def add_unit(parser: argparse.ArgumentParser) -> None:
    """Add the one unit that a command is about, and its targets."""
    parser.add_argument("units", nargs=1, metavar="UNIT")
    _add_targets(parser, "only this target; several by commas")


def _add_targets(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "-t",
        "--target",
        dest="targets",
        action="extend",
        type=words,
        metavar="TARGET",
        help=meaning,
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def project_of(options: argparse.Namespace) -> Path:
    """The project's directory: what `-C` names, else the one that this directory is in.

    Raises
    ------
    ConfigError
        If this directory was removed.
    """
    if options.project is not None:
        return Path(options.project)
    try:
        return project_at(Path.cwd())
    except FileNotFoundError:
        message = "this directory was removed"
        raise ConfigError(message, hint="name the model repo with `-C DIR`") from None


def settings_of(options: argparse.Namespace) -> Settings:
    """The project's settings under the command line's flags; what is odd about them is told.

    Raises
    ------
    ConfigError
        If they are wrong, or a unit is named that is not declared.
    """
    flags: dict[str, Any] = {}
    if getattr(options, "jobs", None) is not None:
        flags["jobs"] = options.jobs
    if getattr(options, "executor", None) is not None:
        flags["executor"] = options.executor
    if getattr(options, "require_hit", False):
        flags["require-hit"] = True
    units, targets = getattr(options, "units", ()), getattr(options, "targets", None) or ()
    environ = {
        name: value
        for name, value in os.environ.items()
        if name != "MAX_BUILD_TARGETS" or not targets
    }
    settings = load_settings(project_of(options), environ=environ, flags=flags)
    _warn(config.oddities(settings))
    return settings.narrowed(tuple(dict.fromkeys(units)), tuple(dict.fromkeys(targets)))


def cache_of(options: argparse.Namespace) -> CacheSettings:
    """The project's cache where there is a project, else the user's.

    Raises
    ------
    ConfigError
        If the settings are wrong.
    """
    _warn(config.strangers())
    return config.cache_of(project_of(options))


def _warn(lines: list[str]) -> None:
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


@contextlib.contextmanager
def opened(settings: CacheSettings) -> Iterator[Cache]:
    """The cache for the length of the block; its warnings go to stderr at the end."""
    cache = open_cache(settings)
    try:
        yield cache
    finally:
        _warn(cache.warnings)
        cache.close()


def print_json(value: Any) -> None:
    """Print `value` on stdout, indented, keys sorted.

    What stdout cannot encode, as a path that is not UTF-8, comes escaped as `json` reads it.
    """
    try:
        text = msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2).decode()
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), indent=2, sort_keys=True)
    print(text)
