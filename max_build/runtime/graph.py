"""A graph's artifact on a device: MAX reads it, takes the weights where they are, and runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max_build.errors import LoadError, MaxBuildError
from max_build.record import Record
from max_build.runtime.select import Choice

if TYPE_CHECKING:
    from max_build.weights import Tensor as WeightTensor

__all__ = ["Model", "initialise"]


class Model:
    """A graph that is ready to run.

    Call it with one array per input, in the graph's order: NumPy arrays, DLPack arrays or
    `max.driver.Buffer`s, contiguous, of the dtypes and shapes in `inputs`. It returns a list of
    `max.driver.Buffer`s, one per output, on the model's device.

    Parameters
    ----------
    record
        What was compiled.
    choice
        For which target, and on which device.
    """

    __slots__ = ("_devices", "_held", "_model", "choice", "record", "unit")

    def __init__(
        self, unit: str, record: Record, choice: Choice, model: Any, devices: list[Any], held: Any
    ) -> None:
        self.unit = unit
        self.record = record
        self.choice = choice
        self._model = model
        self._devices = devices
        # MAX reads the weights in place: their mapping has to live as long as the model does.
        self._held = held

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run once; see the class for shapes and types."""
        if self.choice.ordinal is not None:
            inputs = tuple(self._placed(one, n) for n, one in enumerate(inputs))
        found: list[Any] = self._model(*inputs)
        return found

    def __repr__(self) -> str:
        shown = ", ".join(f"{one.name}: {one.dtype}{list(one.shape)}" for one in self.record.inputs)
        return f"<Model {self.unit} for {self.choice.target}: {shown}>"

    @property
    def target(self) -> str:
        """The target it was compiled for."""
        return str(self.choice.target)

    def _placed(self, value: Any, position: int) -> Any:
        from max.driver import Buffer

        if position < len(self.record.inputs) and self.record.inputs[position].device != "cpu":
            buffer = value if isinstance(value, Buffer) else Buffer.from_dlpack(value)
            return buffer.to(self._devices[-1])
        return value


def initialise(
    unit: str, choice: Choice, artifact: Path, weights: Mapping[str, WeightTensor]
) -> Model:
    """Read the artifact and bind the weights, which were checked against the record before.

    Raises
    ------
    LoadError
        If MAX is missing or another version than compiled the artifact, or refuses it.
    """
    record = choice.record
    _check_version(unit, record)
    try:
        from max import driver, engine
    except ImportError as error:
        message = f"`{unit}` is a MAX graph, and MAX cannot be imported: {error}"
        raise LoadError(message, hint="install `max-build[max]`") from error
    from max_build.weights.device import device_buffers, host_buffers

    devices: list[Any] = [driver.CPU()]
    if choice.ordinal is not None:
        devices.append(driver.Accelerator(choice.ordinal))
    placed = {one.name: one.device for one in record.weights}
    try:
        on_host = {name: one for name, one in weights.items() if placed[name] == "cpu"}
        registry: dict[str, Any] = host_buffers(on_host)
        if len(on_host) < len(weights):
            rest = {name: one for name, one in weights.items() if name not in on_host}
            registry |= device_buffers(rest, devices[-1])[0]
        session = engine.InferenceSession(devices=devices)
        model = session.init(engine.read(artifact), weights_registry=registry)
    except MaxBuildError:
        raise
    except Exception as error:
        message = f"MAX cannot initialise `{unit}` for `{choice.target}`: {error}"
        raise LoadError(message) from error
    return Model(unit, record, choice, model, devices, (weights, registry, session))


def _check_version(unit: str, record: Record) -> None:
    """An artifact belongs to the MAX that compiled it: its format is not promised beyond."""
    built = re.sub(r"\+.*", "", record.components.compiler.get("max", ""))
    try:
        found = metadata.version("max")
    except metadata.PackageNotFoundError:
        return  # the import tells it better
    if built and built != found:
        message = f"`{unit}` was compiled by MAX {built}, and MAX {found} is installed"
        raise LoadError(message, hint=f"install `max=={built}`, or build the project again")
