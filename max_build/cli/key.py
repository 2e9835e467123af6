"""`max-build key new`: a key pair for signing records."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "key",
        help="keys that sign records",
        description="Records are signed with Ed25519; projects list the public keys they trust.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a key pair", allow_abbrev=False)
    new.add_argument("name", metavar="NAME", help="who signs, e.g. ci")
    new.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="for the private key"
    )
    new.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make the pair: the private key into the file, the public one on stdout."""
    from max_build.store.trust import new_key

    print(new_key(options.name, options.output))
    print(
        f"`{options.output}` holds the private key: set `MAX_BUILD_SIGNING_KEY` to it where "
        "records are made. The line above goes into `public-keys` of [tool.max-build.cache].",
        file=sys.stderr,
    )
    return 0
