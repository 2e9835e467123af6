"""Waits for `max.engine.api`. Stands alone, and imports next to nothing before it came.

Every Python process below `max-build run` loads this, whether it will ever use MAX or not.
"""

import sys

__all__ = ["install"]

MODULE = "max.engine.api"


class Finder:
    """Finds one module for the import system, and acts as soon as it was executed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:  # noqa: ARG002
        """As `importlib.abc.MetaPathFinder`; the other finders do the finding."""
        if fullname != MODULE:
            return None
        from importlib import util

        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: object) -> None:
            execute(module)  # type: ignore[arg-type]
            imported()

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Put the cache under this process's `InferenceSession`s, now or when MAX is imported."""
    if "max_build.worker" in sys.orig_argv:
        return  # it compiles for a build, which has looked already
    if MODULE in sys.modules:
        imported()
    elif not any(type(one).__name__ == "Finder" for one in sys.meta_path):
        sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]


def imported() -> None:
    """Act now that the module is there."""
    try:
        from max_build.runtime.session_cache import patch
    except ImportError:
        return  # another environment's Python, without max-build: none of our business
    try:
        patch()
    except Exception as error:  # noqa: BLE001 - the program has to run as it does without us
        print(f"max-build: graphs are not cached: {type(error).__name__}: {error}", file=sys.stderr)
