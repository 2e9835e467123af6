"""Where a path leads in this process, what lies below what, and what is held mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

__all__ = ["absolute", "below", "mapped", "passed", "within"]

_LINKS = 40
"""Links that Linux follows on one path."""


def absolute(path: Any, directory: int | None = None) -> str | None:
    """A path as it is used here and now, a descriptor's too; None where that cannot be told."""
    try:
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}")
        base = os.getcwd() if directory is None else os.readlink(f"/proc/self/fd/{directory}")
    except OSError:
        return None
    place = os.path.join(base, os.fsdecode(path))
    if os.path.basename(place) == os.pardir:
        return os.path.realpath(place)
    if os.pardir in place.split(os.sep):
        return os.path.join(os.path.realpath(os.path.dirname(place)), os.path.basename(place))
    return os.path.normpath(place)


def below(path: str, folder: str) -> bool:
    """Whether a path lies below a folder, by their names alone: both are absolute and normal."""
    return path != folder and path.startswith(folder.rstrip(os.sep) + os.sep)


def within(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies below it."""
    return path == folder or below(path, folder)


def passed(path: str) -> Iterator[str]:
    """The places on an absolute path, and on what the links among them name: path_resolution(7)."""
    todo = path.split(os.sep)[::-1]
    place = os.sep
    links = 0
    while todo:
        part = todo.pop()
        if part in ("", os.curdir):
            continue
        if part == os.pardir:
            place = os.path.dirname(place)
            continue
        yield (one := os.path.join(place, part))
        if not os.path.islink(one):
            place = one
            continue
        links += 1
        if links > _LINKS:
            return
        todo += os.path.join(place, os.readlink(one)).split(os.sep)[::-1]
        place = os.sep


def mapped() -> dict[str, bool]:
    """Files that are mapped into this process → whether as code: see proc_pid_maps(5)."""
    found: dict[str, bool] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(os.sep):
                found[fields[5]] = found.get(fields[5], False) or "x" in fields[1]
    return found
