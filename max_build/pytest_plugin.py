"""pytest fixtures that hand out compiled artifacts: never a compile in a test run unless asked.

Loaded in every pytest run of its environment, so nothing heavy is imported before a fixture is
used.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from max_build.runtime.graph import Model
    from max_build.runtime.module import Kernels
    from max_build.store import Cache
    from max_build.testing.fixtures import Artifact, Artifacts

_TOLD = "max_build_told"
_told = pytest.StashKey[list[tuple[str, float]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("max-build", "compiled artifacts from the max-build cache")
    group.addoption(
        "--max-build-compile",
        action="store_true",
        help="compile what the cache does not hold, in place of failing the test",
    )
    group.addoption(
        "--max-build-require-hit",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="never compile, whatever --max-build-compile says (default: where CI is set)",
    )
    group.addoption("--max-build-cache", metavar="DIR", help="the cache's local directory")
    group.addoption(
        "--max-build-project",
        metavar="DIR",
        help="the model repo whose units the fixtures load (default: rootdir)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker."""
    config.addinivalue_line(
        "markers",
        "max_build(target=...): skip the test where this machine cannot run that target, "
        "or any of a list of them",
    )
    config.stash[_told] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a marked test that this machine cannot run, with the reason."""
    for marker in item.iter_markers("max_build"):
        targets = marker.kwargs.get("target", marker.args)
        reason = _cannot_run([targets] if isinstance(targets, str) else list(targets))
        if reason:
            pytest.skip(reason)


def _cannot_run(targets: list[str]) -> str:
    from max_build.runtime.select import this_machine, why_not
    from max_build.target import parse

    machine = this_machine()
    reasons = []
    for name in targets:
        target = parse(name)
        gpus: list[int | None] = [*range(machine.gpus)]
        ordinals = [None] if target.is_cpu or not gpus else gpus
        found = [why_not(target, machine, ordinal) for ordinal in ordinals]
        if "" in found:
            return ""
        reasons.append(f"`{name}`: {found[0]}")
    return "; ".join(reasons)


@pytest.fixture(scope="session")
def max_build_artifacts(request: pytest.FixtureRequest) -> Iterator[Artifacts]:
    """The project's units, looked up once per session; the other fixtures draw on it."""
    from max_build.testing.fixtures import Artifacts

    config = request.config
    require_hit = config.getoption("max_build_require_hit")
    if require_hit is None:
        require_hit = bool(os.environ.get("CI"))
    told = config.stash[_told]
    lacking = [] if config.getoption("max_build_compile") else ["--max-build-compile"]
    lacking += ["--no-max-build-require-hit"] if require_hit else []
    artifacts = Artifacts(
        config.getoption("max_build_project") or config.rootpath,
        to_compile=lacking,
        cache_dir=config.getoption("max_build_cache") or "",
        told=lambda state, seconds: told.append((state, seconds)),
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
    return max_build_artifacts.model


@pytest.fixture(scope="session")
def max_build_kernels(max_build_artifacts: Artifacts) -> Callable[..., Kernels]:
    """`max_build_kernels(unit, target)`: the kernels of a module by their source-level names."""
    return max_build_artifacts.kernels


@pytest.fixture
def max_build_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    """An empty cache of the test's own, which `MAX_BUILD_CACHE_DIR` names as well."""
    from max_build.store import CacheSettings, open_cache

    folder = tmp_path / "max-build-cache"
    for name in ("MAX_BUILD_SHARED", "MAX_BUILD_REMOTE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(folder))
    cache = open_cache(CacheSettings(dir=str(folder)))
    yield cache
    cache.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what an xdist worker looked up to the controller, which alone reports."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_TOLD] = session.config.stash[_told]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a finished xdist worker looked up."""
    told = getattr(node, "workeroutput", {}).get(_TOLD, [])
    node.config.stash[_told].extend((state, seconds) for state, seconds in told)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line: how many artifacts came from the cache, and what was compiled."""
    told = config.stash[_told]
    if not told:
        return
    from max_build.outcomes import STATES

    parts = []
    for state in STATES:
        seconds = [spent for one, spent in told if one == state]
        if seconds:
            took = f" in {sum(seconds):.1f} s" if state in ("compiled", "uncached") else ""
            parts.append(f"{len(seconds)} {state}{took}")
    terminalreporter.write_line(f"max-build: {', '.join(parts)}")
