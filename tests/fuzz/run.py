"""Fuzz a target for a while: `python tests/fuzz/run.py gguf --seconds 60`, or `all`.

Guided by coverage where `atheris` is installed, else by chance alone. A finding is written to
`--found` and ends the run with status 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import FrameType

_LONGEST = 1 << 16
_KEPT = 4096  # bytes of an input that is kept, at most


def main() -> int:
    """Run each target in a process of its own, which may end in any way."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("target", help="a target's name, or `all`")
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=0, help="of what is chance")
    parser.add_argument("--engine", choices=("atheris", "random"), help="the first that is there")
    parser.add_argument("--found", type=Path, help="folder for findings; a new one otherwise")
    parser.add_argument("--grown", type=Path, help="folder for inputs that reached new code")
    parser.add_argument("--keep", type=Path, help="keep what of such a folder reaches new code")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    engine = asked.engine or ("atheris" if find_spec("atheris") else "random")
    found = asked.found or Path(tempfile.mkdtemp(prefix="fuzz-found-"))
    found.mkdir(parents=True, exist_ok=True)
    if asked.here and asked.keep:
        return _keep(asked.target, asked.keep / asked.target)
    if asked.here:
        run = _guided if engine == "atheris" else _by_chance
        return run(asked.target, asked.seconds, asked.seed, found, asked.grown)
    from catalogue import TARGETS

    failed = []
    for name in TARGETS if asked.target == "all" else [asked.target]:
        print(f"== {name} by {engine}", flush=True)
        if _apart(name, [*sys.argv[2:], "--found", str(found)]):
            failed.append(name)
    print(f"findings in: {', '.join(failed) or 'no target'}" + (f" ({found})" if failed else ""))
    return 1 if failed else 0


def _apart(name: str, options: list[str]) -> int:
    """Run one target in another process, and clear up behind it."""
    quick = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=quick) as folder:
        command = [sys.executable, __file__, name, *options, "--here"]
        return subprocess.run(command, check=False, env={**os.environ, "TMPDIR": folder}).returncode


def _by_chance(name: str, seconds: float, seed: int, found: Path, _: Path | None) -> int:
    from catalogue import TARGETS, inputs
    from harness import attempt
    from mutation import mutated

    target = TARGETS[name]
    start = list(inputs(target).values())
    chance = Random(seed)
    count = accepted = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutated(chance.choice(start), chance, target.forms, target.tokens, start)
        count += 1
        try:
            accepted += attempt(target, data[:_LONGEST])
        except Exception:  # noqa: BLE001 - which is what is looked for
            path = found / f"{name}-{seed}-{count}"
            path.write_bytes(data)
            traceback.print_exc()
            print(f"finding: {path}")
            return 1
    print(f"{name}: {count} inputs, {accepted} of them accepted, no finding")
    return 0


def _guided(name: str, seconds: float, seed: int, found: Path, grown: Path | None) -> int:
    import atheris

    with atheris.instrument_imports(include=["max_build", "tarfile"]):
        from catalogue import TARGETS, inputs
    from harness import attempt
    from mutation import mutated

    target = TARGETS[name]
    start = inputs(target)

    def one(data: bytes) -> None:
        attempt(target, data)

    def change(data: bytes, most: int, seeded: int) -> bytes:
        chance = Random(seeded)
        if chance.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        new = mutated(data, chance, target.forms, target.tokens, list(start.values()))
        return new[:most]

    new = grown / name if grown else Path(tempfile.mkdtemp())
    new.mkdir(parents=True, exist_ok=True)
    for label, data in start.items():
        (new / label).write_bytes(data)
    atheris.Setup(
        [
            *(name, str(new), f"-max_total_time={int(seconds)}", f"-seed={seed + 1}"),
            *(f"-max_len={_LONGEST}", f"-artifact_prefix={found}/{name}-", "-timeout=20"),
            *("-rss_limit_mb=4096", "-print_final_stats=1", "-verbosity=0"),
        ],
        one,
        custom_mutator=change,
    )
    atheris.Fuzz()
    return 0


def _keep(name: str, grown: Path) -> int:
    """Copy to the corpus, by the digest of their bytes, the shortest inputs that add to it."""
    from catalogue import CORPUS, TARGETS, inputs
    from harness import attempt

    from max_build.key import digest

    def steps(data: bytes) -> set[tuple[object, int, int]]:
        """Each step from line to line of max_build's own code."""
        reached: set[tuple[object, int, int]] = set()

        def enter(frame: FrameType, *_: object) -> object:
            if "max_build" not in frame.f_code.co_filename:
                return None
            before = 0

            def step(frame: FrameType, *_: object) -> object:
                nonlocal before
                reached.add((frame.f_code, before, frame.f_lineno))
                before = frame.f_lineno
                return step

            return step

        sys.settrace(enter)  # type: ignore[arg-type]
        try:
            attempt(TARGETS[name], data)
        finally:
            sys.settrace(None)
        return reached

    known = set().union(*map(steps, inputs(TARGETS[name]).values()))
    for path in sorted(grown.iterdir(), key=lambda path: (path.stat().st_size, path.name)):
        data = path.read_bytes()
        if len(data) <= _KEPT and (new := steps(data) - known):
            known |= new
            (CORPUS / name).mkdir(parents=True, exist_ok=True)
            (CORPUS / name / digest(data)[:16]).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
