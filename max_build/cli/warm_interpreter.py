"""`max-build warm-interpreter`: MAX's eager mode, compiled once for the team."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from max_build.cli.project import add_jobs, cache_of, opened, print_json
from max_build.interpreter_cache import fetch, machine, warm

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "warm-interpreter",
        help="fetch or make the interpreter cache of MAX's eager mode",
        description="Install the interpreter cache that another machine like this one made and "
        "published. If there is none, run `max warm-interpreter-cache`, which takes many minutes, "
        "publish what it leaves and install it. What MAX has cached already stays.",
        allow_abbrev=False,
    )
    add_jobs(parser, "compiles at once", 0)
    parser.add_argument(
        "--require-hit", action="store_true", help="only fetch: exit 1 if no tier has it"
    )
    parser.add_argument(
        "--force", action="store_true", help="fetch or make it even where MAX is warmed already"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Fetch or warm; 1 if it was only to be fetched and is not there."""
    started = time.monotonic()
    here = machine()
    tier, state = "", "warmed already"
    if not here.warmed or options.force:
        with opened(cache_of(options)) as cache:
            tier = fetch(cache, here, _Progress())
            state = "fetched" if tier else "missed"
            if not tier and not options.require_hit:
                print("max-build: no tier has it; this takes many minutes", file=sys.stderr)
                warm(cache, here, _Progress(), jobs=options.jobs)
                state = "made"
    seconds = round(time.monotonic() - started, 1)
    if options.json:
        print_json({"state": state, "tier": tier, "folder": here.folder, "seconds": seconds})
    where = f" ({tier})" if tier else ""
    print(f"max-build: interpreter cache {state}{where} in {seconds} s", file=sys.stderr)
    return 1 if state == "missed" else 0


class _Progress:
    """A line that is written over, on a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and (now - self._shown > 0.2 or done == total):
            self._shown = now
            end = "\n" if done == total else "\r"
            share = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
            print(f"{what} {share}\x1b[K", end=end, file=sys.stderr)
