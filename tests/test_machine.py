"""What the machine says about itself, read from trees of `/proc` and control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from max_build import workers
from max_build.machine import Mount, available_memory, mount, mount_of


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_is_what_the_least_of_the_limits_leaves(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"meminfo": "MemAvailable: 1000 kB\n", "self/cgroup": "0::/a/b"})
    groups = tree(
        tmp_path / "cgroup",
        {
            "a/memory.max": "900000",
            "a/memory.current": "600000",
            "a/memory.stat": "anon 1\ninactive_file 100000\nactive_file 50000\n",
            "a/b/memory.max": "max",
            "a/b/memory.current": "1",
        },
    )
    assert available_memory(proc, groups) == 900_000 - (600_000 - 150_000)
    assert available_memory(proc, tmp_path / "none") == 1000 * 1024


def test_memory_of_version_1_groups(tmp_path: Path) -> None:
    proc = tree(
        tmp_path / "proc",
        {"meminfo": "MemAvailable: 1000 kB\n", "self/cgroup": "4:memory,x:/job\n8:pids:/\n0::/"},
    )
    groups = tree(
        tmp_path / "cgroup",
        {
            "memory/memory.limit_in_bytes": "500000",
            "memory/memory.usage_in_bytes": "450000",
            "memory/memory.stat": "total_inactive_file 50000\n",
        },
    )
    assert available_memory(proc, groups) == 100_000


def test_workers_are_counted_by_memory_that_the_cache_of_files_gives_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = tree(
        tmp_path / "proc",
        {"meminfo": f"MemAvailable: {64 << 20} kB\n", "self/cgroup": "0::/"},
    )
    groups = tree(
        tmp_path / "cgroup",
        {
            "memory.max": f"{16 << 30}",
            "memory.current": f"{15 << 30}",
            "memory.stat": f"inactive_file {9 << 30}\n",
        },
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(workers, "available_memory", lambda: available_memory(proc, groups))
    assert workers.capacity() == 5  # of 2 GiB each, in 1 + 9


@pytest.mark.parametrize(
    ("path", "device", "kind"),
    [
        ("/home/me/.cache", os.makedev(0, 60), "nfs"),
        ("/team/x", os.makedev(0, 61), "nfs4"),
        ("/home/other", os.makedev(0, 99), "ext4"),
        ("/elsewhere", os.makedev(0, 60), "nfs"),
    ],
)
def test_versions_of_nfs_are_told_apart(path: str, device: int, kind: str) -> None:
    mounts = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 27 0:60 / /home/me rw - nfs server:/home rw,vers=3
41 27 0:61 / /team rw - nfs4 server:/team rw,vers=4.2
"""
    assert mount(mounts, device, path).kind == kind


def test_this_filesystem_has_a_name_and_options(tmp_path: Path) -> None:
    found = mount_of(str(tmp_path), tmp_path.stat().st_dev)
    assert found.kind
    assert found.options
    assert found != Mount()
