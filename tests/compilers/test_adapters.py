"""The registry of adapters."""

from __future__ import annotations

import tomllib
from pathlib import Path

from max_build import compilers


def test_the_adapters_are_those_that_the_distribution_declares() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][compilers.GROUP] == compilers._OWN
    for name in compilers._OWN:
        assert compilers.get(name).name == name
