"""The compatibility table, spelled out: a row per architecture of code, the devices that run it."""

from __future__ import annotations

import pytest

from max_build.runtime.rules import Accepted, Rejected, can_jit, can_run, ptx_isa_of

DEVICES = [
    (7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0),
    (10, 0), (10, 1), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1),
]  # fmt: skip

RUNS_ON = {
    "sm_75": {(7, 5)},
    "sm_80": {(8, 0), (8, 6), (8, 7), (8, 8), (8, 9)},
    "sm_86": {(8, 6), (8, 7), (8, 8), (8, 9)},
    "sm_89": {(8, 9)},
    "sm_90": {(9, 0)},
    "sm_90a": {(9, 0)},
    "sm_100": {(10, 0), (10, 1), (10, 3), (10, 7)},
    "sm_100a": {(10, 0)},
    "sm_100f": {(10, 0), (10, 3), (10, 7)},
    "sm_101f": {(10, 1)},
    "sm_103": {(10, 3), (10, 7)},
    "sm_103a": {(10, 3)},
    "sm_103f": {(10, 3), (10, 7)},
    "sm_110": {(11, 0)},
    "sm_110f": {(11, 0)},
    "sm_120": {(12, 0), (12, 1)},
    "sm_120a": {(12, 0)},
    "sm_120f": {(12, 0), (12, 1)},
    "sm_121": {(12, 1)},
    "sm_121a": {(12, 1)},
    "sm_121f": {(12, 1)},
}

JITS_ON = {
    "sm_75": set(DEVICES),
    "compute_80": set(DEVICES) - {(7, 5)},
    "sm_90": {device for device in DEVICES if device >= (9, 0)},
    "sm_90a": {(9, 0)},
    "sm_100f": {(10, 0), (10, 3), (10, 7)},
    "sm_120": {(12, 0), (12, 1)},
    "sm_121": {(12, 1)},
}


@pytest.mark.parametrize("arch", RUNS_ON)
def test_machine_code_runs_on_exactly_these_devices(arch: str) -> None:
    assert {device for device in DEVICES if can_run(arch, device) == Accepted()} == RUNS_ON[arch]


@pytest.mark.parametrize("arch", JITS_ON)
def test_ptx_is_compiled_for_exactly_these_devices(arch: str) -> None:
    accepted = {d for d in DEVICES if can_jit(arch, (8, 0), d, (9, 0)) == Accepted()}
    assert accepted == JITS_ON[arch]


@pytest.mark.parametrize(
    ("arch", "device", "reason"),
    [
        ("sm_80", (9, 0), "it runs on 8.x devices, and the device is 9.0"),
        ("sm_86", (8, 0), "it needs 8.6 or later, and the device is 8.0"),
        ("sm_90a", (10, 0), "it runs on 9.0 alone, and the device is 10.0"),
        ("sm_120a", (12, 1), "it runs on 12.0 alone, and the device is 12.1"),
        ("sm_100f", (12, 0), "it runs on the family of 10.0, and the device is 12.0"),
        ("gfx942", (9, 0), "`gfx942` is not the name of a CUDA architecture"),
        ("sm_9", (9, 0), "`sm_9` is not the name of a CUDA architecture"),
        ("sm_90b", (9, 0), "`sm_90b` is not the name of a CUDA architecture"),
        ("", (9, 0), "`` is not the name of a CUDA architecture"),
    ],
)
def test_a_rejection_says_why_in_one_line(arch: str, device: tuple[int, int], reason: str) -> None:
    assert can_run(arch, device) == Rejected(reason)


def test_ptx_newer_than_the_driver_is_rejected_whatever_the_device() -> None:
    assert can_jit("sm_75", (9, 1), (9, 0), (9, 0)) == Rejected(
        "it is PTX ISA 9.1, and the driver takes up to 9.0"
    )
    assert can_jit("nonsense", (8, 0), (9, 0), (9, 0)) == Rejected(
        "`nonsense` is not the name of a CUDA architecture"
    )


@pytest.mark.parametrize(
    ("cuda", "isa"),
    [
        ((10, 0), (6, 3)), ((11, 0), (7, 0)), ((11, 8), (7, 8)), ((12, 0), (8, 0)),
        ((12, 4), (8, 4)), ((12, 6), (8, 5)), ((12, 8), (8, 7)), ((12, 9), (8, 8)),
        ((13, 0), (9, 0)), ((13, 5), (9, 5)),
    ],
)  # fmt: skip
def test_the_isa_of_a_release(cuda: tuple[int, int], isa: tuple[int, int]) -> None:
    assert ptx_isa_of(cuda) == isa
