"""`max-build pack`: records and blobs as one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from max_build.cli.project import cache_of, opened, print_json
from max_build.cli.selection import add_choice, records_of
from max_build.errors import StoreError

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
    from max_build.report.units import plural
    from max_build.store.bundle import pack
    from max_build.store.transfer import recipes_for

    with opened(cache_of(options)) as cache:
        local = store_of(cache, "local")
        records, failed = records_of(local, options)
        if failed:
            lines = "\n".join(f"{key}: {reason}" for key, reason in sorted(failed.items()))
            message = f"nothing was written, since not all of it is here:\n{lines}"
            raise StoreError(message, kind="missing", hint="`max-build pull` may bring it")
        keys = [record.key for record in records]
        if not keys:
            print("no record fits; nothing was written", file=sys.stderr)
            return 1
        result = pack(cache, [*keys, *recipes_for(local, keys)], options.output)
    if options.json:
        print_json(result)
    else:
        print(
            f"{options.output}: {plural(len(keys), 'record')}, {plural(result.blobs, 'blob')}",
            file=sys.stderr,
        )
    return 0
