"""The choice of an artifact, on machines that are not here."""

from __future__ import annotations

import msgspec
import pytest

from max_build.errors import LoadError
from max_build.key import Components, key_of
from max_build.record import Blob, Record
from max_build.runtime.select import Machine, choose

HOPPER = Machine(cuda=((9, 0),))
TWO = Machine(cuda=((8, 0), (9, 0)))


def records(*targets: str, host: str = "") -> dict[str, Record]:
    found = {}
    for target in targets:
        components = Components(compiler={}, target=target, host=host, sources={})
        blob = Blob(role="mef", digest="0" * 64, size=1)
        found[target] = Record(
            key=key_of(components), unit="u", components=components, blobs=(blob,)
        )
    return found


@pytest.mark.parametrize(
    ("machine", "device", "targets", "chosen", "ordinal"),
    [
        (Machine(), "auto", ["cpu", "sm_90a"], "cpu", None),
        (HOPPER, "auto", ["cpu", "sm_90a"], "sm_90a", 0),
        (HOPPER, "cpu", ["cpu", "sm_90a"], "cpu", None),
        (HOPPER, "auto", ["cpu", "sm_80"], "cpu", None),
        (HOPPER, "auto", ["sm_90", "sm_90a"], "sm_90a", 0),
        (TWO, "gpu:1", ["sm_80", "sm_90a"], "sm_90a", 1),
        (TWO, "gpu", ["sm_80", "sm_90a"], "sm_80", 0),
        (Machine(cuda=((8, 9),)), "auto", ["sm_80", "sm_86"], "sm_86", 0),
        (Machine(cuda=((10, 3),)), "auto", ["sm_100f", "sm_100"], "sm_100f", 0),
        (Machine(hip=("gfx942",)), "auto", ["gfx942", "cpu"], "gfx942", 0),
        (Machine(hip=("gfx90a",)), "auto", ["gfx942", "cpu"], "cpu", None),
    ],
)
def test_the_most_exact_artifact_is_chosen(
    machine: Machine, device: str, targets: list[str], chosen: str, ordinal: int | None
) -> None:
    choice = choose("u", records(*targets), machine, device)
    assert (str(choice.target), choice.ordinal) == (chosen, ordinal)


def test_an_artifact_is_chosen_by_what_its_code_is_for() -> None:
    """MAX answers `sm_120` with code for `sm_120a`, which a 12.1 device cannot run."""
    found = {
        target: msgspec.structs.replace(record, arch=f"{target}a")
        for target, record in records("sm_120").items()
    }
    assert choose("u", found, Machine(cuda=((12, 0),))).ordinal == 0
    with pytest.raises(LoadError, match="`sm_120`: "):
        choose("u", found, Machine(cuda=((12, 1),)))


def test_every_refusal_is_told() -> None:
    with pytest.raises(LoadError) as caught:
        choose("u", records("cpu", "sm_80", "gfx942", "sm_100a"), HOPPER, "gpu")
    told = str(caught.value)
    assert "no artifact of `u` runs on device `gpu` of this machine (CPU, sm_90)" in told
    for name in ("`cpu`: it is for the CPU", "`sm_80`: ", "`sm_100a`: ", "`gfx942`: "):
        assert name in told


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(LoadError, match="device `gpu:2` is not there: this machine has 2 GPUs"):
        choose("u", records("sm_80"), TWO, "gpu:2")
