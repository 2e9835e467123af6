"""`max-build unpack`: take in what `pack` wrote."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from max_build.cli.project import cache_of, opened, print_json

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "unpack",
        help="take in a file that `pack` wrote",
        description="Every blob is checked against its digest, every record against its key, and "
        "signatures as `remote-trust` says.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Unpack; 1 if anything was refused."""
    from max_build.store.bundle import unpack

    with opened(cache_of(options)) as cache:
        result = unpack(cache, options.file)
    if options.json:
        print_json(result)
    else:
        for reason in result.refused:
            print(f"refused: {reason}", file=sys.stderr)
        print(f"{result.entries} entries, {result.blobs} blobs", file=sys.stderr)
    return 1 if result.refused else 0
