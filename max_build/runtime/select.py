"""Which artifact a machine can run, and why not each other one: a pure function of both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from max_build.errors import LoadError
from max_build.record import Record
from max_build.target import Target

__all__ = ["Choice", "Machine", "choose", "this_machine", "why_not"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Its devices, in the drivers' order, and what its CPU lacks for a baseline, in words."""

    cuda: tuple[tuple[int, int], ...] = ()
    hip: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """How many GPUs it has."""
        return len(self.cuda) or len(self.hip)


@dataclass(frozen=True, slots=True)
class Choice:
    """The artifact to load. `ordinal` is the GPU to use, None for the CPU."""

    target: Target
    record: Record
    ordinal: int | None


def this_machine() -> Machine:
    """The machine this runs on, as its drivers describe it."""
    from max_build.runtime import devices

    cuda = devices.cuda_capabilities()
    return Machine(cuda=cuda, hip=() if cuda else devices.hip_architectures())


def choose(
    unit: str, records: Mapping[str, Record], machine: Machine, device: str = "auto"
) -> Choice:
    """Choose the artifact for `device`: the most exact one that it can run.

    Parameters
    ----------
    records
        Target → record.
    device
        `auto` (the first GPU that has an artifact, else the CPU), `cpu`, `gpu` or `gpu:<n>`.

    Raises
    ------
    LoadError
        If there is none; the message says of each artifact why it does not fit.
    """
    ordinals = _ordinals(device, machine)
    rejected: dict[str, str] = {}
    for ordinal in ordinals:
        fitting: list[Target] = []
        for name, record in records.items():
            code, host = Target(record.arch or name), record.components.host
            reason = why_not(code, machine, ordinal, host=host)
            if reason:
                rejected[name] = reason
            else:
                fitting.append(Target(name))
        if fitting:
            best = max(fitting, key=_exactness)
            return Choice(best, records[best.name], ordinal)
    reasons = "".join(f"\n  `{name}`: {rejected[name]}" for name in sorted(rejected))
    message = f"no artifact of `{unit}` runs on {_described(device, machine)}:{reasons}"
    raise LoadError(message, hint=f"add its target to `targets` of unit `{unit}` and build again")


def _ordinals(device: str, machine: Machine) -> tuple[int | None, ...]:
    found = re.fullmatch(r"auto|cpu|gpu(?::(\d+))?", device)
    if not found:
        message = f"device must be `auto`, `cpu`, `gpu` or `gpu:<n>`, got {device!r}"
        raise LoadError(message)
    if device == "cpu":
        return (None,)
    if device == "auto":
        return (*range(min(1, machine.gpus)), None)
    ordinal = int(found[1] or 0)
    if ordinal >= machine.gpus:
        message = f"device `{device}` is not there: this machine has {machine.gpus} GPUs"
        raise LoadError(message, hint='`device="auto"` takes the CPU where there is no GPU')
    return (ordinal,)


def why_not(target: Target, machine: Machine, ordinal: int | None, *, host: str = "") -> str:
    """Why code for `target` cannot run on a GPU, or the CPU (None); empty when it can.

    Parameters
    ----------
    host
        Baseline of the host code that comes with it.
    """
    from max_build.runtime.host import missing_features

    if host and (lacking := missing_features(host)):
        return lacking
    if target.is_cpu:
        return "" if ordinal is None else "it is for the CPU"
    if ordinal is None:
        return "it needs a GPU" if machine.gpus else "it needs a GPU, and this machine has none"
    if target.api == "hip":
        found = machine.hip[ordinal] if ordinal < len(machine.hip) else "no AMD GPU"
        return "" if found == target.name else f"the device is {found}"
    if not machine.cuda:
        return "it needs an NVIDIA GPU"
    from max_build.runtime import rules

    verdict = rules.can_run(target.name, machine.cuda[ordinal])
    return "" if isinstance(verdict, rules.Accepted) else verdict.reason


def _exactness(target: Target) -> tuple[bool, int, tuple[int, int]]:
    if target.api != "cuda":
        return (not target.is_cpu, 0, (0, 0))
    return (True, {"a": 2, "f": 1}.get(target.suffix, 0), target.capability)


def _described(device: str, machine: Machine) -> str:
    gpus = [f"sm_{major}{minor}" for major, minor in machine.cuda] or list(machine.hip)
    has = ", ".join(gpus) or "no GPU"
    return f"device `{device}` of this machine (CPU, {has})"
