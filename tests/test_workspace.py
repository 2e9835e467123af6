"""Directories in memory: gone after use, swept after a crash, never while somebody uses them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from max_build.workspace import in_memory

MEMORY = Path("/dev/shm")

needs_memory = pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="no /dev/shm")


@needs_memory
def test_it_is_in_memory_and_gone_afterwards(tmp_path: Path) -> None:
    with in_memory(tmp_path, 1) as path:
        assert path.parent == MEMORY
        (path / "a").mkdir()
        (path / "a" / "file").write_text("x")
    assert not path.exists()


def test_without_room_it_is_in_the_given_directory(tmp_path: Path) -> None:
    with in_memory(tmp_path, 1 << 60) as path:
        assert path.parent == tmp_path
    assert not path.exists()


@needs_memory
def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from max_build.workspace import in_memory\n"
        "with in_memory(Path(sys.argv[1]), 1) as path:\n"
        "    print(path, flush=True)\n"
        "    sys.stdin.read() if sys.argv[2] == 'wait' else os._exit(9)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    dead = Path(subprocess.run([*command, "die"], capture_output=True, text=True).stdout.strip())
    assert dead.is_dir()
    with subprocess.Popen(
        [*command, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        alive = Path(other.stdout.readline().strip())
        long_ago = time.time() - 3600
        os.utime(alive, (long_ago, long_ago))
        with in_memory(tmp_path, 1):
            assert dead.is_dir()  # too young to be sure
        os.utime(dead, (long_ago, long_ago))
        with in_memory(tmp_path, 1):
            assert not dead.exists()
            assert alive.is_dir()
        other.communicate("")
    assert not alive.exists()
