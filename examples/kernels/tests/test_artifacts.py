"""The compiled kernels, from the cache: everything up to a launch, which needs a GPU."""

from __future__ import annotations

import pytest

from max_build.compilers.cubin import read_cubin

TARGETS = ["sm_80", "sm_90a", "sm_120a"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("unit", "names"),
    [
        ("reduce", {"reduce<Sum, float>", "reduce<Sum, double>", "reduce<Max, float>"}),
        ("axpy", {"axpy"}),
        ("softmax", {"softmax_256", "softmax_4096"}),
    ],
)
def test_each_kernel_is_there_for_exactly_its_target(max_build_artifact, unit, target, names):
    artifact = max_build_artifact(unit, target)
    assert set(artifact.record.kernels) == names
    found = [read_cubin(path.read_bytes()) for path in artifact.cubins()]
    assert {one.arch for one in found} == {target}
    lowered = {kernel.lowered for kernel in artifact.record.kernels.values()}
    assert {name for one in found for name in one.entry_points} == lowered


@pytest.mark.parametrize("unit", ["reduce", "axpy"])
def test_ptx_is_there_for_devices_that_are_newer(max_build_artifact, unit):
    text = max_build_artifact(unit, "sm_80").files["ptx"].read_text()
    assert ".target sm_" in text


def test_nothing_spills(max_build_artifact):
    for target in TARGETS:
        for path in max_build_artifact("reduce", target).cubins():
            for kernel in read_cubin(path.read_bytes()).kernels:
                assert kernel.stack_bytes == 0


def test_a_softmax_is_launched_with_the_warps_it_was_compiled_for(max_build_artifact):
    kernels = max_build_artifact("softmax", "sm_90a").record.kernels
    assert kernels["softmax_256"].num_warps == 2
    assert kernels["softmax_4096"].num_warps == 8
    assert kernels["softmax_256"].signature == ("*fp32:16", "*fp32:16", "i32", "i32")
