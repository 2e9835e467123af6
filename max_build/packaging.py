"""From a finished build to a wheel: which files go where, and under which tag."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from max_build import manifest as manifests
from max_build.config import Settings, load_settings, oddities
from max_build.errors import CompileError, ConfigError
from max_build.manifest import Manifest, ManifestUnit, WeightRules
from max_build.outcomes import Build, Event, Mode, summary
from max_build.report.history import build_noted
from max_build.store import open_cache
from max_build.workspace import in_memory

__all__ = ["failure", "into_wheel", "manifest_of", "wheel_tag"]

# The platform of MAX's own wheels: an artifact with host code runs where MAX itself does.
_GLIBC = "2_34"


def into_wheel(
    root: str,
    version: str,
    hook: Mapping[str, Any],
    wheel: Any,
    build_data: dict[str, Any],
    app: Any,
) -> None:
    """Build the project and fill `build_data` of hatchling's wheel builder.

    Parameters
    ----------
    root
        The project's directory.
    version
        `standard` or `editable`.
    hook
        The hook's own table.
    wheel
        hatchling's `WheelBuilderConfig`, which knows the packages.
    build_data
        Filled: `force_include`, `extra_metadata`, `tag`, `pure_python`.
    app
        hatchling's application, for what is said to the user.

    Raises
    ------
    MaxBuildError
        If the settings are wrong, or any unit is left without an artifact.
    """
    settings = load_settings(Path(root), hook=hook)
    if settings.disable:
        app.display_info("max-build: disabled")
        return
    for line in oddities(settings):
        app.display_warning(f"max-build: {line}")
    cache = open_cache(settings.cache)
    try:
        mode: Mode = "require-hit" if settings.require_hit else "build"
        result = build_noted(settings, cache, mode=mode, report=_Lines(app))
        for warning in cache.warnings:
            app.display_warning(f"max-build: {warning}")
        if result.failed:
            raise failure(result)
        manifest = manifest_of(settings, result, _package(settings, wheel))
        paths = {blob.digest: cache.path(blob) for blob in manifest.blobs()}
        _include(manifest, paths, version, build_data)
        app.display_info(f"max-build: {summary(result)}")
    finally:
        cache.close()


def failure(result: Build) -> CompileError:
    """One error that tells every unit that failed or, under `require-hit`, missed."""
    lines = []
    for one in result.failed:
        error = one.error
        told = one.reason if error is None else str(error)
        what = "is not in the cache" if one.state == "missed" else "failed"
        lines.append(f"`{one.unit.name}` × `{one.target}` {what}: {told}")
        lines.extend(getattr(error, "__notes__", ()))
    missed = all(one.state == "missed" for one in result.failed)
    hint = "build without `require-hit` (`MAX_BUILD_REQUIRE_HIT`) to compile them" if missed else ""
    return CompileError("\n\n".join(lines), hint=hint)


def manifest_of(settings: Settings, result: Build, package: str) -> Manifest:
    """The manifest of a build whose every outcome has a record."""
    units: dict[str, ManifestUnit] = {}
    for one in result.outcomes:
        assert one.record is not None, one
        before = units.get(one.unit.name)
        targets = {**(before.targets if before else {}), str(one.target): one.record}
        units[one.unit.name] = ManifestUnit(
            kind=one.unit.kind,
            weights=WeightRules.declared(one.unit.declared),
            targets=targets,
        )
    return manifests.make(package, units.items(), embedded=settings.embed)


def wheel_tag(manifest: Manifest) -> str:
    """`py3-none-any`, or the platform that the host code in the artifacts was compiled for.

    Device code alone runs wherever its device does, whatever the host; a graph's artifact holds
    host code too.
    """
    hosts = {
        record.components.host
        for unit in manifest.units.values()
        for record in unit.targets.values()
        if record.components.host
    }
    if not hosts or not manifest.embedded:
        return "py3-none-any"
    arm = all(host.startswith(("neoverse", "apple")) for host in hosts)
    machine = "aarch64" if arm else "x86_64" if "generic" not in hosts else os.uname().machine
    return f"py3-none-manylinux_{_GLIBC}_{machine}"


def _package(settings: Settings, wheel: Any) -> str:
    """The import package that carries the artifacts, as a path inside the wheel."""
    if settings.package:
        return settings.package.replace(".", "/")
    found = sorted({Path(one).name for one in wheel.packages or ()})
    if not found:
        name = settings.project.replace("-", "_")
        root = Path(settings.root)
        found = [one for one in (name,) if (root / one).is_dir() or (root / "src" / one).is_dir()]
    if len(found) == 1:
        return found[0]
    message = (
        "`tool.max-build.package` is missing: the wheel has "
        + (f"the packages {', '.join(f'`{one}`' for one in found)}" if found else "no package")
        + ", and one of them has to carry the artifacts"
    )
    raise ConfigError(message, hint='set it, for example `package = "minilm"`')


def _include(
    manifest: Manifest, paths: Mapping[str, Path], version: str, build_data: dict[str, Any]
) -> None:
    blobs = tuple(manifest.blobs()) if manifest.embedded else ()
    # hatchling reads the files after `initialize` and does not always call `finalize`.
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    need = sum(blob.size for blob in blobs) + (1 << 20)
    scratch = stack.enter_context(in_memory(Path(tempfile.gettempdir()), need))
    text = scratch / manifests.NAME
    text.write_bytes(manifests.encode(manifest))
    build_data["extra_metadata"][str(text)] = manifests.METADATA_NAME
    if version == "editable":
        return
    folder = f"{manifest.package}/{manifests.FOLDER}"
    build_data["force_include"][str(text)] = f"{folder}/{manifests.NAME}"
    for blob in blobs:
        # A copy, since hatchling keeps a file's mode, the cache's being read-only, and since a gc
        # may take the cache's own before hatchling reads it.
        copy = scratch / manifests.file_name(blob)
        shutil.copyfile(paths[blob.digest], copy)
        build_data["force_include"][str(copy)] = f"{folder}/{copy.name}"
    tag = wheel_tag(manifest)
    build_data["tag"] = tag
    build_data["pure_python"] = tag.endswith("-any")


class _Lines:
    """Plain lines of progress through hatchling's application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def __call__(self, event: Event) -> None:
        if event.what == "compiling":
            last = f" (last time {event.expected:.1f} s)" if event.expected else ""
            name = f"`{event.unit}` × `{event.target}`"
            self._app.display_waiting(f"max-build: compiling {name}: {event.reason}{last}")
