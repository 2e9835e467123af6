"""`max-build run`: any MAX program through the cache, with no change to its code.

`site/max_build_run.py` waits until the program imports MAX and then puts the cache under
`InferenceSession.compile` (see `session_cache`). A program that never does pays for one object in
`sys.meta_path`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping

__all__ = ["HOST", "PROJECT", "SITE", "VERBOSE", "environment", "install"]

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""Goes first on PYTHONPATH: its `sitecustomize` calls `install` in every child process."""

HOST = "MAX_BUILD_RUN_HOST"
"""The CPU baseline to compile host code for; unset means the CPU of the machine."""

PROJECT = "MAX_BUILD_RUN_PROJECT"
"""The project whose cache settings hold."""

VERBOSE = "MAX_BUILD_RUN_VERBOSE"
"""Tell at the end of each process what was hit and what was compiled."""


def install() -> None:
    """Put the cache under this process's `InferenceSession`s, now or when MAX is imported."""
    if SITE not in sys.path:
        sys.path.append(SITE)
    importlib.import_module("max_build_run").install()


def environment(
    base: Mapping[str, str], *, project: str = "", host: str = "", verbose: bool = False
) -> dict[str, str]:
    """The environment in which a command and its Python child processes go through the cache."""
    found = dict(base)
    before = found.get("PYTHONPATH", "")
    if SITE not in before.split(os.pathsep):
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (SITE, before)))
    wanted = {PROJECT: project, HOST: host, VERBOSE: "1" if verbose else ""}
    return found | {name: value for name, value in wanted.items() if value}
