"""What lies below what."""

from __future__ import annotations

from pathlib import Path

import pytest

from max_build.recipes.places import below, within
from max_build.recipes.surroundings import Here


@pytest.mark.parametrize(
    ("path", "folder", "is_below", "is_within"),
    [
        ("/a/b", "/a", True, True),
        ("/a", "/a", False, True),
        ("/ab", "/a", False, False),
        ("/", "/a", False, False),
        ("/a", "/", True, True),
        ("/", "/", False, True),
        ("/a/b", "/a/", True, True),
    ],
)
def test_what_is_below_a_folder(path: str, folder: str, is_below: bool, is_within: bool) -> None:
    assert below(path, folder) is is_below
    assert within(path, folder) is is_within


def test_all_lies_below_a_project_at_the_root_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])

    def found(root: str) -> str:
        return Here(root, (), {}, str, {}).found("one", installed=True)

    assert found(str(tmp_path / "other")) == str(tmp_path)
    assert found("/") == ""
