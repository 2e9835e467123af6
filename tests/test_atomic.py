"""Files that are replaced: by any number of writers, with their permissions, without leftovers."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from max_build.atomic import replacing


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    old = os.umask(0o027)
    yield
    os.umask(old)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_of_two_that_write_at_once_the_last_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    with replacing(path) as first:
        first.write(b"first, and longer")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b" than that")
    assert path.read_bytes() == b"first, and longer than that"
    assert names(tmp_path) == ["lock.json"]


@pytest.mark.parametrize(("mode", "found"), [(None, 0o640), (0o644, 0o644), (0o600, 0o600)])
def test_permissions(mode: int | None, found: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(0o604)
    with replacing(str(path), mode) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == found


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_is_not_finished_is_removed(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(error), replacing(path) as file:
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["x"]


def test_what_cannot_take_its_name_is_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError), replacing(tmp_path / "folder") as file:
        file.write(b"x")
    assert names(tmp_path) == ["folder"]


def test_a_name_without_a_folder_is_one_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with replacing(Path("x")) as file:
        file.write(b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
