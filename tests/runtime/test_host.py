from __future__ import annotations

import platform
from pathlib import Path

import pytest

from max_build.runtime.host import missing_features, processor

V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"

x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 baselines")


def cpu(tmp_path: Path, flags: str) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\nflags\t\t: {flags}\n")
    return path


@x86_64
def test_a_baseline_the_cpu_lacks_is_refused_by_its_features(tmp_path: Path) -> None:
    old = cpu(tmp_path, V2)
    assert missing_features("x86-64", cpuinfo=old) == ""
    assert missing_features("x86-64-v2", cpuinfo=old) == ""
    assert "this CPU lacks abm, avx, avx2" in missing_features("x86-64-v3", cpuinfo=old)


@x86_64
def test_what_is_not_known_is_not_refused(tmp_path: Path) -> None:
    assert missing_features("neoverse-n1", cpuinfo=tmp_path / "none") == ""
    assert missing_features("x86-64-v4", cpuinfo=tmp_path / "none") == ""


@x86_64
def test_an_arm_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "this machine is aarch64" in missing_features("x86-64-v3", cpuinfo=tmp_path / "none")


def test_a_processor_is_known_by_its_features_in_any_order(tmp_path: Path) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    for folder in (one, other):
        folder.mkdir()
    found = processor(cpu(one, "fma avx"))
    assert found
    assert processor(cpu(other, "avx fma")) == found
    (tmp_path / "arm").write_text("CPU part : 0xd0c\nFeatures : fp asimd\n")
    assert processor(tmp_path / "arm") not in ("", found)


def test_a_processor_that_cannot_be_told_has_no_name(tmp_path: Path) -> None:
    assert processor(tmp_path / "none") == ""
    (tmp_path / "bare").write_text("processor : 0\n")
    assert processor(tmp_path / "bare") == ""
