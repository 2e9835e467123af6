"""What an all-hit build costs when every unit is found by its recipe.

    python tests/benchmarks/bench_recipes.py [--units 10 100 1000]

Each unit has a module of its own, a toy compiler and one recipe. Prints milliseconds a build and
microseconds a unit, and where they go, with the targets they are held against: linear, at most
300 us a unit beyond 50 ms.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import toy_repo as toy
from max_build.config import Settings, load_settings
from max_build.pipeline import build
from max_build.recall import Recall
from max_build.recipe import broken, decode
from max_build.store import open_cache
from max_build.surroundings import Here
from max_build.target import Target
from max_build.workers import environment


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--units", type=int, nargs="*", default=[10, 100, 1000])
    with tempfile.TemporaryDirectory() as folder:
        site = toy.write_compiler(Path(folder, "site"))
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = str(site)
        os.environ["MAX_BUILD_CACHE_DIR"] = f"{folder}/cache"
        for count in parser.parse_args().units:
            measure(Path(folder, str(count)), count)


def measure(root: Path, count: int) -> None:
    (root / "src" / "toy").mkdir(parents=True)
    (root / "src" / "toy" / "__init__.py").touch()
    tables = ['[project]\nname = "toy"\n[tool.max-build]\ntargets = ["cpu"]\n']
    for n in range(count):
        (root / f"src/toy/u{n}.py").write_text(f"def build(target): return 'u{n}'\n")
        tables.append(f'[tool.max-build.graphs.u{n}]\nentry = "toy.u{n}:build"\ncompiler = "toy"\n')
    (root / "pyproject.toml").write_text("".join(tables))
    settings = load_settings(root)
    with open_cache(settings.cache) as cache:
        build(settings, cache)
    best = min(timed(lambda: all_hit(settings)) for _ in range(5))
    print(f"{count:5} units: {1e3 * best:7.1f} ms, {1e6 * best / count:6.0f} us a unit")
    if count >= 100:
        parts(settings)


def all_hit(settings: Settings) -> None:
    with open_cache(settings.cache) as cache:
        result = build(settings, cache)
    assert {one.state for one in result.outcomes} == {"cached"}


def parts(settings: Settings) -> None:
    target = Target("cpu")
    with open_cache(settings.cache) as cache:
        recall = Recall(settings, cache)
        units = settings.units
        lookups = [recall.lookup_key(unit, target) for unit in units]
        texts = [cache.recipes(lookup)[0] for lookup in lookups]
        recipes = [recipe for text in texts if (recipe := decode(text))]
        here = Here(
            settings.root,
            settings.python_path,
            environment(os.environ),
            cache.memo.digest_of,
            settings.toolchain,
        )
        for name, each in (
            ("lookup key", lambda n: recall.lookup_key(units[n], target)),
            ("recipes from the store", lambda n: cache.recipes(lookups[n])),
            ("decode", lambda n: decode(texts[n])),
            ("holds", lambda n: broken(recipes[n], here)),
            ("record from the store", lambda n: cache.lookup(recipes[n].key)),
        ):
            took = timed(lambda each=each: [each(n) for n in range(len(units))])  # type: ignore[misc]
            print(f"             {name}: {1e6 * took / len(units):.0f} us")


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
