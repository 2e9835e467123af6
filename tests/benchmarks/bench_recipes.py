"""Where the time of an all-hit build goes when every unit is found by its recipe.

    python tests/benchmarks/bench_recipes.py [--quick] [--json FILE]

In one process, after its imports: what a profile is held against. What the whole of it costs in a
process of its own is in `bench_hook.py`, whose repos these are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import bench_hook
import measure
from measure import Figure, at_most, growth, say

from max_build.config import Settings, load_settings
from max_build.pipeline import build
from max_build.recipes.recall import Recall
from max_build.recipes.recipe import broken, decode
from max_build.recipes.surroundings import Here
from max_build.store import open_cache
from max_build.target import Target
from max_build.workers import environment

TARGET = Target("cpu")


def figures(quick: bool) -> Iterator[Figure]:
    """Processor time of a whole build, then of its parts, per unit."""
    sizes = (10, 20, 40) if quick else (100, 300, 1000)
    costs: dict[int, list[float]] = {}
    with measure.scratch() as base:
        derived = bench_hook.derive(base / "one")
        for count in sizes:
            say(f"{count:,} units in this process")
            root = base / f"repo-{count}"
            bench_hook.make(root, count, hook=True)
            settings = load_settings(root)
            bench_hook.fill(settings, derived)
            measure.settle()
            costs[count] = [_whole(settings) for _ in range(6)][1:]
            what = f"{count:,} units, processor time of a build"
            limit = at_most(50 + 0.3 * count)
            yield Figure(what, "ms", measure.each(costs[count], 1e3), target=limit)
        yield growth("units, processor time of a build", costs, "us", 1.5)
        yield from _parts(settings)


def _whole(settings: Settings) -> float:
    started = time.process_time()
    with open_cache(settings.cache) as cache:
        result = build(settings, cache, mode="require-hit")
    assert not result.failed, result.failed[0]
    return time.process_time() - started


def _parts(settings: Settings) -> Iterator[Figure]:
    units = settings.units
    with open_cache(settings.cache) as cache:
        recall = Recall(settings, cache)
        lookups = [recall.lookup_key(unit, TARGET) for unit in units]
        texts = [cache.recipes(lookup)[0] for lookup in lookups]
        recipes = [recipe for text in texts if (recipe := decode(text))]

        def held() -> None:
            here = Here(
                settings.root,
                settings.python_path,
                environment(os.environ),
                cache.memo.digest_of,
                settings.toolchain,
            )
            assert not any(broken(recipe, here) for recipe in recipes)

        parts: dict[str, Callable[[], object]] = {
            "its lookup key": lambda: [recall.lookup_key(unit, TARGET) for unit in units],
            "its recipes from the store": lambda: [cache.recipes(one) for one in lookups],
            "decoding a recipe": lambda: [decode(text) for text in texts],
            "whether a recipe holds": held,
            "its record from the store": lambda: [cache.lookup(one.key) for one in recipes],
        }
        for name, part in parts.items():
            took = []
            for _ in range(5):
                started = time.process_time()
                part()
                took.append(1e6 * (time.process_time() - started) / len(units))
            yield Figure(f"of a unit: {name}", "us", took)


if __name__ == "__main__":
    measure.main("recipes", figures, __doc__)
