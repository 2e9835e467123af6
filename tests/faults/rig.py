"""Try every fault at every call of a step, in forks of one process that has everything imported.

Run as a program under inject.c, with `tests` on PYTHONPATH: `rig.py FOLDER STEP:STRIDE…`. With a
stride of k, each fault meets every k-th call, and different faults different ones. Prints a line of
JSON for each step.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

from injector import Action, Fault, Injector, every_fault
from nursery import Nursery
from steps import STEPS, Act, Box, Step

import toy_repo
from max_build import compilers
from max_build.errors import MaxBuildError
from max_build.store.directory import DirectoryStore
from max_build.store.gc import gc as collect
from max_build.store.verify import verify

_POPEN = subprocess.Popen
LIMIT = 60.0  # seconds, then it hangs
PATIENCE = 40.0  # seconds; SQLite tries for 10 as it reads and as it closes, here and in a worker
SUBREAPER = 36  # prctl(2): children of children that died are ours
FAULTS = every_fault()
UPKEEP = ("tmp", "lock", "lease", "quarantine")
KEPT = {"ac", "cas", "index", "pin", "CACHEDIR.TAG", "collected", *UPKEEP}


@dataclass
class Tried:
    """What came of a step: how often it was done, over how many calls, and what was wrong."""

    step: str
    tried: int = 0
    calls: int = 0
    states: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Rig:
    """One folder and the page of memory that rules over it."""

    def __init__(self, base: Path, injector: Injector) -> None:
        subprocess.Popen = nursery = Nursery()
        self._nursery = nursery.pid
        self.box = Box(base / "work")
        self._master = base / "master"
        self._temporary = base / "tmp"
        self._injector = injector

    def prepare(self, step: Step) -> None:
        self._injector.set(Fault(Action.COUNT), 0)
        for path in (self.box.root, self._master):
            shutil.rmtree(path, ignore_errors=True)
        self.box.root.mkdir(parents=True)

        def act(box, _):
            subprocess.Popen = _POPEN  # a compiler of CUDA's does not like to be forked
            step.prepare(box)
            return "prepared", []

        answer = self.run(act)
        assert answer["state"] == "prepared", answer["error"]
        shutil.copytree(self.box.root, self._master)
        self._injector.watch(*(self.box.root / name for name in step.watched))

    def restore(self) -> None:
        for path in self._temporary.iterdir():
            shutil.rmtree(path)
        shutil.rmtree(self.box.root)
        shutil.copytree(self._master, self.box.root)

    def run(self, act: Act, *, armed: bool = False) -> dict[str, object]:
        """Do something in a fork, which tells what came of it."""
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ours)
            self._child(act, theirs, armed)
        os.close(theirs)
        data = b""
        while select.select([ours], [], [], LIMIT)[0]:
            if not (more := os.read(ours, 1 << 16)):
                break
            data += more
        else:
            data = b'{"state": "hangs", "error": "", "digests": []}'
            os.kill(pid, signal.SIGKILL)
        os.close(ours)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._injector.arm(False)
        bury(self._nursery)
        lost = {"state": f"died of {status}", "error": "", "digests": []}
        return json.loads(data) if data else lost

    def _child(self, act: Act, pipe: int, armed: bool) -> None:
        injector = self._injector

        def ease(hold: bool) -> None:
            injector.arm(armed and not hold)

        try:
            ease(False)
            state, data = act(self.box, ease)
            answer = {"state": state, "error": ""}
            answer["digests"] = [hashlib.sha256(one).hexdigest() for one in data]
        except MaxBuildError as error:
            answer = {"state": "refused", "error": f"{type(error).__name__}: {error}"}
        except BaseException:  # noqa: BLE001 - told by the parent
            answer = {"state": "crashed", "error": traceback.format_exc()}
        finally:
            injector.arm(False)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, json.dumps({"digests": [], **answer}).encode())
        os._exit(0)

    def leftovers(self) -> str:
        """What lies in the tiers that a gc would never take; empty if nothing does."""
        for root in (self.box.cache, self.box.shared):
            if not root.is_dir():
                continue
            store = DirectoryStore(root, shared=root == self.box.shared)
            new = [one for one in root.iterdir() if one.name not in KEPT]
            left = [*new, *(one for name in UPKEEP for one in root.glob(f"{name}/*"))]
            for path in left:
                os.utime(path, (1, 1), follow_symlinks=False)
            if left:
                collect(store, grace=0)
            if stay := [str(path) for path in left if os.path.lexists(path)]:
                return f"left behind: {stay}"
            if findings := verify(store, repair=False).findings:
                return f"damaged: {findings}"
        own = f"max-build-{os.getuid()}"  # where the cache goes if its own folder is no good
        shutil.rmtree(self._temporary / own, ignore_errors=True)
        temporary = [path.name for path in self._temporary.iterdir()]
        for name in temporary:
            shutil.rmtree(self._temporary / name)
        killed = self._injector.kills
        return f"left in the temporary folder: {temporary}" if temporary and not killed else ""

    def judge(self, step: Step, fault: Fault, answer: dict[str, object]) -> str:
        """What is wrong with an answer that was given under a fault; empty if nothing is."""
        state = answer["state"]
        kills = fault.action in (Action.KILL_BEFORE, Action.KILL_AFTER)
        may = step.refuses or kills or fault.sticky  # the folder may go after all was looked up
        if (state == "died of -9" and kills) or (state == "refused" and may):
            return ""
        if fault.error in step.lies:
            return "" if state != "crashed" else f"crashed: {answer['error']}"
        if state not in step.states:
            return f"{state}: {answer['error']}"
        right = {hashlib.sha256(one).hexdigest() for one in step.artifacts}
        if not set(answer["digests"]) <= right:
            return "WRONG BYTES"
        slept = self._injector.slept
        return f"SQLite would have slept {slept:.0f} s" if slept > PATIENCE else ""

    def heal(self, step: Step, fault: Fault) -> str:
        """What is wrong once the faults are over; empty if nothing is."""
        if step.after and fault.error in step.lies:
            return ""  # what was hidden from a gc is not named, and its files are gone
        answer = self.run(step.after or step.act)
        if answer["state"] in ("refused", "crashed"):
            return f"afterwards {answer['state']}: {answer['error']}"
        right = {hashlib.sha256(one).hexdigest() for one in step.healed or step.artifacts}
        if not set(answer["digests"]) <= right:
            return "WRONG BYTES afterwards"
        return self.leftovers()

    def everything(self, name: str, stride: int) -> Tried:
        step, tried, started = STEPS[name], Tried(name), time.monotonic()
        self.prepare(step)
        step.act(self.box, lambda _: None)  # here: what is imported late is imported for all
        self.restore()
        fresh = True
        for number, fault in enumerate(FAULTS):
            at = 1 + number * stride // len(FAULTS)
            while True:
                if not fresh and not step.keeps:
                    self.restore()
                self._injector.set(fault, at, clock=step.clock)
                answer = self.run(step.act, armed=True)
                struck, where = self._injector.struck, self._injector.where
                if not struck:
                    tried.calls = max(tried.calls, self._injector.calls)
                wrong = self.judge(step, fault, answer)
                # Where all went well and nothing is made anew, the next run is on what it left.
                if not (step.keeps and struck and answer["state"] == step.states[0]):
                    wrong = wrong or self.heal(step, fault)
                fresh = False
                if wrong:
                    tried.failures.append(f"{name}: {fault} at call {at}, {where}: {wrong}")
                    self.restore()
                if not struck:
                    break
                tried.tried += 1
                state = str(answer["state"])
                tried.states[state] = tried.states.get(state, 0) + 1
                at += stride
        tried.seconds = round(time.monotonic() - started, 1)
        return tried


def bury(nursery: int) -> None:
    """End what a killed process left running, and the workers that it asked for."""
    path = "/proc/{0}/task/{0}/children"
    todo = [os.getpid(), nursery]
    while todo:
        with contextlib.suppress(FileNotFoundError):
            for pid in map(int, Path(path.format(todo.pop())).read_text().split()):
                if pid == nursery:
                    continue
                todo.append(pid)
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def main(base: Path, steps: list[str]) -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    warnings.simplefilter("ignore")
    (base / "tmp").mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(base / "tmp")
    os.environ["XDG_CONFIG_HOME"] = str(base / "config")
    sys.path.insert(0, str(toy_repo.write_compiler(base / "site")))
    os.environ["PYTHONPATH"] = str(base / "site")
    for name in ("toy", "cuda"):  # looks through all that is installed, once
        compilers.get(name)
    gc.collect()
    gc.freeze()  # so that less is copied in each fork
    rig = Rig(base, Injector(Path(os.environ["FAULT_STATE"])))
    for name, _, stride in (one.partition(":") for one in steps):
        print(json.dumps(asdict(rig.everything(name, int(stride)))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
