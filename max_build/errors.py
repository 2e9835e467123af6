"""Errors a user can act on: what failed, where, why, then a blank line and the way out.

Everything max-build raises on purpose derives from `MaxBuildError`; anything else is a bug.
"""

from __future__ import annotations

__all__ = [
    "CompileError",
    "ConfigError",
    "LoadError",
    "MaxBuildError",
    "NotBuiltError",
    "StoreError",
    "TargetError",
    "ToolchainError",
    "WeightsError",
]


class MaxBuildError(Exception):
    """An expected failure, told in full by `str(error)`.

    Parameters
    ----------
    message
        What failed, where and why. Several findings go on lines of their own.
    hint
        The way out, if there is one; shown after a blank line as `hint: …`.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class ConfigError(MaxBuildError, ValueError):
    """The project's settings are wrong; every finding is listed."""


class TargetError(MaxBuildError, ValueError):
    """A target string is not one the unit's compiler accepts."""


class ToolchainError(MaxBuildError):
    """A compiler or one of its parts is missing, too old or unusable."""


class CompileError(MaxBuildError):
    """A unit could not be derived or compiled for a target."""


class StoreError(MaxBuildError, OSError):
    """A tier of the cache failed at one operation.

    Parameters
    ----------
    kind
        The counted kind of fault: `timeout`, `refused`, `server`, `permission`, `full`,
        `read-only`, `missing`, `corrupt`, `mismatch`, `unsigned`, `altered`, `closed`,
        `unsupported` or `io`.
    """

    def __init__(self, message: str, *, kind: str = "io", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class LoadError(MaxBuildError):
    """An artifact cannot be loaded on this machine or device."""


class NotBuiltError(LoadError, FileNotFoundError):
    """No artifact of the unit exists yet, in the wheel or in any tier."""


class WeightsError(MaxBuildError, ValueError):
    """A weights file is missing, damaged, or does not fit the graph."""
