"""Stress the cache for a while: `python tests/stress --minutes 10 --tier nginx`, or `all`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from driver import Plan, stress
from ground import KINDS


def main() -> int:
    """Run each tier in turn; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10, help="for each tier")
    parser.add_argument("--tier", choices=(*KINDS, "all"), default="own")
    parser.add_argument("--seed", type=int, help="of what is chance; a new one otherwise")
    parser.add_argument("--keep", type=Path, help="folder to run in, kept; else a temporary one")
    asked = parser.parse_args()
    failed = 0
    for tier in KINDS if asked.tier == "all" else (asked.tier,):
        seed = random.randrange(1 << 20) if asked.seed is None else asked.seed
        print(f"== {tier}, seed {seed}", flush=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="stress-") as folder:
            base = asked.keep / tier if asked.keep else Path(folder)
            base.mkdir(parents=True, exist_ok=True)
            verdict = stress(Plan(tier=tier, seconds=60 * asked.minutes, seed=seed), base)
        for name, count in verdict.counts.items():
            print(f"{count:>14,} {name}")
        print(f"{time.monotonic() - started:>14,.0f} seconds")
        for problem in verdict.problems:
            print(f"unexplained: {problem}")
        failed += bool(verdict.problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
