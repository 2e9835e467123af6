"""The records a command is about, by key, unit and target, and what became of them."""

from __future__ import annotations

import argparse
import sys

from max_build.cli.project import print_json
from max_build.store.transfer import Moved

__all__ = ["add_choice", "report_moved"]


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that narrow records down."""
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="keys or their beginnings (default: all records)"
    )
    parser.add_argument(
        "-u",
        "--unit",
        dest="units",
        action="append",
        default=[],
        metavar="UNIT",
        help="records of this unit; may be repeated",
    )
    parser.add_argument(
        "-t",
        "--target",
        dest="targets",
        action="append",
        default=[],
        metavar="TARGET",
        help="records for this target; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def report_moved(result: Moved, options: argparse.Namespace, done: str) -> int:
    """Print what was moved; the exit status is 1 if anything was not."""
    if options.json:
        print_json(result)
    else:
        for key in result.moved:
            print(key)
        for key, reason in sorted(result.failed.items()):
            print(f"{key}: {reason}", file=sys.stderr)
        print(f"{done} {len(result.moved)} records", file=sys.stderr)
    return 1 if result.failed else 0
