"""The hatch build hook: thin, with no logic of its own.

hatch imports every plugin of an environment, and constructs the hook to ask for dependencies as
well, so nothing heavy is imported before `initialize`.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin import hookimpl

__all__ = ["MaxBuildHook", "hatch_register_build_hook"]


class MaxBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """`[tool.hatch.build.targets.wheel.hooks.max-build]`."""

    PLUGIN_NAME = "max-build"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what misses and hand the artifacts to the wheel; an sdist carries none."""
        if self.target_name != "wheel":
            return
        from max_build.errors import MaxBuildError
        from max_build.packaging import into_wheel

        try:
            into_wheel(self.root, version, self.config, self.build_config, build_data, self.app)
        except MaxBuildError as error:
            self.app.abort(f"max-build: {error}")


@hookimpl
def hatch_register_build_hook() -> type[MaxBuildHook]:
    """Name the hook to hatchling."""
    return MaxBuildHook
