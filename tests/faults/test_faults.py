"""Every error of the file system at every call, a kill at every call, and a clock that jumps.

See inject.c for how, steps.py for what. None may give wrong bytes or raise what is no error of
ours; a fault of the cache may not cost a build; and the next run without faults has to be well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from injector import compiled

RIG = Path(__file__).with_name("rig.py")

# Step → how many calls lie between two that meet the same fault; others meet others.
STRIDES = {
    "load": 4,
    "load-from-cache": 17,
    "load-editable": 61,
    "hit": 131,
    "hit-project": 43,
    "miss": 650,
    "publish": 140,
    "fetch": 19,
    "collect": 110,
    "empty": 120,
    "verify": 110,
    "edited-part": 260,
    "edited-table": 260,
    "edited-extra": 240,
}
IN_SHORT = set(STRIDES) - {"edited-part", "empty", "hit-project"}  # their like is there
KERNELS = {"kernels-hit": 330, "kernels-edited": 560, "kernels-load": 17}

needs_cuda = pytest.mark.skipif(
    not importlib.util.find_spec("cuda") or not importlib.util.find_spec("cuda.bindings"),
    reason="cuda-bindings is not installed",
)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[[dict[str, int]], None]]:
    """Tries steps, each with its stride, and tells how often."""
    variables = compiled(tmp_path)
    # In memory, if it can be: a run makes its files anew a thousand times.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:

        def run(strides: dict[str, int]) -> None:
            arguments = [f"{step}:{stride}" for step, stride in strides.items()]
            done = subprocess.run(
                [sys.executable, str(RIG), folder, *arguments],
                env={**os.environ, **variables, "PYTHONPATH": str(RIG.parents[1])},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            tried = [json.loads(line) for line in done.stdout.splitlines()]
            for one in tried:
                states = ", ".join(f"{count} {state}" for state, count in one["states"].items())
                print(
                    f"{one['step']}: {one['tried']} faults at {one['calls']} calls "
                    f"in {one['seconds']} s: {states}"
                )
            failures = [failure for one in tried for failure in one["failures"]]
            assert not failures, "\n\n".join([f"{len(failures)} failures", *failures[:10]])
            assert [one["step"] for one in tried] == list(strides)
            assert all(one["tried"] > 10 for one in tried)

        yield run


def test_some_faults_at_some_calls(rig: Callable[[dict[str, int]], None]) -> None:
    rig({step: STRIDES[step] for step in STRIDES if step in IN_SHORT})


@needs_cuda
def test_some_faults_at_some_calls_for_kernels(rig: Callable[[dict[str, int]], None]) -> None:
    rig(KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("step", STRIDES)
def test_every_fault_at_every_call(rig: Callable[[dict[str, int]], None], step: str) -> None:
    rig({step: 1})


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("step", KERNELS)
def test_every_fault_at_every_call_for_kernels(
    rig: Callable[[dict[str, int]], None], step: str
) -> None:
    rig({step: 1})
