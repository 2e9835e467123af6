"""Builds on a disk that has room for a few artifacts, or for ten files.

A disk that is read-only, one without any room, and two users are in tests/store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from steps import Box, build_toy, project

import toy_repo
from max_build.store.directory import DirectoryStore
from max_build.store.gc import gc
from max_build.store.verify import verify


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    toy_repo.install(tmp_path / "site", monkeypatch)
    found = Box(tmp_path / "box")
    project(found)
    return found


@pytest.mark.parametrize("limits", ["4m", "4m,nr_inodes=10"])
def test_builds_go_on_where_a_disk_is_full_and_hit_again_where_there_is_room(
    box: Box, small_disk: Callable[[str], Path], limits: str
) -> None:
    disk = small_disk(limits)
    disk.chmod(0o700)
    box.cache.symlink_to(disk)
    table = box.project / "src" / "toy" / "table.txt"
    for number in range(6):
        table.write_text(f"{number}" * 100 + "\n")
        _, (data,) = build_toy(box, lambda _: None)
        assert data == b"part one " + b"%d" % number * 100 + b"\n" + data[110:]
        assert len(data) == 9000 * 110
    store = DirectoryStore(disk)
    assert verify(store, repair=False).findings == ()
    gc(store, grace=0, max_size=0)
    assert not [*disk.glob("cas/*/*"), *disk.glob("tmp/*")]
    if "inodes" not in limits:
        assert build_toy(box, lambda _: None) == ("compiled", [data])
        assert build_toy(box, lambda _: None) == ("cached", [data])
