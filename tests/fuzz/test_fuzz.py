"""Every reader of what others wrote, given damaged inputs: a default run of a few hundred each.

`python tests/fuzz/run.py all` goes on from here, guided by coverage.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from catalogue import CORPUS, TARGETS, inputs
from harness import Target, attempt
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from mutation import mutated

_EXAMPLES = 200
_SETTINGS = settings(
    max_examples=_EXAMPLES,
    database=None,
    deadline=None,
    derandomize=True,  # a new finding belongs into an issue, not into somebody's unrelated change
    suppress_health_check=list(HealthCheck),
)
KEPT = [(name, label) for name, target in TARGETS.items() for label in inputs(target)]
each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@pytest.mark.parametrize(("name", "label"), KEPT, ids=map("-".join, KEPT))
def test_kept_inputs_are_judged_as_they_are_named(name: str, label: str) -> None:
    target = TARGETS[name]
    accepted = attempt(target, inputs(target)[label])
    if label.startswith(("good-", "bad-")):
        assert accepted is label.startswith("good-")


def _trial(target: Target) -> Callable[[], None]:
    """A test that damages what is kept for a target in many ways."""
    start = inputs(target)

    @given(st.sampled_from(sorted(start)), st.randoms(use_true_random=False))
    def trial(label: str, chance: Random) -> None:
        new = mutated(
            start[label], chance, target.forms, target.tokens, [start[one] for one in sorted(start)]
        )
        note(f"{label} → {new!r}")
        attempt(target, new)

    return trial


@each_target
def test_damaged_inputs(target: Target) -> None:
    settings(_SETTINGS, max_examples=_EXAMPLES // target.weight)(_trial(target))()


@pytest.mark.slow
@each_target
def test_ten_thousand_damaged_inputs(target: Target) -> None:
    count = 10_000 if target.weight < 10 else 2_000
    settings(_SETTINGS, max_examples=count, derandomize=False)(_trial(target))()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["random", "atheris"])
def test_the_command_runs_every_target(engine: str, tmp_path: Path) -> None:
    if engine == "atheris":
        pytest.importorskip("atheris")
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "all"]
    options = ["--seconds", "3", "--engine", engine, "--found", str(tmp_path)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "findings in: no target" in done.stdout


def test_the_corpus_is_small_and_its_folders_are_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= TARGETS.keys()
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 300_000
