"""What every command that works on a project shares: its options, settings, cache and output."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from max_build import config
from max_build.config import Settings, load_settings
from max_build.store import Cache, CacheSettings, open_cache

__all__ = ["add_selection", "add_unit", "cache_of", "opened", "print_json", "settings_of"]


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the units and targets that narrow a command down."""
    parser.add_argument("units", nargs="*", metavar="UNIT", help="units (default: all of them)")
    parser.add_argument(
        "-t",
        "--target",
        dest="targets",
        action="append",
        metavar="TARGET",
        help="compile for this target in place of the declared ones; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def add_unit(parser: argparse.ArgumentParser) -> None:
    """Add the one unit that a command is about, and its targets."""
    parser.add_argument("units", nargs=1, metavar="UNIT")
    parser.add_argument(
        "-t", "--target", dest="targets", action="append", metavar="TARGET", help="only this target"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def settings_of(options: argparse.Namespace) -> Settings:
    """The project's settings under the command line's flags.

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
    settings = load_settings(options.project, flags=flags)
    return settings.narrowed(getattr(options, "units", ()), getattr(options, "targets", None) or ())


def cache_of(options: argparse.Namespace) -> CacheSettings:
    """The project's cache where there is a project, else the user's.

    Raises
    ------
    ConfigError
        If the settings are wrong.
    """
    return config.cache_of(options.project)


@contextlib.contextmanager
def opened(settings: CacheSettings) -> Iterator[Cache]:
    """The cache for the length of the block; its warnings go to stderr at the end."""
    cache = open_cache(settings)
    try:
        yield cache
    finally:
        for warning in cache.warnings:
            print(f"warning: {warning}", file=sys.stderr)
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
