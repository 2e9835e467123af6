"""For a machine with an NVIDIA GPU: `pytest tests/gpu` runs everything and prints a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from max_build.runtime.devices import cuda_capabilities, cuda_driver

Note = Callable[[str, str], None]

_ROWS: list[tuple[str, str]] = []


@pytest.fixture(scope="session")
def capability() -> tuple[int, int]:
    """Compute capability of the first device."""
    if cuda_driver() is None:
        pytest.skip("no NVIDIA driver (`libcuda.so.1` cannot be loaded)")
    found = cuda_capabilities()
    if not found:
        pytest.skip("the NVIDIA driver finds no device")
    return found[0]


@pytest.fixture(scope="session")
def stream(capability: tuple[int, int]) -> Iterator[Any]:
    """A stream of the first device, which is current."""
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    yield stream
    stream.close()


@pytest.fixture
def note() -> Note:
    """`note(what, outcome)` adds a row to the table."""

    def add(what: str, outcome: str) -> None:
        _ROWS.append((what, outcome))

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _ROWS:
        width = max(len(what) for what, _ in _ROWS)
        terminalreporter.section("on the GPU")
        for what, outcome in _ROWS:
            terminalreporter.write_line(f"{what:<{width}}  {outcome}")
