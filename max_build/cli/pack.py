"""`max-build pack`: records and blobs as one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from max_build.cli.project import cache_of, opened, print_json
from max_build.cli.selection import add_choice

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "pack",
        help="write records to one file, for a machine without a network",
        description="Pack records of the local cache with their blobs and recipes; "
        "`max-build unpack` takes them in.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="e.g. team.tar.zst"
    )
    add_choice(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Pack; 1 if nothing fits."""
    from max_build.cli.tiers import store_of
    from max_build.store.bundle import pack
    from max_build.store.transfer import chosen, recipes_for

    with opened(cache_of(options)) as cache:
        local = store_of(cache, "local")
        keys = [
            record.key
            for record in chosen(
                local, keys=options.keys, units=options.units, targets=options.targets
            )
        ]
        if not keys:
            print("no record fits; nothing was written", file=sys.stderr)
            return 1
        result = pack(cache, [*keys, *recipes_for(local, keys)], options.output)
    if options.json:
        print_json(result)
    else:
        print(f"{options.output}: {len(keys)} records, {result.blobs} blobs", file=sys.stderr)
    return 0
