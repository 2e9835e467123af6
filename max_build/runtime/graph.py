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
        For which target, and on which devices.
    engine
        MAX's own model, a `max.engine.Model`.
    devices
        `cpu`, `gpu:0`, … as the graph names them → the `max.driver.Device` of each.
    """

    __slots__ = ("_devices", "_held", "choice", "engine", "record", "unit")

    def __init__(
        self,
        unit: str,
        record: Record,
        choice: Choice,
        engine: Any,
        devices: Mapping[str, Any],
        held: Any,
    ) -> None:
        self.unit = unit
        self.record = record
        self.choice = choice
        self.engine = engine
        self._devices = devices
        # MAX reads the weights in place: their mapping has to live as long as the model does.
        self._held = held

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run once; see the class for shapes and types."""
        if self.choice.ordinal is not None:
            inputs = tuple(self._placed(one, n) for n, one in enumerate(inputs))
        found: list[Any] = self.engine(*inputs)
        return found

    def __repr__(self) -> str:
        shown = ", ".join(f"{one.name}: {one.dtype}{list(one.shape)}" for one in self.record.inputs)
        return f"<Model {self.unit} for {self.choice.target}: {shown}>"

    @property
    def target(self) -> str:
        """The target it was compiled for."""
        return str(self.choice.target)

    def warm(self, sizes: Mapping[str, int] | None = None) -> None:
        """Run once on zeros, so that the next call is as fast as any later one.

        What a first call alone pays for is paid here: pages of the weights that are not in memory
        yet, the runtime's threads and buffers, and on a GPU the loading of each kernel. Call it
        again for each shape that matters.

        No device graph is captured: MAX replays one into the buffers of its capture, so that a
        call would overwrite what the call before returned. Code that can live with it has
        `model.engine.capture` and `replay`.

        Parameters
        ----------
        sizes
            Size of each dynamic dimension, by its name; 1 for those that are left out.

        Raises
        ------
        LoadError
            If the graph has no dimension of that name, cannot be run on zeros of its signature,
            or has an input that is no tensor.
        """
        from max.driver import Buffer
        from max.dtype import DType

        sizes = sizes or {}
        names = {dim for one in self.record.inputs for dim in one.shape if isinstance(dim, str)}
        if unknown := sorted(sizes.keys() - names):
            has = ", ".join(f"`{name}`" for name in sorted(names)) or "none"
            message = f"`{self.unit}` has no dynamic dimension `{unknown[0]}`; it has {has}"
            raise LoadError(message)
        if opaque := next((one for one in self.record.inputs if one.dtype == "opaque"), None):
            message = f"`{self.unit}` cannot be warmed: its input `{opaque.name}` is no tensor"
            raise LoadError(message, hint="call the model once instead")
        shapes = [
            [sizes.get(dim, 1) if isinstance(dim, str) else dim for dim in one.shape]
            for one in self.record.inputs
        ]
        try:
            zeros = [
                Buffer.zeros(shape, DType[one.dtype], self._devices[one.device])
                for one, shape in zip(self.record.inputs, shapes, strict=True)
            ]
            self.engine(*zeros)
            for device in self._devices.values():
                device.synchronize()
        except Exception as error:
            pairs = zip(self.record.inputs, shapes, strict=True)
            told = ", ".join(f"{one.dtype}{shape}" for one, shape in pairs)
            message = f"`{self.unit}` cannot be warmed by zeros of {told}: {error}"
            hint = 'say how large its dynamic dimensions have to be: `warm={"name": size}`'
            raise LoadError(message, hint=hint) from error

    def _placed(self, value: Any, position: int) -> Any:
        from max.driver import Buffer

        if position < len(self.record.inputs) and self.record.inputs[position].device != "cpu":
            buffer = value if isinstance(value, Buffer) else Buffer.from_dlpack(value)
            return buffer.to(self._devices[self.record.inputs[position].device])
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
    from max_build.weights.device import deliver

    try:
        devices: dict[str, Any] = {"cpu": driver.CPU()}
        for number, ordinal in enumerate(choice.ordinals):
            devices[f"gpu:{number}"] = driver.Accelerator(ordinal)
        registry = deliver(weights, {one.name: one.device for one in record.weights}, devices)
        session = engine.InferenceSession(devices=list(devices.values()))
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
