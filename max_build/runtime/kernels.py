"""`max_build.load_kernels`: from a package's name to kernels that can be launched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from max_build.errors import CompileError, LoadError
from max_build.record import Blob, Record, Role
from max_build.runtime import locate, rules
from max_build.runtime.devices import cuda_driver
from max_build.runtime.module import Kernels, missing_driver
from max_build.runtime.select import Choice, Machine, choose, this_machine
from max_build.runtime.stale import refreshed
from max_build.target import Target

__all__ = ["load_kernels"]

_NAMED_DEVICE = re.compile(r"sm_(\d+)(\d)")
_NEWEST_ISA = (99, 9)


def load_kernels(package: str | Path, unit: str | None = None, *, device: str = "auto") -> Kernels:
    """Load a compiled kernel module; never compiles.

    An editable install's artifact that is older than its sources is told of, or built anew: see
    `MAX_BUILD_STALE`.

    Parameters
    ----------
    package
        An import package that was built with max-build, or the path of a manifest.
    unit
        Name of the kernel module; may be left out where there is only one unit.
    device
        `auto` or `gpu` (the first GPU), `gpu:<n>`, or the capability of a device that need not be
        there, such as `sm_90`: all is chosen and checked then, and nothing can be launched.

    Raises
    ------
    NotBuiltError
        If the package was never built; the hint names the command.
    LoadError
        If there is no driver or no GPU, or no artifact runs on it, each with its reason; or an
        artifact is damaged.
    """
    installed, name, found = locate.find_unit(package, unit, "kernel")
    if named := _NAMED_DEVICE.fullmatch(device):
        machine = Machine(cuda=((int(named[1]), int(named[2])),), here=False)
        device, driver_isa = "gpu", _NEWEST_ISA
    else:
        _check_device(device, name, found.targets, installed)
        machine, device = this_machine(), "gpu" if device == "auto" else device
        driver_isa = rules.ptx_isa_of(cuda_driver() or (0, 0))
    choice, role = _chosen(name, found.targets, machine, device, installed, driver_isa)
    choice = refreshed(installed, name, choice)
    files = _checked(name, choice.target, choice.record, role, installed)
    if not files:
        message = f"the record of `{name}` for `{choice.target}` names no {role}"
        raise LoadError(message, hint="build it again")
    return Kernels(name, choice, role, files)


def _check_device(
    device: str, unit: str, records: Mapping[str, Record], installed: locate.Installed
) -> None:
    """Refuse a device that is none, or any device where there is no GPU."""
    if not re.fullmatch(r"auto|gpu(:\d+)?", device):
        message = f"device must be `auto`, `gpu`, `gpu:<n>` or `sm_NN`, got {device!r}"
        raise LoadError(message)
    missing = missing_driver()
    if missing:
        whole = [
            f"`{target}`"
            for target, record in sorted(records.items())
            if _checked(unit, Target(target), record, "cubin", installed)
        ]
        message = f"`{unit}` needs an NVIDIA GPU: {missing}"
        hint = f"its artifacts are whole, for {', '.join(whole)}"
        raise LoadError(message, hint=hint)


def _chosen(
    unit: str,
    records: Mapping[str, Record],
    machine: Machine,
    device: str,
    installed: locate.Installed,
    driver_isa: tuple[int, int],
) -> tuple[Choice, Role]:
    """The cubin that fits, else the newest PTX that the driver can compile for the device."""
    try:
        return choose(unit, records, machine, device), "cubin"
    except LoadError as error:
        ordinal = int(device.partition(":")[2] or 0)
        if ordinal >= len(machine.cuda):
            raise
        fallback = _ptx(unit, records, machine.cuda[ordinal], installed, driver_isa)
        if isinstance(fallback, str):
            raise LoadError(error.message + fallback, hint=error.hint) from error
        return Choice(*fallback, ordinal), "ptx"


def _ptx(
    unit: str,
    records: Mapping[str, Record],
    device: tuple[int, int],
    installed: locate.Installed,
    driver_isa: tuple[int, int],
) -> tuple[Target, Record] | str:
    """The record whose PTX to use, or why there is none, to be added to the message."""
    from max_build.compilers.ptx_text import read_ptx

    fitting: list[tuple[tuple[int, int], str]] = []
    reasons = ""
    for name, record in sorted(records.items()):
        for path in _checked(unit, Target(name), record, "ptx", installed).values():
            try:
                module = read_ptx(_bytes(path), str(path))
            except CompileError as error:
                reasons += f"\n  PTX of `{name}`: {error.message}"
                continue
            verdict = rules.can_jit(module.target, module.isa, device, driver_isa)
            if isinstance(verdict, rules.Accepted):
                fitting.append((Target(name).capability, name))
            else:
                reasons += f"\n  PTX of `{name}`: {verdict.reason}"
    if not fitting:
        return reasons
    best = max(fitting)[1]
    return Target(best), records[best]


def _checked(
    unit: str, target: Target, record: Record, role: Role, installed: locate.Installed
) -> dict[str, Path]:
    """Digest → file of the record's blobs of that role, each verified.

    Raises
    ------
    LoadError
        If one is damaged or is not what the record says.
    """
    files = {blob.digest: installed.artifact(blob) for blob in record.blobs if blob.role == role}
    if role == "cubin":
        for blob in record.blobs:
            if blob.role == role:
                _check_cubin(unit, target, record, blob, files[blob.digest])
    return files


def _check_cubin(unit: str, target: Target, record: Record, blob: Blob, path: Path) -> None:
    from max_build.compilers.cubin import check_cubin

    wanted = [one.lowered for one in record.kernels.values() if one.blob in ("", blob.digest)]
    try:
        check_cubin(_bytes(path), str(target), wanted)
    except CompileError as error:
        message = f"`{unit}` for `{target}`: {error.message}"
        raise LoadError(message, hint="build it again") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"`{path}` cannot be read: {error.strerror}"
        raise LoadError(message) from error
