"""Whether what was imported is what the metadata of a distribution describe."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from max_build.distributions import foreign, identity

NAME = "shadowed-compiler"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    identity.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "shadowed"]:
        del sys.modules[name]


def files(place: Path) -> Path:
    for name in ("shadowed/__init__.py", "shadowed/deep/__init__.py", "shadowed/deep/leaf.py"):
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return place


def install(site: Path, request: pytest.FixtureRequest, *, editable: Path | None = None) -> str:
    """Install the compiler under a name of this test's own: what is installed is remembered."""
    name = f"{NAME}-{abs(hash(request.node.name))}"
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    rows = ["shadowed.pth,sha256=x,1"]
    if editable is None:
        listed = files(site).rglob("shadowed/**/*.py")
        rows = [f"{one.relative_to(site)},sha256=x,0" for one in listed]
    else:
        direct = {"url": editable.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(direct))
    (info / "RECORD").write_text("\n".join(rows))
    return name


def loaded(*places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in reversed(places):
        monkeypatch.syspath_prepend(place)
    importlib.import_module("shadowed.deep.leaf")


def test_what_is_installed_is_what_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = install(tmp_path / "site", request)
    loaded(tmp_path / "site", monkeypatch=monkeypatch)
    assert foreign((name,), ("shadowed",)) == ""


def test_a_checkout_in_front_of_it_is_told_with_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = install(tmp_path / "site", request)
    files(tmp_path / "checkout")
    loaded(tmp_path / "checkout", tmp_path / "site", monkeypatch=monkeypatch)
    assert foreign((name,), ("shadowed",)) == (
        f"`shadowed` was imported from `{tmp_path}/checkout/shadowed/__init__.py`, and is installed"
        f" at `{tmp_path}/site/shadowed/__init__.py`"
    )


def test_one_module_of_a_package_in_front_of_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = install(tmp_path / "site", request)
    (tmp_path / "site" / "shadowed" / "__init__.py").write_text(
        f"__path__.insert(0, '{tmp_path}/checkout')"
    )
    (tmp_path / "checkout" / "deep").mkdir(parents=True)
    (tmp_path / "checkout" / "deep" / "__init__.py").write_text("__path__ = []")
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.import_module("shadowed.deep")
    told = foreign((name,), ("shadowed",))
    assert f"from `{tmp_path}/checkout/deep/__init__.py`, of whose edits" in told


def test_a_checkout_without_anything_installed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(files(tmp_path), monkeypatch=monkeypatch)
    assert "of whose edits no installed metadata tell" in foreign((NAME,), ("shadowed",))


def test_links_to_what_is_installed_are_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = install(tmp_path / "site", request)
    (tmp_path / "linked").symlink_to("site")
    loaded(tmp_path / "linked", tmp_path / "site", monkeypatch=monkeypatch)
    assert foreign((name,), ("shadowed",)) == ""


def test_an_editable_install_is_told_since_its_edits_are_in_no_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    project = files(tmp_path / "a project")
    name = install(tmp_path / "site", request, editable=project)
    loaded(project, tmp_path / "site", monkeypatch=monkeypatch)
    assert "of whose edits no installed metadata tell" in foreign((name,), ("shadowed",))
