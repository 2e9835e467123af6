"""`max_build.load`: from a package's name to a model that runs, without a compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from max_build.errors import LoadError, WeightsError
from max_build.manifest import WeightRules
from max_build.runtime import locate
from max_build.runtime.graph import Model, initialise
from max_build.runtime.select import Choice, choose, this_machine
from max_build.runtime.stale import refreshed

if TYPE_CHECKING:
    from max_build.weights import Weights

__all__ = ["WeightFiles", "bring_up", "listed", "load"]

WeightFiles = str | PathLike[str] | Sequence[str | PathLike[str]]


def load(
    package: str | Path,
    unit: str | None = None,
    *,
    weights: WeightFiles | None = None,
    weights_digest: str = "",
    device: str | Sequence[str] = "auto",
    warm: bool | Mapping[str, int] = False,
) -> Model:
    """Load a compiled graph with its weights mapped; never compiles.

    An editable install's artifact that is older than its sources is told of, or built anew: see
    `MAX_BUILD_STALE`.

    Parameters
    ----------
    package
        An import package that was built with max-build, or the path of a manifest.
    unit
        Name of the graph; may be left out where there is only one unit.
    weights
        Files or directories, safetensors or GGUF, in place of those the project names.
    weights_digest
        What `max-build weights --fingerprint` calls the right weights, whole; every byte is read
        to compare it. Empty means that names, types and shapes are enough.
    device
        `auto` (a GPU that has an artifact, else the CPU), `cpu`, `gpu` or `gpu:<n>`. A graph on
        several GPUs uses those that follow, too; a list names each of them instead, in the
        graph's order: `["gpu:2", "gpu:0"]`.
    warm
        Run once on zeros before returning, so that the first call is as fast as any later one;
        see `Model.warm`. A mapping gives sizes of dynamic dimensions by name, 1 for all others:
        `{"batch": 8}`.

    Returns
    -------
    Model
        Callable with one array per input.

    Raises
    ------
    NotBuiltError
        If the package was never built; the hint names the command.
    LoadError
        If no artifact runs on this machine, each with its reason; or it is damaged.
    WeightsError
        If weights are missing or do not fit the graph, every mismatch at once.
    """
    installed, name, found = locate.find_unit(package, unit, "graph")
    choice = choose(name, found.targets, this_machine(), device)
    choice = refreshed(installed, name, choice)
    blob = choice.record.blob("mef")
    if blob is None:
        message = f"the record of `{name}` for `{choice.target}` names no artifact of a graph"
        raise LoadError(message, hint="build it again")
    artifact = installed.artifact(blob)
    rules = found.weights
    if weights is not None:
        rules = msgspec.structs.replace(rules, files=listed(weights))
    model = bring_up(name, choice, artifact, rules, installed.bases, weights_digest)
    if warm is not False:
        model.warm({} if warm is True else warm)
    return model


def bring_up(
    unit: str,
    choice: Choice,
    artifact: Path,
    rules: WeightRules,
    bases: tuple[Path, ...],
    weights_digest: str = "",
) -> Model:
    """Open and check the weights, then initialise the artifact.

    Raises
    ------
    LoadError, WeightsError
        As `load`.
    """
    from max_build.weights import open_weights
    from max_build.weights.binding import bind
    from max_build.weights.remembered import default_folder

    wanted = choice.record.weights
    if not wanted:
        return initialise(unit, choice, artifact, {})
    if not rules.files:
        message = f"`{unit}` needs {len(wanted)} weights, and no file was named"
        hint = f"pass `weights=`, or set `weights` in [tool.max-build.graphs.{unit}]"
        raise WeightsError(message, hint=hint)
    paths = [locate.weights_path(one, bases) for one in rules.files]
    opened = open_weights(paths, memo=default_folder())
    if weights_digest:
        _check_digest(unit, opened, weights_digest)
    bound = bind(
        wanted,
        opened,
        rename=rules.rename,
        tied=rules.tied,
        transpose=rules.transpose,
        cast=rules.cast,
        quantised=rules.quantised,
    )
    return initialise(unit, choice, artifact, bound)


def _check_digest(unit: str, opened: Weights, wanted: str) -> None:
    from max_build.weights.fingerprint import fingerprint

    found = fingerprint(opened).total
    if found != wanted:
        files = ", ".join(f"`{path}`" for path in opened.files)
        message = f"the weights of `{unit}` are not those asked for: {files} have digest {found}"
        raise WeightsError(
            message, hint=f"`max-build weights FILE --fingerprint` shows it; wanted {wanted}"
        )


def listed(weights: WeightFiles) -> tuple[str, ...]:
    """The `weights` argument of `load`, whatever its form, as a tuple of paths."""
    if isinstance(weights, str | PathLike):
        weights = [weights]
    return tuple(str(one) for one in weights)
