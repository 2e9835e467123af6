"""Which artifact a machine can run, and why not each other one: a pure function of both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from max_build.errors import LoadError
from max_build.record import Record
from max_build.target import Target

__all__ = ["Choice", "Machine", "choose", "this_machine", "why_not"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Its devices, in the drivers' order.

    Parameters
    ----------
    here
        It is this machine, and not one that only somebody named.
    """

    cuda: tuple[tuple[int, int], ...] = ()
    hip: tuple[str, ...] = ()
    here: bool = True

    @property
    def gpus(self) -> int:
        """How many GPUs it has."""
        return len(self.cuda) or len(self.hip)


@dataclass(frozen=True, slots=True)
class Choice:
    """The artifact to load.

    Parameters
    ----------
    ordinal
        The GPU to use, None for the CPU.
    others
        Those a graph on several GPUs uses beside it: its `gpu:1`, `gpu:2`, ….
    """

    target: Target
    record: Record
    ordinal: int | None
    others: tuple[int, ...] = ()

    @property
    def ordinals(self) -> tuple[int, ...]:
        """Number of each GPU on this machine, in the order of the graph's own numbers."""
        return () if self.ordinal is None else (self.ordinal, *self.others)


def this_machine() -> Machine:
    """The machine this runs on, as its drivers describe it."""
    from max_build.runtime import devices

    cuda = devices.cuda_capabilities()
    return Machine(cuda=cuda, hip=() if cuda else devices.hip_architectures())


def choose(
    unit: str,
    records: Mapping[str, Record],
    machine: Machine,
    device: str | Sequence[str] = "auto",
) -> Choice:
    """Choose the artifact for `device`: the most exact one that it can run.

    Parameters
    ----------
    records
        Target → record.
    device
        `auto` (the first GPU that has an artifact, else the CPU), `cpu`, `gpu` or `gpu:<n>`. A
        graph on several GPUs uses those that follow, too; a list names each of them instead.

    Raises
    ------
    LoadError
        If there is none; the message says of each artifact why it does not fit.
    """
    rejected: dict[str, str] = {}
    for ordinals in _candidates(device, machine):
        fitting: dict[Target, tuple[int, ...]] = {}
        for name, record in records.items():
            used = ordinals[: _gpus(record)]
            if reason := _refusal(name, record, machine, used):
                rejected[name] = reason
            else:
                fitting[Target(name)] = used
        if fitting:
            best = max(fitting, key=_exactness)
            used = fitting[best]
            return Choice(best, records[best.name], used[0] if used else None, used[1:])
    reasons = "".join(f"\n  `{name}`: {rejected[name]}" for name in sorted(rejected))
    message = f"no artifact of `{unit}` runs on {_described(device, machine)}:{reasons}"
    raise LoadError(message, hint=f"add its target to `targets` of unit `{unit}` and build again")


def _candidates(device: str | Sequence[str], machine: Machine) -> list[tuple[int, ...]]:
    """The GPUs that may be used, each time in the order of use; none of them means the CPU."""
    if not isinstance(device, str):
        listed = [_ordinal(one, machine) for one in device]
        if not listed or None in listed or len(set(listed)) < len(listed):
            message = f"several devices must be different GPUs, got {list(device)!r}"
            raise LoadError(message, hint='e.g. `device=["gpu:0", "gpu:1"]`')
        return [tuple(one for one in listed if one is not None)]
    gpus = range(machine.gpus)
    if device == "auto":
        return [tuple(gpus), ()] if gpus else [()]
    first = _ordinal(device, machine)
    return [() if first is None else tuple(gpus[first:])]


def _ordinal(device: str, machine: Machine) -> int | None:
    found = re.fullmatch(r"cpu|gpu(?::(\d+))?", device)
    if not found:
        message = f"device must be `auto`, `cpu`, `gpu` or `gpu:<n>`, got {device!r}"
        raise LoadError(message)
    if device == "cpu":
        return None
    ordinal = int(found[1] or 0)
    if ordinal >= machine.gpus:
        message = f"device `{device}` is not there: this machine has {machine.gpus} GPUs"
        raise LoadError(message, hint='`device="auto"` takes the CPU where there is no GPU')
    return ordinal


def _gpus(record: Record) -> int:
    """How many GPUs a graph uses, going by its signature; 1 if it names none."""
    tensors = (*record.inputs, *record.outputs, *record.weights)
    numbers = (int(one.device.partition(":")[2]) for one in tensors if one.device != "cpu")
    return 1 + max(numbers, default=0)


def _refusal(name: str, record: Record, machine: Machine, used: tuple[int, ...]) -> str:
    """Why the artifact cannot run on these GPUs, or without any on the CPU; empty when it can."""
    target = Target(record.arch or name)
    for ordinal in used or (None,):
        if reason := why_not(target, machine, ordinal, host=record.components.host):
            return reason
    if used and len(used) < (wanted := _gpus(record)):
        return f"it runs on {wanted} GPUs at once, and there are {len(used)} from `gpu:{used[0]}`"
    return ""


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


def _described(device: str | Sequence[str], machine: Machine) -> str:
    named = device if isinstance(device, str) else ", ".join(device)
    gpus = [f"sm_{major}{minor}" for major, minor in machine.cuda] or list(machine.hip)
    if not machine.here:
        return f"a device of {', '.join(gpus)}"
    has = ", ".join(gpus) or "no GPU"
    return f"device `{named}` of this machine (CPU, {has})"
