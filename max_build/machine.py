"""What Linux says about the machine: the memory that is left, and what is mounted where."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mount", "available_memory", "mount", "mount_of"]

_ESCAPE = re.compile(r"\\([0-7]{3})")  # proc(5): space, tab, newline and backslash are octal


class Mount(NamedTuple):
    """A mounted filesystem: its type, and the options of the mount and of the filesystem.

    Of type `""` where it cannot be known.
    """

    kind: str = ""
    options: frozenset[str] = frozenset()


def mount_of(path: str, device: int) -> Mount:
    """Return the filesystem that holds `path`, whose `st_dev` is `device`, by the mounts of now."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as text:
            mountinfo = text.read()
    except OSError:
        return Mount()
    return mount(mountinfo, device, os.path.realpath(path))


def mount(mountinfo: str, device: int, path: str) -> Mount:
    """Return the filesystem that holds `path`.

    Parameters
    ----------
    mountinfo
        Text of `/proc/self/mountinfo` (proc(5)).
    device
        The file's `st_dev`. Matched first; btrfs and overlays report numbers that no mount
        has, so the longest mount point above `path` decides otherwise.
    path
        The file's real path.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    best, best_length = Mount(), -1
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        parts = fields.split(" ")
        kind, _, own = rest.partition(" ")
        if len(parts) < 6 or not kind:
            continue
        options = frozenset(f"{parts[5]},{own.rpartition(' ')[2]}".split(","))
        if parts[2] == number:
            return Mount(kind, options)
        point = _ESCAPE.sub(lambda code: chr(int(code[1], 8)), parts[4]).rstrip("/")
        if len(point) >= best_length and (path == point or path.startswith(f"{point}/")):
            best, best_length = Mount(kind, options), len(point)
    return best


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes this process may still allocate.

    The least of the machine's `MemAvailable` and what each memory cgroup above this process
    leaves (v2 `memory.max`, v1 `memory.limit_in_bytes`); a group's file cache counts as free,
    for the kernel reclaims it before it kills.
    """
    available = 1 << 62
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        roots: tuple[Path, ...]
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file", "active_file")
            roots = (cgroups, cgroups / "unified")
        elif "memory" in controllers.split(","):
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
                "total_active_file",
            )
            roots = (cgroups / "memory",)
        else:
            continue
        for root in roots:
            # In a container the group's own path is often mounted as the root.
            for place in _ancestors(root, group):
                available = min(available, _left(place, *names))
    return max(available, 0)


def _ancestors(root: Path, group: str) -> list[Path]:
    parts = [part for part in group.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _left(place: Path, limit: str, usage: str, *reclaimable: str) -> int:
    most, used = _text(place / limit).strip(), _text(place / usage).strip()
    if not most.isdigit() or not used.isdigit():
        return 1 << 62
    cache = 0
    for line in _text(place / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in reclaimable:
            cache += int(value)
    return int(most) - (int(used) - min(cache, int(used)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
