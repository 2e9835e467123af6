"""How to read a file: the decisions, pure functions apart from the reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Access", "Mode", "access_for", "reads_directly"]

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

#: Block filesystems where O_DIRECT reads at the disk's own pace.
_DIRECT = frozenset({"ext4", "xfs", "ext3", "ext2", "f2fs"})


@dataclass(frozen=True, slots=True)
class Access:
    """How tensors' bytes come into memory, and why so."""

    how: Literal["map", "read"]
    reason: str


def _is_remote(kind: str) -> bool:
    """Whether a page fault on this filesystem leaves the machine or the kernel."""
    return kind in _REMOTE or kind == "fuse" or kind.startswith("fuse.")


def access_for(mode: Mode, kind: str) -> Access:
    """Return how to reach the bytes of a file on a filesystem of type `kind`."""
    if mode != "auto":
        return Access(mode, f"asked for by mode={mode!r}")
    if _is_remote(kind):
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
