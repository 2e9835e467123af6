"""`max-build verify`: read a whole tier again."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from max_build.cli.project import cache_of, opened, print_json
from max_build.cli.tiers import store_of

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "verify",
        help="hash every blob of a tier again",
        description="Read everything a tier holds, and move what is damaged out of the way. The "
        "exit status is 1 if anything was.",
        allow_abbrev=False,
    )
    parser.add_argument("--tier", choices=("local", "shared", "remote"), default="local")
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what is damaged")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verify; 1 if anything is damaged."""
    from max_build.store.verify import verify

    with opened(cache_of(options)) as cache:
        store = store_of(cache, options.tier)
        result = verify(store, repair=store.writable and not options.dry_run)
    if options.json:
        print_json(result)
    else:
        for finding in result.findings:
            print(f"{finding.kind}/{finding.name}: {finding.problem}")
        print(
            f"{result.entries} entries and {result.blobs} blobs read, "
            f"{len(result.findings)} damaged",
            file=sys.stderr,
        )
    return 1 if result.findings else 0
