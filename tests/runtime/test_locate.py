"""Where a package's manifest and artifacts are found, and what is said where there are none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import max_build
import toy_repo as toy
from max_build import manifest as manifests
from max_build.errors import LoadError, NotBuiltError, WeightsError
from max_build.key import Components, digest, key_of
from max_build.manifest import ManifestUnit
from max_build.record import Blob, Record
from max_build.runtime import locate
from max_build.store import CacheSettings, open_cache
from support import run

METADATA = f"extra_metadata/{manifests.METADATA_NAME}"


def record(data: bytes) -> Record:
    components = Components(compiler={}, target="cpu", sources={"ir": digest(data)})
    blob = Blob(role="mef", digest=digest(data), size=len(data))
    return Record(key=key_of(components), unit="unit", components=components, blobs=(blob,))


def manifest(package: str, one: Record) -> str:
    units = [("unit", ManifestUnit(kind="graph", targets={"cpu": one}))]
    return manifests.encode(manifests.make(package, units, embedded=False)).decode()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    return path


# --- whose manifest it is


def distribution(site: Path, name: str, package: str, text: str) -> None:
    folder = f"{name.replace('-', '_')}-1.0.dist-info"
    toy.write_distribution(
        site, name, "1.0", {f"{package}/__init__.py": "", f"{folder}/{METADATA}": text}
    )


@pytest.mark.parametrize("other", [None, '{"schema": 9, "package": "minilm_tools"}', "{"])
def test_a_distribution_of_the_packages_name_may_be_anothers(site: Path, other: str | None) -> None:
    mine, theirs = record(b"mine"), record(b"theirs")
    text = manifest("minilm_tools", theirs) if other is None else other
    distribution(site, "acme-minilm", "minilm", manifest("minilm", mine))
    distribution(site, "minilm" if other != "{" else "another", "minilm_tools", text)
    found = locate.find("minilm").manifest
    assert (found.package, found.units["unit"].targets["cpu"].key) == ("minilm", mine.key)


def test_a_damaged_manifest_of_the_packages_own_name_is_told(site: Path) -> None:
    distribution(site, "minilm", "minilm", "{")
    with pytest.raises(LoadError, match=r"`max-build/manifest.json of minilm` is damaged"):
        locate.find("minilm")


def test_an_editable_install_is_found_by_its_manifest_whatever_it_is_called(site: Path) -> None:
    # It lists no module of the package, so nothing but the manifest says whose it is.
    files = {f"acme_models-1.0.dist-info/{METADATA}": manifest("ns/minilm", record(b"mine"))}
    toy.write_distribution(site, "acme-models", "1.0", files)
    assert locate.find("ns.minilm").manifest.package == "ns/minilm"


# --- where there is none


def test_a_package_that_is_only_importable_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotBuiltError) as caught:
        max_build.load("plain")
    place = tmp_path / "plain"
    assert (
        caught.value.message == f"package `plain` is imported from `{place}` and is not installed"
    )
    assert caught.value.hint == "`pip install -e .` in its project"
    with pytest.raises(NotBuiltError, match=r"package `nonesuch` is not installed\n"):
        max_build.load("nonesuch")


def test_a_package_that_was_installed_without_the_hook(site: Path, tmp_path: Path) -> None:
    toy.write_distribution(site, "plain", "1.0", {"plain/__init__.py": ""})
    with pytest.raises(NotBuiltError, match=r"never built with max-build(.|\n)*hooks\.max-build"):
        max_build.load("plain")
    # an editable install, which lists nothing
    project = tmp_path / "project"
    (project / "src" / "other").mkdir(parents=True)
    (project / "src" / "other" / "__init__.py").write_text("")
    url = f'{{"url": "file://{project}", "dir_info": {{"editable": true}}}}'
    toy.write_distribution(
        site, "acme-other", "1.0", {"acme_other-1.0.dist-info/direct_url.json": url}
    )
    sys.path.insert(0, str(project / "src"))
    try:
        with pytest.raises(NotBuiltError, match="never built with max-build"):
            max_build.load("other")
    finally:
        sys.path.remove(str(project / "src"))


# --- without an import


def test_no_parent_of_a_package_is_imported(site: Path) -> None:
    for name in ("boom", "boom/sub", "space/inner/boom"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("boom/sub", "space/inner/boom"):
        (site / name / "w.safetensors").touch()
    assert locate.weights_path("boom.sub:w.safetensors", ()) == site / "boom/sub/w.safetensors"
    inner = site / "space/inner/boom"
    assert locate.weights_path("space.inner.boom:w.safetensors", ()) == inner / "w.safetensors"
    for name in ("boom.none", "space.none", "space.inner.none.boom"):
        with pytest.raises(WeightsError, match=f"package `{name}` is not installed"):
            locate.weights_path(f"{name}:w.safetensors", ())
    with pytest.raises(NotBuiltError, match=r"`boom\.sub` is imported from .*boom/sub"):
        locate.find("boom.sub")
    (site / "boom/sub" / manifests.FOLDER).mkdir()
    text = manifest("boom/sub", record(b"mine"))
    (site / "boom/sub" / manifests.FOLDER / manifests.NAME).write_text(text)
    assert locate.find("boom.sub").package == site / "boom/sub"


# --- an artifact in scratch space


def test_an_artifact_that_no_directory_takes_is_there_until_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    one = record(b"artifact" * 1000)
    (blob,) = one.blobs
    with open_cache(CacheSettings(dir=str(tmp_path / "own"), shared=str(shared))) as cache:
        cache.publish(one, {blob.digest: b"artifact" * 1000})
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / manifests.NAME).write_text(manifest("pkg", one))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "file").touch()
    (scratch / f"max-build-{os.getuid()}").touch()  # where a cache would fall back to
    program = (
        "from pathlib import Path\n"
        "from max_build.runtime import locate\n"
        f"found = locate.find(Path({str(tmp_path / 'pkg')!r}))\n"
        "(blob,) = found.manifest.blobs()\n"
        "paths = {found.artifact(blob) for _ in range(3)}\n"
        "print(len(paths), *(path.read_bytes() == b'artifact' * 1000 for path in paths))\n"
    )
    env = {
        "MAX_BUILD_CACHE_DIR": tmp_path / "file" / "cache",
        "MAX_BUILD_SHARED": shared,
        "TMPDIR": scratch,
    }
    done = run([sys.executable, "-c", program], cwd=tmp_path, env=env)
    assert done.stdout == "1 True\n", done.stderr
    assert [path.name for path in scratch.iterdir()] == [f"max-build-{os.getuid()}"]
