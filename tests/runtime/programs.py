"""Runs programs under `max-build run`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run_under(
    tmp_path: Path, code: str, *arguments: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run Python code below `max-build run`."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(code))
    command = [
        sys.executable,
        "-m",
        "max_build",
        "-v",
        "run",
        *arguments,
        "--",
        sys.executable,
        str(program),
    ]
    return subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
