"""pytest fixtures that hand out compiled artifacts: never a compile in a test run unless asked.

Loaded in every pytest run of its environment, so nothing heavy is imported before a fixture is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from max_build.runtime.graph import Model
    from max_build.testing.fixtures import Artifact, Artifacts

__all__ = [
    "max_build_artifact",
    "max_build_artifacts",
    "max_build_model",
    "pytest_addoption",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("max-build", "compiled artifacts from the max-build cache")
    group.addoption(
        "--max-build-compile",
        action="store_true",
        help="compile what the cache does not hold, in place of failing the test",
    )
    group.addoption(
        "--max-build-project",
        metavar="DIR",
        help="the model repo whose units the fixtures load (default: rootdir)",
    )


@pytest.fixture(scope="session")
def max_build_artifacts(request: pytest.FixtureRequest) -> Iterator[Artifacts]:
    """The project's units, looked up once per session; the other fixtures draw on it."""
    from max_build.testing.fixtures import Artifacts

    config = request.config
    artifacts = Artifacts(
        config.getoption("max_build_project") or config.rootpath,
        compile_misses=bool(config.getoption("max_build_compile")),
    )
    yield artifacts
    artifacts.close()


@pytest.fixture(scope="session")
def max_build_artifact(max_build_artifacts: Artifacts) -> Callable[..., Artifact]:
    """`max_build_artifact(unit, target="cpu")`: the record and the verified files of a unit."""
    return max_build_artifacts.artifact


@pytest.fixture(scope="session")
def max_build_model(max_build_artifacts: Artifacts) -> Callable[..., Model]:
    """`max_build_model(unit, target="cpu", weights=None)`: the graph, ready to be called."""

    def model(unit: str, target: str = "cpu", weights: Any = None) -> Model:
        return max_build_artifacts.model(unit, target, weights)

    return model
