"""`max-build stats`: what the cache did on this machine."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from max_build.cli.project import cache_of, opened, print_json

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "stats",
        help="hits by tier, misses by reason, bytes and seconds saved",
        description="Counters of this machine's cache directory: since ever, and of the last run "
        "that looked anything up.",
        allow_abbrev=False,
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON on stdout")
    form.add_argument("--prometheus", action="store_true", help="print Prometheus text on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the counters."""
    from max_build.report.units import plural
    from max_build.store.amounts import show_size
    from max_build.store.stats import load_totals, prometheus

    with opened(cache_of(options)) as cache:
        ever, last = load_totals(cache.memo, "ever"), load_totals(cache.memo, "last")
    if options.prometheus:
        print(prometheus(ever), end="")
    elif options.json:
        print_json({"ever": msgspec.structs.asdict(ever), "last": msgspec.structs.asdict(last)})
    else:
        runs = f"{plural(ever.builds, 'run')} in all"
        for title, totals in (("the last run", last), (runs, ever)):
            hits, misses = sum(totals.hits.values()), sum(totals.misses.values())
            told = f"{plural(hits, 'hit')}, {plural(misses, 'miss')}"
            print(f"{title}: {told}, {totals.seconds_saved:.0f} s saved")
            for name, values in (
                ("hits", totals.hits),
                ("misses", totals.misses),
                ("faults", totals.faults),
            ):
                for key, count in sorted(values.items()):
                    print(f"  {name:8} {key:16} {count}")
            for name, values in (("received", totals.received), ("sent", totals.sent)):
                for key, count in sorted(values.items()):
                    print(f"  {name:8} {key:16} {show_size(count)}")
    return 0
