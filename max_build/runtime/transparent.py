"""`max-build run`: any MAX program through the cache, with no change to its code.

`install` waits until the program imports MAX and then puts the cache under
`InferenceSession.compile` (see `session_cache`). A program that never does pays for one object in
`sys.meta_path`.
"""

from __future__ import annotations

import os
import sys
from importlib import util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec

__all__ = ["HOST", "PROJECT", "SITE", "VERBOSE", "environment", "install"]

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""Goes first on PYTHONPATH: its `sitecustomize` calls `install` in every child process."""

HOST = "MAX_BUILD_RUN_HOST"
"""The CPU baseline to compile host code for; unset means the CPU of the machine."""

PROJECT = "MAX_BUILD_RUN_PROJECT"
"""The project whose cache settings hold."""

VERBOSE = "MAX_BUILD_RUN_VERBOSE"
"""Tell at the end of each process what was hit and what was compiled."""

_MODULE = "max.engine.api"


def install() -> None:
    """Put the cache under this process's `InferenceSession`s, now or when MAX is imported."""
    if _MODULE in sys.modules:
        _patch()
    elif not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


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


def _patch() -> None:
    try:
        from max_build.runtime.session_cache import patch

        patch()
    except Exception as error:  # noqa: BLE001 - the program has to run as it does without us
        print(f"max-build: graphs are not cached: {type(error).__name__}: {error}", file=sys.stderr)


class _Finder:
    """Finds one module for the import system, and acts as soon as it was executed."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the protocol's
        target: Any = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder`; the other finders do the finding."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            _patch()

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
