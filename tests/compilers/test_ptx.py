"""The `ptx` adapter in whole builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_repos import Repo, make
from max_build import load_settings
from max_build.compilers.cubin import read_cubin
from max_build.errors import ConfigError

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

SCALE = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry scale(.param .u64 x, .param .f32 a) {
  .reg .b64 %rd<4>;
  .reg .b32 %r<2>;
  .reg .f32 %f<4>;
  ld.param.u64 %rd1, [x];
  cvta.to.global.u64 %rd2, %rd1;
  ld.param.f32 %f1, [a];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd2, %rd2, %rd3;
  ld.global.f32 %f2, [%rd2];
  mul.f32 %f3, %f1, %f2;
  st.global.f32 [%rd2], %f3;
  ret;
}
"""


def repo_of(root: Path, text: str = SCALE, more: str = "") -> Repo:
    return make(root, {"k/scale.ptx": text}, {"scale": f'source = "k/scale.ptx"\n{more}'})


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a", "sm_100f", "sm_121a"])
def test_one_module_becomes_code_for_each_target(tmp_path: Path, target: str) -> None:
    repo = repo_of(tmp_path, more=f'targets = ["{target}"]')
    outcome = repo.one()
    assert outcome.state == "compiled"
    assert outcome.record is not None
    assert set(outcome.record.kernels) == {"scale"}
    assert read_cubin(repo.cubin(outcome.record)).arch == target
    assert repo.one().state == "cached"


def test_ptx_is_kept_beside_the_cubin_as_it_was(tmp_path: Path) -> None:
    from max_build import open_cache

    repo = repo_of(tmp_path, more="keep-ptx = true")
    record = repo.one().record
    assert record is not None
    blob = record.blob("ptx")
    assert blob is not None
    with open_cache(load_settings(repo.root).cache) as cache:
        assert cache.path(blob).read_text() == SCALE


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SCALE.replace("7.0", "99.0"), "PTX ISA 99.0"),
        (SCALE.replace("7.0", "8.7").replace("sm_70", "sm_100"), "cannot become code for `sm_90a`"),
        (SCALE.replace("mul.f32", "mull.f32"), "cannot compile"),
        (SCALE.replace(".version 7.0", ""), "has no `.version`"),
        ("", "has no `.version`"),
    ],
)
def test_what_cannot_be_compiled_is_told(tmp_path: Path, text: str, told: str) -> None:
    outcome = repo_of(tmp_path, text).one()
    assert outcome.state == "failed"
    assert told in str(outcome.error)


def test_a_name_that_is_not_there_is_told(tmp_path: Path) -> None:
    outcome = repo_of(tmp_path, more='names = ["scale", "shift"]').one()
    assert outcome.state == "failed"
    assert "`shift`" in str(outcome.error)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    repo = repo_of(tmp_path)
    (repo.root / "k" / "scale.ptx").unlink()
    outcome = repo.one()
    assert outcome.state == "failed"
    assert "k/scale.ptx" in str(outcome.error)


def test_the_key_follows_bytes_options_and_target(tmp_path: Path) -> None:
    def key(name: str, text: str = SCALE, more: str = "") -> str:
        return repo_of(tmp_path / name, text, more).build("look").outcomes[0].key

    plain = key("a")
    assert key("b") == plain
    assert key("c", more="options = { debug = false }") == plain
    assert key("d", SCALE + "\n") != plain
    assert key("e", more="options = { maxrregcount = 32 }") != plain
    assert key("f", more='targets = ["sm_90"]') != plain


def test_options_of_the_front_end_are_refused(tmp_path: Path) -> None:
    repo = repo_of(
        tmp_path,
        more='options = { std = "c++17" }\ninclude-dirs = ["i"]\nsignature = { x = "i32" }',
    )
    with pytest.raises(ConfigError) as caught:
        load_settings(repo.root)
    for wrong in ("options.std", "include-dirs", "signature"):
        assert wrong in str(caught.value)
