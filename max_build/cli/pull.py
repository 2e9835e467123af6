"""`max-build pull`: bring what the outer tiers have into the local one."""

from __future__ import annotations

import argparse
from typing import Any

from max_build.cli.project import cache_of, opened
from max_build.cli.selection import add_choice, report_moved
from max_build.errors import StoreError

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "pull",
        help="bring records of the shared directory or the remote to this machine",
        description="Download records and their blobs ahead of a build, e.g. into a container "
        "image. From an HTTP server, which cannot list what it has, only by whole keys.",
        allow_abbrev=False,
    )
    add_choice(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Pull; 1 if anything could not be moved."""
    from max_build.store.transfer import chosen, pull

    with opened(cache_of(options)) as cache:
        if not cache.outer:
            message = "there is no shared cache and no remote to pull from"
            raise StoreError(message, hint="set `MAX_BUILD_REMOTE`, or `remote` in the project")
        keys = dict.fromkeys(
            record.key
            for tier in cache.outer
            for record in chosen(
                tier.store, keys=options.keys, units=options.units, targets=options.targets
            )
        )
        return report_moved(pull(cache, list(keys)), options, "pulled")
