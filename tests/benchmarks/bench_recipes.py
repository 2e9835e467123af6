"""What an all-hit build costs when every unit is found by its recipe.

    python tests/benchmarks/bench_recipes.py [--units 10 100 1000]

Each unit has a module of its own, a toy compiler and one recipe, as a worker of its own would have
noted it (MAX's graphs have one each). Prints milliseconds of processor time and of wall time for
the whole hook but hatchling's part, and microseconds a unit beyond 50 ms, held against 300; then
where they go.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import toy_repo as toy
from max_build.config import Settings, load_settings
from max_build.packaging import into_wheel
from max_build.pipeline import build
from max_build.recall import Recall
from max_build.recipe import Recipe, broken, decode, encode
from max_build.store import open_cache
from max_build.surroundings import Here
from max_build.target import Target
from max_build.workers import environment

KEPT = ("toy", "__init__")


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
        recall = Recall(settings, cache)
        for unit in settings.units:
            lookup = recall.lookup_key(unit, Target("cpu"))
            cache.add_recipe(lookup, encode(narrowed(cache.recipes(lookup)[0], unit.name)), 1)
    time.sleep(2.1)  # what was written has settled, as in any build but the first
    wall, processor = min((hook(root) for _ in range(5)), key=lambda pair: pair[1])
    beyond = max(0.0, processor - 0.05) / count
    print(
        f"{count:5} units: {1e3 * processor:7.1f} ms of processor, {1e3 * wall:7.1f} ms of wall, "
        f"{1e6 * beyond:4.0f} us a unit beyond 50 ms {'ok' if beyond <= 300e-6 else 'NO'}"
    )
    if count >= 100:
        parts(settings)


def narrowed(text: bytes, unit: str) -> Recipe:
    """A recipe without what other units of the same worker had read."""
    recipe = decode(text)
    assert recipe is not None
    return msgspec.structs.replace(
        recipe,
        files={
            path: found
            for path, found in recipe.files.items()
            if path.endswith(("__init__.py", f"/{unit}.py"))
        },
        modules={
            folder: {name: found for name, found in modules.items() if name in (unit, *KEPT)}
            for folder, modules in recipe.modules.items()
        },
    )


def hook(root: Path) -> tuple[float, float]:
    """Wall and processor seconds of one all-hit run of the hook, where nothing may compile."""
    build_data: dict[str, Any] = {"force_include": {}, "extra_metadata": {}}
    wheel = SimpleNamespace(packages=["src/toy"])
    said = SimpleNamespace(display_info=len, display_warning=len, display_waiting=len)
    wall, processor = time.perf_counter(), time.process_time()
    into_wheel(str(root), "standard", {"require-hit": True}, wheel, build_data, said)
    return time.perf_counter() - wall, time.process_time() - processor


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
    started = time.process_time()
    call()
    return time.process_time() - started


if __name__ == "__main__":
    main()
