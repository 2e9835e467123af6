"""`max-build explain UNIT`: why it misses, or what its last compile was for."""

from __future__ import annotations

import argparse
from typing import Any

from max_build.cli.build import described
from max_build.cli.project import add_unit, opened, print_json, settings_of
from max_build.explain import Explanation, compare, ir_of, nearest
from max_build.outcomes import Outcome
from max_build.pipeline import build
from max_build.record import Record
from max_build.store import Cache

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "explain",
        help="what changed against the nearest earlier record of a unit",
        description="Look a unit up and name each input that differs from the nearest earlier "
        "record of it: for a miss, from what would be compiled; for a hit, from the record it "
        "hit. Nothing is compiled.",
        allow_abbrev=False,
    )
    add_unit(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Explain; 1 if the unit cannot be derived for some target."""
    settings = settings_of(options)
    with opened(settings.cache) as cache:
        outcomes = build(settings, cache, mode="look").outcomes
        explained = [(one, one.explanation or _of_hit(cache, one)) for one in outcomes]
    if options.json:
        print_json([_described(*one) for one in explained])
    else:
        for one in explained:
            print("\n".join(_lines(*one)))
    return 1 if any(one.state == "failed" for one in outcomes) else 0


def _of_hit(cache: Cache, outcome: Outcome) -> Explanation | None:
    """What the record that was hit was compiled for, against the nearest other one."""
    record = outcome.record
    if record is None:
        return None
    others = [one for one in cache.records_of(outcome.unit.name) if _is_other(one, record)]
    earlier = nearest(others, record.components)
    if earlier is None:
        return None
    return compare(cache, earlier, record.components, ir_of(cache, record))


def _is_other(one: Record, record: Record) -> bool:
    return one.key != record.key and one.components.target == record.components.target


def _described(outcome: Outcome, explanation: Explanation | None) -> dict[str, Any]:
    return described(outcome) | {
        "against": explanation.against.key if explanation else "",
        "changes": [
            {"component": name, "before": before, "after": after}
            for name, before, after in (explanation.changes if explanation else ())
        ],
        "words": list(explanation.words) if explanation else [],
        "graph": list(explanation.graph) if explanation else [],
    }


def _lines(outcome: Outcome, explanation: Explanation | None) -> list[str]:
    name = f"`{outcome.unit.name}` × `{outcome.target}`"
    if outcome.state == "failed":
        notes = getattr(outcome.error, "__notes__", ())
        return [f"{name} cannot be derived: {outcome.error}", *(f"  {note}" for note in notes)]
    if outcome.state == "cached":
        lines = [f"{name} hits ({outcome.tier}): {outcome.key[:16]}…"]
        what = "the record before it"
    else:
        lines = [f"{name} would compile: {outcome.reason}"]
        what = "the nearest record"
    if outcome.always:
        lines.append(f"  always derive: {outcome.always}")
    if explanation:
        lines.append(f"  against {what} ({explanation.against.key[:16]}…):")
        lines += [f"    {word}" for word in explanation.words]
        lines += [f"      {line}" for line in explanation.graph]
    return lines
