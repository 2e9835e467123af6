"""`load_kernels` in an editable install whose sources were edited."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from kernel_repos import SAXPY, Repo, saxpy
from max_build import load_settings, manifest, open_cache
from max_build.errors import LoadError
from max_build.packaging import manifest_of
from max_build.pipeline import build
from max_build.runtime.kernels import load_kernels
from max_build.runtime.stale import StaleWarning

pytest.importorskip("cuda.core", reason="cuda-core is not installed")


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """A kernel module, and the metadata that an editable install of it leaves."""
    repo = saxpy(tmp_path / "repo")
    settings = load_settings(repo.root)
    with open_cache(settings.cache) as cache:
        result = build(settings, cache)
        assert not result.failed, result
        shipped = manifest.encode(manifest_of(settings, result, "repo"))
    info = tmp_path / "site" / "repo-1.dist-info"
    shipped_at = info / "extra_metadata" / manifest.METADATA_NAME
    shipped_at.parent.mkdir(parents=True)
    shipped_at.write_bytes(shipped)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: repo\nVersion: 1\n")
    origin = {"url": repo.root.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(info.parent)
    return repo


def edit(repo: Repo) -> None:
    (source,) = repo.root.rglob("*.cu")
    source.write_text(SAXPY.replace("a * x[i]", "a - x[i]"))


def test_sources_as_they_were_and_an_edit_that_is_named(
    repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = load_kernels("repo", device="sm_90")
    edit(repo)
    with pytest.warns(
        StaleWarning, match="`saxpy` for `sm_90a` is stale: `source` changed"
    ) as told:
        assert load_kernels("repo", device="sm_90").record == before.record
    assert told[0].filename == __file__
    monkeypatch.setenv("MAX_BUILD_STALE", "error")
    with pytest.raises(LoadError, match="is stale"):
        load_kernels("repo", device="sm_90")


def test_it_is_built_anew_where_that_is_asked_for(
    repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_kernels("repo", device="sm_90")
    edit(repo)
    monkeypatch.setenv("MAX_BUILD_STALE", "build")
    after = load_kernels("repo", device="sm_90")
    assert after.record.key != before.record.key
    assert after.code("saxpy").code != before.code("saxpy").code
