"""What an import in a Mojo library could find beside it, and the walk that finds it.

Mojo looks for an absolute import among the names of the directory that the library lies in, and no
higher (seen with 26.7): for a module, compiled or not, and for a folder, with an `__init__.mojo` or
without. What it finds is folded into the library, or linked to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["UnkeyableError", "beside", "walk"]

_SUFFIXES = (".mojo", ".🔥", ".mojoc", ".mojopkg")
_MANY = 10_000


class UnkeyableError(Exception):
    """Why what a library could import cannot be told."""


def walk(top: Path, enter: Callable[[Path], bool]) -> Iterator[tuple[str, Path | None]]:
    """Every file below `top` by its relative name, of the folders that `enter` agrees to.

    Mojo follows links to folders, so their files count as well. A folder that is met again under
    another name, as in a loop, comes as one name without a file that tells what it is.
    """
    entered: dict[tuple[int, int], str] = {}
    for folder, folders, names in os.walk(top, followlinks=True):
        here = os.path.relpath(folder, top)
        info = os.stat(folder)
        first = entered.setdefault((info.st_dev, info.st_ino), here)
        if first != here:
            folders.clear()
            yield f"{here} → {first}", None
            continue
        folders[:] = sorted(
            one for one in folders if one != "__pycache__" and enter(Path(folder, one))
        )
        for name in names:
            file = Path(folder, name)
            if file.is_file():
                yield str(file.relative_to(top)), file


def beside(library: Path) -> dict[str, Path | None]:
    """The Mojo files in a library's directory and its folders, by relative name; not its own.

    A folder whose name is no identifier is not entered: its name would stand in backticks.

    Raises
    ------
    UnkeyableError
        If that cannot be told, or is too much to look through.
    """
    if library.name in ("", ".."):
        message = f"kernel library `{library}` is not named by a folder in another"
        raise UnkeyableError(message)
    seen = 0
    left: set[str] = set()

    def enter(folder: Path) -> bool:
        nonlocal seen
        seen += 1
        if seen > _MANY:
            message = f"kernel library `{library.name}` lies beside more than {_MANY} folders"
            raise UnkeyableError(message)
        if folder.name.isidentifier():
            return folder != library
        left.add(folder.name)
        return False

    found = {
        name: file
        for name, file in walk(library.parent, enter)
        if file is None or (file.name.endswith(_SUFFIXES) and file != library)
    }
    for file in (*found.values(), *_sources(library)) if left else ():
        text = file.read_bytes() if file is not None else b""
        if name := next((one for one in left if os.fsencode(f"`{one}`") in text), ""):
            message = f"kernel library `{library.name}` may import `{name}`, beside it"
            raise UnkeyableError(message)
    return found


def _sources(library: Path) -> Iterator[Path]:
    if library.is_dir():
        for name, file in walk(library, lambda _: True):
            if file is not None and name.endswith(_SUFFIXES):
                yield file
