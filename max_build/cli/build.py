"""`max-build build`: bring every unit to its artifact, compiling only what no tier holds."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max_build.cli.progress import Progress
from max_build.cli.project import NO_UNITS, add_jobs, add_selection, opened, print_json, settings_of
from max_build.outcomes import Mode, Outcome, summary
from max_build.report.history import build_noted

if TYPE_CHECKING:
    from max_build.config import Settings
    from max_build.determinism import Finding

__all__ = ["described", "register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "build",
        help="compile what the cache does not hold",
        description="Bring every unit to its artifact for every target: from the cache where a "
        "tier holds it, else by compiling and publishing it.",
        allow_abbrev=False,
    )
    add_selection(parser)
    add_jobs(parser, "workers at once (default: min(CPUs, memory / 2 GiB))")
    parser.add_argument(
        "--executor",
        metavar="ADDRESS",
        help="send what misses to a farm, dask://HOST:PORT (also MAX_BUILD_EXECUTOR)",
    )
    parser.add_argument(
        "--require-hit",
        action="store_true",
        help="a miss is an error and nothing compiles (also MAX_BUILD_REQUIRE_HIT=1)",
    )
    parser.add_argument(
        "--lock",
        type=Path,
        metavar="FILE",
        help="note what was built as a lock: `max-build pull --lock FILE` fetches it elsewhere",
    )
    parser.add_argument(
        "--check-determinism",
        action="store_true",
        help="compile everything twice past the cache, and say which compilers are reproducible",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Build; 1 if any unit is left without an artifact. Nothing at all where it is disabled."""
    settings = settings_of(options)
    if settings.disable:
        print("max-build: disabled (`disable` or `MAX_BUILD_DISABLE`)", file=sys.stderr)
        return 0
    if not settings.units:
        print(NO_UNITS, file=sys.stderr)
    if options.check_determinism:
        return _check_determinism(settings, as_json=options.json)
    with opened(settings.cache) as cache, Progress(verbose=options.verbose) as progress:
        mode: Mode = "require-hit" if settings.require_hit else "build"
        result = build_noted(settings, cache, mode=mode, report=progress)
        saved = sum(
            one.record.seconds for one in result.outcomes if one.state == "cached" and one.record
        )
    if options.lock is not None and not result.failed:
        from max_build.cli.lock import write

        for line in write(options.lock, settings, result):
            print(f"warning: {line}", file=sys.stderr)
    if options.json:
        print_json(
            {
                "outcomes": [described(one) for one in result.outcomes],
                "seconds": round(result.seconds, 3),
                "seconds_saved": round(saved, 3),
            }
        )
    if result.outcomes:
        print(f"max-build: {summary(result)}", file=sys.stderr)
    return 1 if result.failed else 0


def _check_determinism(settings: Settings, *, as_json: bool) -> int:
    """Compile twice; 1 if a derivation varied or failed. Artifacts may vary: no key is of them."""
    from max_build.determinism import check

    findings = []
    for one in check(settings):
        findings.append(one)
        if not as_json:
            name = f"`{one.unit}` × `{one.target}` ({one.compiler})"
            print(f"{name}: {one.error or _told(one)}")
    if as_json:
        print_json([dataclasses.asdict(one) for one in findings])
    return 1 if any(one.derivation or one.error for one in findings) else 0


def _told(one: Finding) -> str:
    if one.derivation:
        return f"derives to another key each time: {', '.join(one.derivation)}"
    if one.artifacts:
        return f"same key, other bytes each time: {', '.join(one.artifacts)}"
    return "reproducible"


def described(outcome: Outcome) -> dict[str, Any]:
    """One outcome as JSON."""
    record = outcome.record
    return {
        "unit": outcome.unit.name,
        "target": str(outcome.target),
        "state": outcome.state,
        "key": outcome.key,
        "tier": outcome.tier,
        "reason": outcome.reason,
        "always": outcome.always,
        "error": str(outcome.error) if outcome.error else "",
        "seconds": round(outcome.seconds, 3),
        "blobs": {blob.role: blob.digest for blob in record.blobs} if record else {},
    }
