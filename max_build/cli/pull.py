"""`max-build pull`: bring what the outer tiers have into the local one."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from max_build.cli.project import cache_of, opened
from max_build.cli.selection import add_choice, locked_of, report_moved, without_record
from max_build.errors import StoreError
from max_build.record import Record

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "pull",
        help="bring records of the shared directory or the remote to this machine",
        description="Download records and their blobs ahead of a build, e.g. into a container "
        "image. With a lock, neither a project nor a compiler is needed. An HTTP server cannot "
        "list what it has: there, name a lock or whole keys.",
        allow_abbrev=False,
    )
    add_choice(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Pull; 1 if anything could not be moved."""
    from max_build.store.transfer import Moved, chosen, pull, pull_recipes

    with opened(cache_of(options)) as cache:
        if not cache.outer:
            message = "there is no shared cache and no remote to pull from"
            raise StoreError(message, hint="set `MAX_BUILD_REMOTE`, or `remote` in the project")
        lock = locked_of(options)
        if lock is not None:
            return report_moved(pull(cache, lock.keys(), lock), options, "pulled")
        choice = {"keys": options.keys, "units": options.units, "targets": options.targets}
        records: list[Record] = []
        sources = []
        failure: StoreError | None = None
        for tier in cache.outer:
            try:
                records += chosen(tier, **choice)
                sources.append(tier)
            except StoreError as error:  # which the tier has noted
                failure = error
        if failure is not None and not records:
            raise failure
        whole = [key for key in options.keys if len(key) == 64]  # these tell why they are not here
        result = pull(cache, dict.fromkeys([*(record.key for record in records), *whole]).keys())
        if not options.keys:  # else the tiers need not be able to list
            for source in sources:
                with contextlib.suppress(StoreError):
                    pull_recipes(cache, source, result.moved)
        absent = without_record(options, records, "nothing out there fits")
        failed = {key: why for key, why in absent.items() if key not in result.moved}
        return report_moved(Moved(result.moved, failed | result.failed), options, "pulled")
