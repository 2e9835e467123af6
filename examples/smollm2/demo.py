"""Build this repo, unpack its wheel, and let the model speak from there.

Run it from the root of max-build: `hatch run demo:smollm2`, with arguments of `python -m smollm2`
if you like. The first run compiles, which takes minutes; what it made stays in your cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run the demonstration with the arguments of the command line."""
    with tempfile.TemporaryDirectory(prefix="max-build-demo-") as work:
        print("— building smollm2: from the cache, or MAX compiles for some minutes", flush=True)
        started = time.perf_counter()
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", work]
        subprocess.run(build, cwd=HERE, check=True)
        (wheel,) = Path(work).glob("*.whl")
        size = wheel.stat().st_size / 1e6
        print(f"— built in {time.perf_counter() - started:.1f} s: {wheel.name}, {size:.1f} MB")
        site = Path(work, "site")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        # The wheel has to do alone, without the cache.
        environment = {**os.environ, "PYTHONPATH": str(site), "MAX_BUILD_CACHE_DIR": f"{work}/none"}
        speak = [sys.executable, "-m", "smollm2", *sys.argv[1:]]
        print("— what it says\n", flush=True)
        return subprocess.run(speak, cwd=work, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
