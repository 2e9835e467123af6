from __future__ import annotations

from pathlib import Path

import pytest

from max_build.errors import TargetError
from max_build.runtime.devices import hip_architectures
from max_build.target import KNOWN_TARGETS, Target, native, parse


@pytest.mark.parametrize(
    ("name", "api", "suffix"),
    [
        ("cpu", "cpu", ""),
        ("sm_80", "cuda", ""),
        ("sm_90a", "cuda", "a"),
        ("sm_100f", "cuda", "f"),
        ("gfx942", "hip", ""),
        ("gfx90a", "hip", ""),
    ],
)
def test_known_targets(name: str, api: str, suffix: str) -> None:
    target = parse(name)
    assert (str(target), target.api, target.suffix) == (name, api, suffix)
    assert target.is_cpu == (name == "cpu")


@pytest.mark.parametrize(
    ("name", "capability"), [("sm_75", (7, 5)), ("sm_90a", (9, 0)), ("sm_121", (12, 1))]
)
def test_capability(name: str, capability: tuple[int, int]) -> None:
    assert parse(name).capability == capability


def test_only_cuda_targets_have_a_capability() -> None:
    with pytest.raises(ValueError, match="`gfx942` is no CUDA target"):
        _ = Target("gfx942").capability


@pytest.mark.parametrize(
    "name", ["", "CPU", "sm_9", "sm90", "sm_90b", "sm_80a", "sm_90f", "gfx", "gpu", "sm_90 "]
)
def test_unknown_targets_are_told_with_close_ones_else_all(name: str) -> None:
    with pytest.raises(TargetError) as caught:
        parse(name)
    assert ("it accepts cpu, sm_50" in str(caught.value)) == (
        "did you mean" not in caught.value.hint
    )


def test_near_misses_are_named() -> None:
    with pytest.raises(TargetError, match="did you mean `sm_90a`"):
        parse("sm90a")


def test_a_target_of_another_compiler_is_told_from_an_unknown_one() -> None:
    cuda = tuple(one for one in KNOWN_TARGETS if one.api == "cuda")
    with pytest.raises(TargetError, match="not a target of this compiler; it accepts sm_50"):
        parse("cpu", accepted=cuda)


def test_native_is_a_known_target() -> None:
    assert native() in KNOWN_TARGETS
    assert parse("native") == native()


def test_amd_devices_are_read_off_the_kernels_topology(tmp_path: Path) -> None:
    for node, version in {"0": 0, "1": 90402, "2": 90010, "10": 110001}.items():
        (tmp_path / node).mkdir()
        text = f"simd_count 4\ngfx_target_version {version}\nvendor_id 4098\n"
        (tmp_path / node / "properties").write_text(text)
    assert hip_architectures(tmp_path) == ("gfx942", "gfx90a", "gfx1101")
    assert hip_architectures(tmp_path / "none") == ()
