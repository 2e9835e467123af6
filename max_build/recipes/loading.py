"""Modules that are changed as soon as they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import machinery
from typing import Any

__all__ = ["Loading"]


class Loading:
    """Finds some modules, with a loader of our own around theirs.

    Parameters
    ----------
    loaders
        Module → what is called, in place of its loader, with the loader and the module.
    """

    def __init__(self, loaders: Mapping[str, Callable[[Callable[[Any], None], Any], None]]) -> None:
        self._loaders = loaders

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find one of the modules; None for any other."""
        if fullname not in self._loaders:
            return None
        spec = machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            load = self._loaders[fullname]
            spec.loader.exec_module = lambda module: load(execute, module)  # type: ignore[method-assign]
        return spec
