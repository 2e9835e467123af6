"""What lies below what, and whose it is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from max_build.recipes.belonging import Belonging
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
    (tmp_path / "only_here.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def found(root: str) -> str:
        return Here(root, (), {}, str, {}).found("only_here", installed=True)

    assert found(str(tmp_path / "other")) == str(tmp_path)
    assert found("/") == ""


def test_whose_a_place_is_in_a_project_at_the_root_of_the_file_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend("/env/lib/site-packages")
    places = Belonging("/", (), "/scratch")
    assert places.inside("/one/two") == "one/two"
    assert places.inside("/") == "."
    assert places.inside("/env/lib/site-packages/one.py") is None


def test_temporary_files_are_scrap_and_their_directory_is_not() -> None:
    temporary = tempfile.gettempdir()
    places = Belonging("/project", (), "/scratch")
    assert places.is_scrap(os.path.join(temporary, "one"))
    assert not places.is_scrap(temporary)
    assert not Belonging(temporary, (), "/scratch").is_scrap(os.path.join(temporary, "one"))


def test_a_real_path_is_known_by_the_link_that_leads_there(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "root").symlink_to("/")
    project = str(tmp_path / "link")
    assert Belonging(project, (), "").known_as(str(tmp_path / "real/one")) == f"{project}/one"
    project = str(tmp_path / "root")
    assert Belonging(project, (), "").known_as("/none/one") == f"{project}/none/one"
