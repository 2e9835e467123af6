"""What an all-hit `hatch build` costs, in processes of their own, beside hatchling with no hook.

    python tests/benchmarks/bench_hook.py [--quick] [--json FILE]

Each unit is a graph of its own module. One of them is derived by a MAX worker; the recipes and
records of the others are what a worker of theirs would have left.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import measure
import msgspec
from measure import Ended, Figure, at_most, growth, process, pyproject, say, turns

from max_build.config import Settings, load_settings
from max_build.errors import MaxBuildError
from max_build.key import digest, key_of
from max_build.messages import Derive, Derived
from max_build.recipes.recall import Recall
from max_build.recipes.recipe import Recipe
from max_build.record import Blob, Record
from max_build.store import open_cache
from max_build.target import Target
from max_build.workers import Workers
from support import GRAPH

SIZES = (1, 10, 100, 1000)
HOOK = 'require-hit = true\n[tool.max-build]\ntargets = ["cpu"]\n'
# `python -m hatchling` with a clock around the hook.
BUILD = """
import sys, time
from max_build.hatch_plugin import MaxBuildHook
from hatchling.cli import hatchling
plain = MaxBuildHook.initialize
def initialize(self, version, build_data):
    started = time.perf_counter()
    plain(self, version, build_data)
    print(f"the hook took {time.perf_counter() - started:.6f} s")
MaxBuildHook.initialize = initialize
sys.argv = ["hatchling", "build", "-t", "wheel"]
sys.exit(hatchling())
"""


def figures(quick: bool) -> Iterator[Figure]:
    """The hook and the whole process for each number of units."""
    rounds = 3 if quick else 7
    hooks: dict[int, list[float]] = {}
    with measure.scratch() as base:
        derived = derive(base / "one")
        for count in SIZES[: 3 if quick else 4]:
            say(f"a repo of {count:,} units, all in the cache")
            repo, plain = base / f"hook-{count}", base / f"plain-{count}"
            make(repo, count, hook=True)
            make(plain, count, hook=False)
            fill(load_settings(repo), derived)
            measure.settle()
            hatchling(repo)  # once, so that the next one finds bytecode and a memory
            hatchling(plain)
            found = turns(
                rounds, ours=lambda repo=repo: hatchling(repo), plain=lambda p=plain: hatchling(p)
            )
            hooks[count] = [hook_of(one) for one in found["ours"]]
            units = f"{count:,} unit{'s' * (count != 1)}"
            limit = at_most(500) if count == 1000 else None
            taken = measure.each(hooks[count], 1e3)
            yield Figure(f"the hook alone, {units}", "ms", taken, target=limit)
            if count >= 100:
                beyond = [1e3 * max(0.0, one - 50) / count for one in taken]
                yield Figure("… per unit, beyond 50 ms", "us", beyond, target=at_most(300))
            for what, unit, take in (
                ("hatchling's whole process", "s", lambda one: one.seconds),
                ("… its peak memory", "MB", lambda one: one.peak_mb),
            ):
                ours, theirs = ([take(one) for one in found[name]] for name in ("ours", "plain"))
                yield Figure(f"{what}, {units}", unit, ours, "hatchling, no hook", theirs)
        yield growth("the hook", hooks, "us", 1.5)


def make(root: Path, count: int, *, hook: bool) -> None:
    """A repo of `count` graphs; without `hook`, of their modules alone."""
    package = root / "src" / "many"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    tables = [pyproject("src/many", HOOK if hook else None)]
    for n in range(count):
        (package / f"g{n}.py").write_text(text(n))
        if hook:
            tables.append(f'[tool.max-build.graphs.g{n}]\nentry = "many.g{n}:build"\n')
    (root / "pyproject.toml").write_text("".join(tables))


def text(number: int) -> str:
    """The source of a graph."""
    return GRAPH.replace("[1.0, 2.0,", f"[{number + 1}.5, 2.0,")


def derive(root: Path) -> Derived:
    """What a MAX worker answers for the graph of number 0."""
    make(root, 1, hook=True)
    settings = load_settings(root)
    unit = settings.units[0]
    scratch = root / "scratch"
    scratch.mkdir()
    workers = Workers(root)
    try:
        with workers.worker(unit.compiler) as worker:
            asked = Derive(unit, "cpu", str(root), settings.python_path, str(scratch))
            answer = worker.ask(asked, Derived, timeout=600)
    finally:
        workers.close()
    if answer.recipe is None:
        message = f"no recipe: {answer.always}"
        raise MaxBuildError(message)
    return answer


def fill(settings: Settings, derived: Derived) -> None:
    """Put a record, a blob and a recipe of each unit into the cache."""
    assert derived.recipe is not None
    with open_cache(settings.cache) as cache:
        recall = Recall(settings, cache)
        for number, unit in enumerate(settings.units):
            data = f"artifact {number} ".encode() * 64
            sources = {"ir": digest(f"graph {number}".encode())}
            components = msgspec.structs.replace(derived.components, sources=sources)
            blob = Blob(role="mef", digest=digest(data), size=len(data))
            key = key_of(components)
            record = Record(
                key=key, unit=unit.name, components=components, blobs=(blob,), seconds=20.0
            )
            cache.publish(record, {blob.digest: data})
            module = _renamed(derived.recipe, unit.name, digest(text(number).encode()))
            recipe = msgspec.structs.replace(module, key=key, components=components)
            recall.remember(unit, Target("cpu"), recipe)


def _renamed(recipe: Recipe, unit: str, content: str) -> Recipe:
    """The recipe of `many.g0` as that of another module."""
    return msgspec.structs.replace(
        recipe,
        files={
            path.replace("/g0.py", f"/{unit}.py"): content if path.endswith("/g0.py") else found
            for path, found in recipe.files.items()
        },
        modules={
            folder: {
                (unit if name == "g0" else name): tuple(
                    f"{unit}.py" if one == "g0.py" else one for one in entries
                )
                for name, entries in modules.items()
            }
            for folder, modules in recipe.modules.items()
        },
    )


def hatchling(root: Path) -> Ended:
    """One build of the wheel."""
    return process([sys.executable, "-c", BUILD], cwd=root, env=measure.environment())


def hook_of(build: Ended) -> float:
    """Seconds that the hook itself took."""
    found = re.search(r"the hook took ([\d.]+) s", build.out)
    assert found, build.out
    return float(found[1])


if __name__ == "__main__":
    measure.main("hook", figures, __doc__)
