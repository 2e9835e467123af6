"""Run by `site` at the start of each Python process below `max-build run`.

It stands in front of the environment's own `sitecustomize`, which it runs in its turn.
"""

import os
import sys

import max_build_run  # type: ignore[import-not-found, unused-ignore]


def _chain() -> None:
    """Run the module of this name that would have been found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    before = sys.path[:]
    sys.path[:] = [one for one in before if os.path.abspath(one) != here]
    this = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)
        # what it put on the path stays, in its place
        sys.path[:0] = [one for one in before if os.path.abspath(one) == here]


max_build_run.install()
_chain()
