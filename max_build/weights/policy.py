"""How to read a file: the decisions, apart from the reading.

Pure functions of what the machine says about itself; the texts they take are `/proc` files.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

__all__ = [
    "Access",
    "Mode",
    "Mount",
    "access_for",
    "available_memory",
    "is_remote",
    "mount",
    "reads_directly",
]

Mode = Literal["auto", "map", "read"]

#: Filesystems where a page fault is a network or user-space round trip of 4 KiB each: maps of
#: them load 30–50 times slower than large reads, and concurrent faults can wedge FUSE.
_REMOTE = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "efs", "gfs2", "glusterfs",
        "gpfs", "juicefs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs",
        "smb3", "smbfs", "virtiofs", "weka", "wekafs",
    }
)  # fmt: skip

_ESCAPE = re.compile(r"\\([0-7]{3})")  # proc(5): space, tab, newline and backslash are octal

#: Block filesystems where O_DIRECT reads at the disk's own pace.
_DIRECT = frozenset({"ext4", "xfs", "ext3", "ext2", "f2fs"})


@dataclass(frozen=True, slots=True)
class Access:
    """How tensors' bytes come into memory, and why so."""

    how: Literal["map", "read"]
    reason: str


class Mount(NamedTuple):
    """A mounted filesystem: its type, and the options of the mount and of the filesystem."""

    kind: str
    options: frozenset[str]


def mount(mountinfo: str, device: int, path: str) -> Mount:
    """Return the filesystem that holds `path`; one of type `""` if that cannot be known.

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
    best, best_length = Mount("", frozenset()), -1
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


def is_remote(kind: str) -> bool:
    """Whether a page fault on this filesystem leaves the machine or the kernel."""
    return kind in _REMOTE or kind == "fuse" or kind.startswith("fuse.")


def access_for(mode: Mode, kind: str) -> Access:
    """Return how to reach the bytes of a file on a filesystem of type `kind`."""
    if mode != "auto":
        return Access(mode, f"asked for by mode={mode!r}")
    if is_remote(kind):
        return Access("read", f"{kind} serves page faults one by one")
    return Access("map", f"{kind or 'the filesystem'} is local")


def reads_directly(kind: str, resident: float, *, tight: bool) -> bool:
    """Whether streaming should go round the page cache (O_DIRECT).

    Parameters
    ----------
    kind
        The filesystem's type.
    resident
        The part of the file already in the page cache, from 0 to 1: at half or more the
        cache is faster than any disk.
    tight
        Memory is short, so that filling the cache would push something else out.
    """
    return kind in _DIRECT and (resident < 0.5 or (tight and resident < 0.9))


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
