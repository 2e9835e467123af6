"""The choice of an artifact, on machines that are not here."""

from __future__ import annotations

import msgspec
import pytest

from max_build.errors import LoadError
from max_build.key import Components, key_of
from max_build.record import Blob, Record, Tensor
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


def on_gpus(count: int) -> dict[str, Record]:
    """A graph that has a weight on each of so many GPUs."""
    weights = tuple(
        Tensor(name=f"w{n}", dtype="float32", shape=(1,), device=f"gpu:{n}") for n in range(count)
    )
    (record,) = records("sm_80").values()
    return {"sm_80": msgspec.structs.replace(record, weights=weights)}


FOUR = Machine(cuda=((8, 0),) * 4)


@pytest.mark.parametrize(
    ("count", "device", "ordinals"),
    [
        (1, "auto", (0,)),
        (2, "auto", (0, 1)),
        (2, "gpu:2", (2, 3)),
        (3, ["gpu:3", "gpu:0", "gpu:2"], (3, 0, 2)),
        (2, ["gpu:3", "gpu:0", "gpu:2"], (3, 0)),
        (1, ["gpu:1"], (1,)),
    ],
)
def test_a_graph_on_several_gpus_gets_as_many(
    count: int, device: str | list[str], ordinals: tuple[int, ...]
) -> None:
    assert choose("u", on_gpus(count), FOUR, device).ordinals == ordinals


def test_a_graph_on_the_cpu_has_no_gpu() -> None:
    assert choose("u", records("cpu"), FOUR).ordinals == ()


def test_too_few_gpus_are_told() -> None:
    with pytest.raises(LoadError, match="runs on 3 GPUs at once, and there are 1 from `gpu:3`"):
        choose("u", on_gpus(3), FOUR, "gpu:3")
    with pytest.raises(LoadError, match="runs on 3 GPUs at once, and there are 2 from `gpu:2`"):
        choose("u", on_gpus(3), FOUR, ["gpu:2", "gpu:1"])


def test_every_gpu_has_to_run_the_artifact() -> None:
    mixed = Machine(cuda=((8, 0), (7, 5)))
    with pytest.raises(LoadError, match="`sm_80`: "):
        choose("u", on_gpus(2), mixed)


@pytest.mark.parametrize("device", [[], ["gpu:1", "gpu:1"], ["cpu", "gpu:0"]])
def test_a_list_names_different_gpus(device: list[str]) -> None:
    with pytest.raises(LoadError, match="several devices must be different GPUs"):
        choose("u", on_gpus(2), FOUR, device)
