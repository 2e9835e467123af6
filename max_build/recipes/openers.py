"""Native functions that open files, where no audit event tells: they are wrapped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from max_build.recipes.loading import Loading

__all__ = ["follow"]

_OPENERS = {
    "max._core": ("safetensors.safe_open",),
    "safetensors._safetensors_rust": ("safe_open",),
    "tokenizers.tokenizers": (
        "Tokenizer.from_file",
        "models.BPE.from_file",
        "models.BPE.read_file",
        "models.WordLevel.from_file",
        "models.WordLevel.read_file",
        "models.WordPiece.from_file",
        "models.WordPiece.read_file",
    ),
}
"""Native module → what in it opens the files that its arguments name."""


def follow(note: Callable[..., None], failed: Callable[[str], None]) -> None:
    """Wrap every opener, those of modules that are not loaded yet too.

    Parameters
    ----------
    note
        Called with all arguments of each call, before it is made.
    failed
        Called with the reason where one cannot be followed.
    """

    def wrap(module: Any) -> None:
        for name in _OPENERS[module.__name__]:
            _wrap(module, name, note, failed)

    def loading(execute: Callable[[Any], None], module: Any) -> None:
        execute(module)
        wrap(module)

    for name in _OPENERS:
        if name in sys.modules:
            wrap(sys.modules[name])
    sys.meta_path.insert(0, Loading(dict.fromkeys(_OPENERS, loading)))


def _wrap(module: Any, name: str, note: Callable[..., None], failed: Callable[[str], None]) -> None:
    *parents, last = name.split(".")
    owner = module
    for one in parents:
        owner = getattr(owner, one, None)
    original = getattr(owner, last, None)
    if original is None:
        return  # of another version
    wrapped = _opener(original, note)
    try:
        setattr(owner, last, staticmethod(wrapped) if isinstance(owner, type) else wrapped)
    except (AttributeError, TypeError) as error:
        failed(f"`{module.__name__}.{name}` cannot be followed: {error}")
    for other in list(sys.modules.values()):  # those that imported it before
        if isinstance(other, ModuleType) and vars(other).get(last) is original:
            setattr(other, last, wrapped)


def _opener(original: Any, note: Callable[..., None]) -> Any:
    """What stands for a function, or for a class that opens a file when it is called."""

    def opening(*arguments: Any, **options: Any) -> Any:
        note(*arguments, *options.values())
        return original(*arguments, **options)

    if not isinstance(original, type):
        return opening

    class Standing(type):
        def __call__(cls, *arguments: Any, **options: Any) -> Any:
            return opening(*arguments, **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    return Standing(original.__name__, (), {"__doc__": original.__doc__})
