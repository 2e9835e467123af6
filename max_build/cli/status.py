"""`max-build status`: what would hit and what would compile, without compiling."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from max_build.cli.build import described
from max_build.cli.project import NO_UNITS, add_selection, opened, print_json, settings_of
from max_build.pipeline import build

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "status",
        help="what would hit, and what would compile and why",
        description="Look up every unit for every target. Nothing is compiled; the exit status "
        "is 1 only when a unit cannot even be derived.",
        allow_abbrev=False,
    )
    add_selection(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look up; 1 if a unit cannot be derived."""
    settings = settings_of(options)
    with opened(settings.cache) as cache:
        result = build(settings, cache, mode="look")
    if options.json:
        print_json([described(one) for one in result.outcomes])
    else:
        width = max((len(one.unit.name) for one in result.outcomes), default=0)
        for one in result.outcomes:
            would = {"cached": "hit", "missed": "compile"}.get(one.state, one.state)
            why = one.tier if one.state == "cached" else one.reason or str(one.error or "")
            always = f"; always derive: {one.always}" if one.always else ""
            print(f"{one.unit.name:{width}}  {one.target!s:8}  {would:8}  {why}{always}")
        if not result.outcomes:
            print(NO_UNITS, file=sys.stderr)
    return 1 if any(one.state == "failed" for one in result.outcomes) else 0
