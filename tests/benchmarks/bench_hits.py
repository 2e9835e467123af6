"""A hit on a compiled kernel, beside a hit in the cache of everybody else who compiles kernels.

    python tests/benchmarks/bench_hits.py [--quick] [--json FILE]

From the source to a cubin, in a process that did it before and in one that just started: ours
(which verifies what it hands out), `FileStreamProgramCache` of cuda.core, ccache before nvcc, and
Triton's own. What is not installed is left out.
"""

from __future__ import annotations

import gc
import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import measure
from bench_kernels import SMALL, project
from measure import Figure, process, ratio_at_most, say, timed_turns, turns

from max_build import load_settings, open_cache
from max_build.compilers import Job
from max_build.compilers.cuda import CudaCompiler
from max_build.config import Settings
from max_build.key import key_of
from max_build.pipeline import build
from max_build.recipes.recall import Recall
from max_build.store import Hit
from max_build.target import Target

TARGET = Target("sm_90a")

# A program for each peer: source in, cubin out, from the start of a process.
CUDA_CORE = """
import sys
from pathlib import Path
from cuda.core import ProgramOptions
from cuda.core.utils import FileStreamProgramCache, make_program_cache_key
cache = FileStreamProgramCache(sys.argv[1])
for path in sys.argv[2:]:
    source = Path(path).read_text()
    key = make_program_cache_key(
        code=source, code_type="c++", options=ProgramOptions(arch="sm_90a"), target_type="cubin"
    )
    assert cache.get(key)
"""
TRITON = """
import sys, time
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
sys.path.insert(0, sys.argv[1])
from rows import scaled
def hit(block):
    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(scaled, signature, {"BLOCK": block})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
blocks = [int(one) for one in sys.argv[3:]]
for block in blocks:
    assert hit(block)
for _ in range(int(sys.argv[2])):
    started = time.perf_counter()
    for block in blocks:
        hit(block)
    print(f"{(time.perf_counter() - started) / len(blocks):.9f}")
"""
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def scaled(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2.0 * tl.load(x + at, mask=at < n), mask=at < n)
"""


def figures(quick: bool) -> Iterator[Figure]:
    """Against each peer that is installed."""
    rounds = 3 if quick else 9
    with measure.scratch() as base:
        root = project(
            base / "repo", {f"k{n}": (SMALL.format(n=n), "") for n in range(10 if quick else 100)}
        )
        settings = load_settings(root)
        with open_cache(settings.cache) as cache:
            build(settings, cache)
        measure.settle()
        if importlib.util.find_spec("cuda.core.utils"):
            yield from _cuda_core(base, settings, rounds)
        if shutil.which("ccache") and shutil.which("nvcc"):
            yield from _ccache(base, settings, rounds)
        if importlib.util.find_spec("triton"):
            yield from _triton(base, 2 if quick else 5, rounds)


def _cuda_core(base: Path, settings: Settings, rounds: int) -> Iterator[Figure]:
    from cuda.core import ObjectCode, Program, ProgramOptions
    from cuda.core.utils import FileStreamProgramCache, make_program_cache_key

    say("hits in the process, and in a new one, beside cuda.core")
    # A cubin of one source without headers: there the two do the same. Theirs cannot know the
    # headers of a source, so they are written into it.
    root = Path(settings.root)
    header = "#pragma once\n" + (root / "kernels" / "common.cuh").read_text()
    sources = []
    for unit in settings.units:
        path = root / unit.declared["source"]
        path.write_text(path.read_text().replace('#include "common.cuh"', header))
        sources.append(path)
    with open_cache(settings.cache) as cache:
        build(settings, cache)
    measure.settle()
    options = ProgramOptions(arch=str(TARGET))
    folder = base / "cuda-core"
    with FileStreamProgramCache(folder) as filled:
        for path in sources:
            Program(path.read_text(), "c++", options=options).compile("cubin", cache=filled)

    def warmed(hit: Callable[[int], ObjectCode]) -> Callable[[], float]:
        """Seconds of one hit, of as many as there are sources; each is the first of its kind.

        From a source on disk to an `ObjectCode`, which has not been read by a driver yet.
        """

        def run() -> float:
            hit(0)
            gc.collect()
            started = time.perf_counter()
            for number in range(1, len(sources)):
                hit(number)
            return (time.perf_counter() - started) / (len(sources) - 1)

        return run

    def ours() -> float:
        with open_cache(settings.cache) as cache:
            adapter = CudaCompiler()

            def hit(number: int) -> ObjectCode:
                unit = settings.units[number]
                job = Job(unit, TARGET, root, settings.python_path, base, cache.memo)
                found = cache.lookup(key_of(adapter.derive(job).components))
                assert isinstance(found, Hit), found
                return ObjectCode.from_cubin(str(cache.path(found.record.blobs[0])))

            return warmed(hit)()

    def theirs() -> float:
        with FileStreamProgramCache(folder) as theirs:

            def hit(number: int) -> ObjectCode:
                key = make_program_cache_key(
                    code=sources[number].read_text(),
                    code_type="c++",
                    options=ProgramOptions(arch=str(TARGET)),
                    target_type="cubin",
                )
                return ObjectCode.from_cubin(theirs.get(key))

            return warmed(hit)()

    def through_program() -> float:
        with FileStreamProgramCache(folder) as theirs:

            def hit(number: int) -> ObjectCode:
                program = Program(
                    sources[number].read_text(), "c++", options=ProgramOptions(arch=str(TARGET))
                )
                return program.compile("cubin", cache=theirs)

            return warmed(hit)()

    found = turns(rounds, ours=ours, theirs=theirs, through_program=through_program)
    mine = measure.each(found["ours"], 1e6)
    for peer, name in (
        ("FileStreamProgramCache, key and get", "theirs"),
        ("… as Program.compile(cache=…)", "through_program"),
    ):
        samples = measure.each(found[name], 1e6)
        yield Figure("NVRTC: a hit in a warm process", "us", mine, peer, samples, ratio_at_most(1))
    for count in (1, len(sources)):
        names = [unit.name for unit in settings.units[:count]]
        found = turns(
            rounds,
            ours=lambda names=names: _command(root, "build", "--require-hit", *names),
            theirs=lambda count=count: process(
                [sys.executable, "-c", CUDA_CORE, folder, *sources[:count]]
            ),
        )
        what = f"NVRTC: a new process, {count} hit{'s' * (count > 1)}"
        ended = [[one.seconds for one in found[name]] for name in ("ours", "theirs")]
        yield Figure(what, "s", ended[0], "FileStreamProgramCache", ended[1], ratio_at_most(1))
        peaks = [[one.peak_mb for one in found[name]] for name in ("ours", "theirs")]
        yield Figure("… its peak memory", "MB", peaks[0], "FileStreamProgramCache", peaks[1])


def _command(root: Path, *arguments: str) -> measure.Ended:
    return process(
        [sys.executable, "-m", "max_build", *arguments], cwd=root, env=measure.environment()
    )


def _ccache(base: Path, settings: Settings, rounds: int) -> Iterator[Figure]:
    count = min(30, len(settings.units))
    say(f"{count} compiles by nvcc through ccache, to have hits there")
    root = Path(settings.root)
    environment = measure.environment(CCACHE_DIR=base / "ccache")

    def through(number: int) -> None:
        code = f"arch={str(TARGET).replace('sm_', 'compute_')},code={TARGET}"
        source = settings.units[number].declared["source"]
        command = [
            "ccache",
            "nvcc",
            "-gencode",
            code,
            "-cubin",
            "-c",
            source,
            "-o",
            base / "out.cubin",
        ]
        process(command, cwd=root, env=environment)

    for number in range(count):
        through(number)
    before = _ccache_hits(environment)
    for size in (1, count):
        names = [unit.name for unit in settings.units[:size]]
        found = timed_turns(
            rounds,
            ours=lambda names=names: _command(root, "build", "--require-hit", *names),
            theirs=lambda size=size: [through(number) for number in range(size)],
        )
        what = f"NVRTC: a new process, {size} hit{'s' * (size > 1)}"
        peer = "ccache before nvcc" + (f", {size} times" if size > 1 else "")
        yield Figure(what, "s", found["ours"], peer, found["theirs"])
    hits = _ccache_hits(environment) - before
    assert hits == rounds * (1 + count), f"ccache had {hits} hits of {rounds * (1 + count)}"


def _ccache_hits(environment: dict[str, str]) -> int:
    told = process(["ccache", "--print-stats"], env=environment).out.splitlines()
    counts = dict(line.split("\t") for line in told if "\t" in line)
    return int(counts["direct_cache_hit"]) + int(counts["preprocessed_cache_hit"])


def _triton(base: Path, count: int, rounds: int) -> Iterator[Figure]:
    say(f"{count} Triton kernels, compiled by both")
    blocks = [str(64 << n) for n in range(count)]
    root = base / "triton"
    (root / "src").mkdir(parents=True)
    (root / "src" / "rows.py").write_text(KERNEL)
    tables = [f'[project]\nname = "rows"\n[tool.max-build]\ntargets = ["{TARGET}"]\n']
    for block in blocks:
        tables.append(
            f'[tool.max-build.kernels.b{block}]\nentry = "rows:scaled"\n'
            'signature = { x = "*fp32", y = "*fp32", n = "i32" }\n'
            f"constexprs = {{ BLOCK = {block} }}\n"
        )
    (root / "pyproject.toml").write_text("".join(tables))
    _command(root, "build")
    measure.settle()
    _command(root, "build", "--require-hit")
    environment = measure.environment(TRITON_CACHE_DIR=base / "triton-cache")

    def theirs(repeats: int, number: int = count) -> measure.Ended:
        program = [sys.executable, "-c", TRITON, root / "src", repeats]
        return process([*program, *blocks[:number]], env=environment)

    theirs(0)
    found = turns(
        rounds,
        ours=lambda: _command(root, "build", "--require-hit", f"b{blocks[0]}"),
        theirs=lambda: theirs(0, 1),
    )
    seconds, peaks = (
        {name: [take(one) for one in ended] for name, ended in found.items()}
        for take in (lambda one: one.seconds, lambda one: one.peak_mb)
    )
    what, peer = "Triton: a new process, 1 hit", "Triton's own cache"
    yield Figure(what, "s", seconds["ours"], peer, seconds["theirs"], ratio_at_most(1))
    yield Figure("… its peak memory", "MB", peaks["ours"], peer, peaks["theirs"])
    warm = turns(
        rounds,
        ours=lambda: _recalled(root),
        theirs=lambda: float(theirs(1).out.split()[-1]),
    )
    mine, their = (measure.each(warm[name], 1e6) for name in ("ours", "theirs"))
    yield Figure("Triton: a hit in a warm process", "us", mine, peer, their, ratio_at_most(1))


def _recalled(root: Path) -> float:
    """Seconds of one hit by its recipe, in a process that has just had all of them."""
    settings = load_settings(root)
    with open_cache(settings.cache) as cache:
        for _ in range(2):
            recall = Recall(settings, cache)
            started = time.perf_counter()
            for unit in settings.units:
                found = cache.lookup(recall.key(unit, TARGET))
                assert isinstance(found, Hit), found
                assert cache.path(found.record.blobs[0]).read_bytes()
            seconds = time.perf_counter() - started
    return seconds / len(settings.units)


if __name__ == "__main__":
    measure.main("hits", figures, __doc__)
