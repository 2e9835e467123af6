from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest


def mount(*arguments) -> None:
    """Mount, or skip where this test may not."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@pytest.fixture
def open_to_all():
    """A folder that every user can reach, unlike `tmp_path`, whose parents are one user's alone."""
    with tempfile.TemporaryDirectory(prefix="max-build-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    where = tmp_path / "small"
    where.mkdir(mode=0o700)
    mount("-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(where))
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def read_only_disk(tmp_path):
    """A directory, and a read-only mount of it."""
    where, read_only = tmp_path / "filled", tmp_path / "read-only"
    where.mkdir(mode=0o700)
    read_only.mkdir()
    mount("--bind", str(where), str(read_only))
    mount("-o", "remount,ro,bind", str(read_only))
    yield where, read_only
    subprocess.run(["umount", "-l", str(read_only)], check=True)
