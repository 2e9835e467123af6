"""`max-build report`: one HTML page about the last build, or about the cache."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from max_build.cli.project import cache_of, opened, print_json, settings_of
from max_build.errors import MaxBuildError, NotBuiltError
from max_build.report.gather import Report, of_cache, of_project

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "report",
        help="a page to look at: the last build, or the cache",
        description="Write one self-contained HTML page about the project's last build on this "
        "machine: what hit, what compiled and why, who worked when, the kernels and their "
        "registers, seconds saved, and the tiers. Nothing is compiled or fetched.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cache", action="store_true", help="about all that this machine's cache directory holds"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("max-build-report.html"),
        metavar="FILE",
        help="where to write the page, `-` for stdout (default: max-build-report.html)",
    )
    form.add_argument("--json", action="store_true", help="print the page's data on stdout instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page, and its name on stdout; or the page itself."""
    report = _cache(options) if options.cache else _project(options)
    if options.json:
        print_json(report)
        return 0
    from max_build.report.page import page

    if str(options.output) == "-":
        print(page(report))
        return 0
    try:
        options.output.write_text(page(report), encoding="utf-8", errors="replace")
    except OSError as error:
        message = f"`{options.output}` cannot be written: {error.strerror}"
        raise MaxBuildError(message, hint="name another file with `--output`") from error
    print(options.output)
    return 0


def _project(options: argparse.Namespace) -> Report:
    settings = settings_of(options)
    with opened(settings.cache) as cache:
        report = of_project(settings, cache)
    if report is None:
        message = f"no build of `{settings.project or settings.root}` is noted on this machine"
        hint = "run `max-build build`, or see the whole cache with `max-build report --cache`"
        raise NotBuiltError(message, hint=hint)
    return report


def _cache(options: argparse.Namespace) -> Report:
    """Of the project's cache where there is a project, else of the user's own."""
    with opened(cache_of(options)) as cache:
        return of_cache(cache)
