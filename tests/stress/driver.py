"""Runs a stress: starts the actors, kills and damages at random, and looks at what is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random

import msgspec
from actor import Part
from census import census
from damage import damage
from events import AnyEvent, Collected, Killed, Log, now, read
from ground import Ground, ground
from judge import DRIVER, Verdict, judge

HERE = Path(__file__).parent
ROLES = ("builder", "loader", "collector", "verifier", "builder", "loader", "builder", "project")
_STUCK = 300.0  # seconds until an actor that does not stop is a finding


class Plan(msgspec.Struct, frozen=True):
    """What to run.

    Parameters
    ----------
    tier
        One of `ground.KINDS`.
    seconds
        How long.
    roles
        One actor each; a `project` is one more `builder` where there is no NVRTC.
    seed
        Of all that is chance, but for who is scheduled when.
    pace
        Seconds between two misfortunes, a kill or a damage, on average.
    quota
        Go on until so many were killed and so many entries evicted, for at most `limit` seconds
        more.
    units
        How many the actors build.
    max_size
        Bytes that a machine's directory is held to.
    """

    tier: str
    seconds: float
    seed: int
    roles: tuple[str, ...] = ROLES
    pace: float = 0.2
    quota: int = 2
    limit: float = 240.0
    units: int = 48
    max_size: int = 3_000_000


class Crew:
    """The actors, one per role, each started anew when it was killed."""

    def __init__(self, plan: Plan, where: Ground) -> None:
        self.problems: list[str] = []
        self.logs: dict[int, Path] = {}
        self._plan = plan
        self._ground = where
        self._stop = Path(where.base, "stop")
        self._scratch = Path(where.base, "scratch")
        self._scratch.mkdir()
        self._builds = Path(where.base, "builds")  # what a build that is killed leaves is no fault
        self._builds.mkdir()
        self._running: dict[int, tuple[int, subprocess.Popen[str]]] = {}
        for post in range(len(plan.roles)):
            self._start(post)

    def kill(self, post: int) -> int:
        """Kill an actor in whatever it does, and start another. Returns its number."""
        number, process = self._running[post]
        process.kill()
        self._ended(number, process)
        self._start(post)
        return number

    def finish(self) -> None:
        """Let all come to an end."""
        self._stop.touch()
        for number, process in self._running.values():
            self._ended(number, process)
        # Where the cache goes if its directory fails, which it had no reason to. Other names are
        # Python's, which looks whether it can write there.
        left = [name for name in os.listdir(self._scratch) if name.startswith("max-build")]
        self.problems += [f"left in scratch: {name}" for name in left]

    def close(self) -> None:
        for _, process in self._running.values():
            process.kill()
            process.communicate()

    def _start(self, post: int) -> None:
        number = len(self.logs)
        role = self._plan.roles[post]
        if role == "project" and not find_spec("cuda.bindings"):
            role = "builder"
        self.logs[number] = log = Path(self._ground.base, f"{number}.jsonl")
        log.touch()
        part = Part(
            number=number,
            role=role,
            machine=post % len(self._ground.machines),
            seed=self._plan.seed * 1000 + number,
            stop=str(self._stop),
            max_size=self._plan.max_size,
            log=str(log),
            ground=self._ground,
        )
        process = subprocess.Popen(
            [sys.executable, str(HERE / "actor.py"), msgspec.json.encode(part).decode()],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "TMPDIR": str(self._builds if role == "project" else self._scratch),
            },
        )
        self._running[post] = number, process

    def _ended(self, number: int, process: subprocess.Popen[str]) -> None:
        try:
            _, error = process.communicate(timeout=_STUCK)
        except subprocess.TimeoutExpired:
            process.kill()
            _, error = process.communicate()
            self.problems.append(f"actor {number} did not stop: {error[-3000:]}")
            return
        if error or process.returncode not in {0, -9}:
            self.problems.append(f"actor {number} ended with {process.returncode}: {error[-3000:]}")


def stress(plan: Plan, base: Path) -> Verdict:
    """Run it in a folder of its own, and judge."""
    with ground(plan.tier, base, plan.units) as where:
        log = Log(base / "driver.jsonl")
        crew = Crew(plan, where)
        try:
            _misfortunes(plan, where, crew, log)
            crew.finish()
        finally:
            crew.close()
        logs: dict[int, Sequence[AnyEvent]] = {n: read(path) for n, path in crew.logs.items()}
        logs[DRIVER] = read(base / "driver.jsonl")
        verdict = judge(where, logs)
        problems = [*crew.problems, *verdict.problems, *census(where, logs)]
        return msgspec.structs.replace(verdict, problems=problems)


def _misfortunes(plan: Plan, where: Ground, crew: Crew, log: Log) -> None:
    chance = Random(plan.seed)
    kills = 0
    start = now()
    while True:
        time.sleep(chance.uniform(0, 2 * plan.pace))
        if chance.random() < 0.5:
            number = crew.kill(chance.randrange(len(plan.roles)))
            log.tell(Killed(now(), number))
            kills += 1
        else:
            damage(where, chance, log)
        over = now() - start - plan.seconds
        if over > plan.limit or (over > 0 and min(kills, _evicted(crew)) >= plan.quota):
            return


def _evicted(crew: Crew) -> int:
    return sum(
        event.entries
        for path in crew.logs.values()
        for event in read(path)
        if isinstance(event, Collected)
    )
