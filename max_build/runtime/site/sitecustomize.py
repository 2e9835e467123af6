"""Run by `site` at the start of each Python process below `max-build run`.

It stands in front of the environment's own `sitecustomize`, which it runs in its turn.
"""


def _install() -> None:
    try:
        from max_build.runtime import transparent
    except ImportError:
        return  # another environment's Python, without max-build: none of our business
    transparent.install()


def _chain() -> None:
    """Run the module of this name that would have been found without this one."""
    import os
    import sys
    from importlib import machinery, util

    here = os.path.dirname(os.path.abspath(__file__))
    path = [one for one in sys.path if os.path.abspath(one) != here]
    spec = machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_install()
_chain()
