"""The stress in short on every run, and in long where it is asked for (`-m slow`)."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))

from cache_servers import program
from driver import Plan, stress
from events import Bad, Closing, Compiled, Damaged, Event, Killed, Lost, Planned, Published
from ground import KINDS, ground
from judge import DRIVER, judge

from max_build.store.stats import Totals

SHORT = ("builder", "loader", "collector", "verifier")
NEEDS = {"nginx": "nginx", "s3": "weed"}


def run(plan, folder):
    print(f"seed {plan.seed}")
    verdict = stress(plan, folder)
    print(dict(verdict.counts))
    assert not verdict.problems, "\n".join([f"seed {plan.seed}", *verdict.problems])
    return verdict.counts


@pytest.mark.parametrize("tier", ["own", "shared"])
def test_a_cache_survives_kills_and_damage(tmp_path, tier):
    # Until two were killed and two entries evicted, however long a busy machine takes.
    plan = Plan(tier=tier, seconds=1, seed=random.randrange(1 << 20), roles=SHORT, quota=2,
                max_size=50_000, units=16, pace=0.6)  # fmt: skip
    counts = run(plan, tmp_path)
    assert counts["kills"] >= 2
    assert counts["evictions"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("tier", KINDS)
def test_a_cache_survives_two_minutes_of_kills_and_damage(tmp_path, tier):
    if tier in NEEDS and program(NEEDS[tier]) is None:
        pytest.skip(f"`{NEEDS[tier]}` is not installed")
    run(Plan(tier=tier, seconds=120, seed=random.randrange(1 << 20)), tmp_path)


# --- the judge itself: each thing that must not be, without a cause and with one

KEY, OTHER, BLOB = "a" * 64, "b" * 64, "c" * 64


def problems(tmp_path, kind, mine, driver=()):
    with ground(kind, tmp_path) as where:
        return judge(where, {0: mine, DRIVER: driver}).problems


def compiled(at, digest=BLOB, machine=0):
    return Compiled(at, KEY, (digest,), machine)


GONE = Planned(2.0, "0", (KEY,), (BLOB,))
FLIPPED = Damaged(2.5, 2.0, "0", BLOB, gone=False)
TWICE = [compiled(1.0), Published(1.5, KEY, BLOB), compiled(3.0, OTHER)]


def test_wrong_bytes_need_damage_while_they_were_read(tmp_path):
    bad = Bad(3.0, 2.2, BLOB, held=False)
    assert problems(tmp_path, "own", [bad])
    assert problems(tmp_path, "own", [GONE, bad])
    assert problems(tmp_path, "own", [Bad(3.0, 2.7, BLOB, held=False)], [FLIPPED])
    assert not problems(tmp_path, "own", [bad], [FLIPPED])


def test_a_blob_that_is_gone_needs_a_gc_or_damage(tmp_path):
    lost = Lost(3.0, 1.0, BLOB, 0)
    assert problems(tmp_path, "own", [lost])
    assert not problems(tmp_path, "own", [GONE, lost])
    assert not problems(tmp_path, "own", [lost], [FLIPPED])


def test_a_second_compile_needs_a_loss_or_a_kill(tmp_path):
    assert problems(tmp_path, "own", TWICE)
    assert not problems(tmp_path, "own", [*TWICE[:2], GONE, TWICE[2]])
    assert not problems(tmp_path, "own", [TWICE[0], TWICE[2]], [Killed(1.2, 0)])
    late = [compiled(1.0), compiled(1.2, OTHER), Published(1.5, KEY, BLOB)]
    assert problems(tmp_path, "own", late)


def test_with_an_outer_tier_a_local_loss_is_no_cause(tmp_path):
    assert problems(tmp_path, "shared", [*TWICE[:2], GONE, TWICE[2]])


@pytest.mark.parametrize(
    ("totals", "warnings"),
    [
        (Totals(hits={"local": 2}), ()),
        (Totals(hits={"local": 1}, misses={"absent": 2}, faults={"local/io": 1}), ("io",)),
        (Totals(hits={"local": 3}, faults={"local/corrupt": 1}), (f"blob {BLOB[:12]} is damaged",)),
        (Totals(hits={"local": 3}), ("left out",)),
    ],
)
def test_counters_must_add_up_and_faults_have_a_cause(tmp_path, totals, warnings):
    closing: Event = Closing(3.0, 0, 3, 3, totals, warnings)
    assert problems(tmp_path, "own", [closing])
    healed = "local/corrupt" in totals.faults
    assert (not problems(tmp_path, "own", [closing], [FLIPPED])) == healed
