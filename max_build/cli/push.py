"""`max-build push`: give the outer tiers what the local one has."""

from __future__ import annotations

import argparse
from typing import Any

from max_build.cli.project import cache_of, opened
from max_build.cli.selection import add_choice, records_of, report_moved

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "push",
        help="give the shared directory and the remote what this machine has",
        description="Upload records and their blobs, with the signatures that they have; a signing "
        "key adds its own to what it or a known key signed before. The tier has to be writable "
        "(`remote-mode`).",
        allow_abbrev=False,
    )
    add_choice(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Push; 1 if anything could not be moved."""
    from max_build.cli.tiers import store_of
    from max_build.store.transfer import Moved, push

    with opened(cache_of(options)) as cache:
        records, failed = records_of(store_of(cache, "local"), options)
        result = push(cache, records)
        return report_moved(Moved(result.moved, {**result.failed, **failed}), options, "pushed")
