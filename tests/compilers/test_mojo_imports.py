"""What counts as beside a Mojo library: what an import in it could find."""

from __future__ import annotations

from pathlib import Path

import pytest

from max_build.compilers import mojo_imports
from max_build.compilers.mojo_imports import UnkeyableError, beside
from max_build.compilers.mojo_libraries import Libraries, library_digest, tree_digest


@pytest.fixture(params=["folder", "compiled"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A library alone in its directory."""
    if request.param == "compiled":
        path = tmp_path / "toy" / "ops.mojoc"
        path.parent.mkdir()
        path.write_bytes(b"MOJO")
        return path
    path = tmp_path / "toy" / "ops"
    path.mkdir(parents=True)
    (path / "__init__.mojo").write_text("from sib import N\n")
    return path


def put(folder: Path, name: str, text: str = "comptime N = 1\n") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "name", ["sib.mojo", "sib.mojoc", "sib/__init__.mojo", "sib/deep/inner.mojo", "sib.🔥"]
)
def test_a_module_beside_a_library_is_a_part_of_its_digest(library: Path, name: str) -> None:
    alone = library_digest(library)
    assert alone == tree_digest(library)
    file = put(library.parent, name)
    found = library_digest(library)
    file.write_text("comptime N = 2\n")
    assert len({alone, found, library_digest(library)}) == 3
    libraries = Libraries()
    libraries.digest_of(str(library))
    assert libraries.sources() == tuple(sorted((library, file)))
    assert libraries.changed() == ""
    file.write_text("comptime N = 3\n")
    assert libraries.changed() == library.name


def test_a_linked_module_and_a_linked_folder_count_as_what_they_lead_to(
    library: Path, tmp_path: Path
) -> None:
    module = put(tmp_path, "elsewhere/sib.mojo")
    (library.parent / "sib.mojo").symlink_to(module)
    (library.parent / "linked").symlink_to(module.parent)
    (library.parent / "again").symlink_to(library.parent)
    before = library_digest(library)
    module.write_text("comptime N = 2\n")
    assert library_digest(library) != before


@pytest.mark.parametrize(
    "name", ["graph.py", "data/weights.bin", ".git/x.mojo", "not-a-name/x.mojo", "../up.mojo"]
)
def test_what_no_import_can_find_is_none_of_it(library: Path, name: str) -> None:
    before = library_digest(library)
    put(library.parent, name)
    assert library_digest(library) == before


def test_a_name_in_backticks_is_not_followed(tmp_path: Path) -> None:
    put(tmp_path, "ops/__init__.mojo", "from `not-a-name`.x import N\n")
    put(tmp_path, "not-a-name/x.mojo")
    with pytest.raises(UnkeyableError, match="library `ops` may import `not-a-name`, beside it"):
        library_digest(tmp_path / "ops")


def test_more_than_can_be_looked_through_is_not_keyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "ops.mojoc")
    for n in range(4):
        put(tmp_path, f"sib{n}/x.mojo")
    monkeypatch.setattr(mojo_imports, "_MANY", 3)
    with pytest.raises(UnkeyableError, match="lies beside more than 3 folders"):
        library_digest(tmp_path / "ops.mojoc")
    libraries = Libraries()
    assert libraries.digest_of(str(tmp_path / "ops.mojoc"))
    assert "lies beside more than" in libraries.problem
    assert libraries.sources() == (tmp_path / "ops.mojoc",)


@pytest.mark.parametrize("name", ["", ".."])
def test_a_library_without_a_name_is_not_keyed(name: str) -> None:
    with pytest.raises(UnkeyableError, match="is not named by a folder in another"):
        beside(Path(name))


def test_a_link_that_is_led_to_another_folder_of_the_library_is_seen(tmp_path: Path) -> None:
    put(tmp_path, "ops/a/x.mojo")
    put(tmp_path, "ops/b/x.mojo", "comptime N = 2\n")
    link = tmp_path / "ops" / "c"
    link.symlink_to("a")
    before = tree_digest(tmp_path / "ops")
    link.unlink()
    link.symlink_to("b")
    assert tree_digest(tmp_path / "ops") != before
