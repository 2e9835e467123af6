"""max-build: graphs and kernels compiled once, shared, and loaded in milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from max_build.config import load_settings
    from max_build.pipeline import build
    from max_build.runtime.kernels import load_kernels
    from max_build.runtime.load import load
    from max_build.store import open_cache
    from max_build.weights import open_weights

__all__ = ["build", "load", "load_kernels", "load_settings", "open_cache", "open_weights"]

_HOME = {
    "build": "max_build.pipeline",
    "load": "max_build.runtime.load",
    "load_kernels": "max_build.runtime.kernels",
    "load_settings": "max_build.config",
    "open_cache": "max_build.store",
    "open_weights": "max_build.weights",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `import max_build` itself loads nothing."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    message = f"module `max_build` has no attribute `{name}`"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted(__all__)
