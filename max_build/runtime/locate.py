"""Where a package's manifest, artifacts and weights are on this machine.

A wheel has them beside the package's modules. An editable install has only its metadata, so its
artifacts come from the cache by digest. Nothing of the package itself is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from max_build import manifest as manifests
from max_build.distributions import normalise
from max_build.errors import LoadError, MaxBuildError, NotBuiltError, WeightsError
from max_build.key import digest
from max_build.manifest import Manifest, ManifestUnit
from max_build.record import Blob

__all__ = ["Installed", "check_kind", "find", "find_unit", "is_project", "weights_path"]


@dataclass(frozen=True, slots=True)
class Installed:
    """A manifest that was found, and the places its files may be in.

    Parameters
    ----------
    where
        Names the manifest in messages.
    folder
        Directory of the artifacts, where they came with it.
    package
        The package's directory.
    project
        The project's directory, of an editable install.
    """

    manifest: Manifest
    where: str
    folder: Path | None = None
    package: Path | None = None
    project: Path | None = None
    bases: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        bases = tuple(one for one in (self.package, self.project, self.folder) if one is not None)
        object.__setattr__(self, "bases", bases)

    def artifact(self, blob: Blob) -> Path:
        """A file whose bytes are those of `blob`, verified.

        Raises
        ------
        NotBuiltError
            If neither the package nor any tier of the cache has it.
        LoadError
            If the file beside the package is damaged and no tier has it either.
        """
        damaged = ""
        if self.folder is not None:
            path = self.folder / manifests.file_name(blob)
            try:
                if digest(path.read_bytes()) == blob.digest:
                    return path
                damaged = f"`{path}` is damaged"
            except OSError as error:
                damaged = f"`{path}` cannot be read ({error.strerror})"
        found = _from_cache(self, blob)
        if found is not None:
            return found
        package = self.manifest.package
        if damaged and self.manifest.embedded:
            message = f"{damaged}, and the cache does not have it"
            raise LoadError(message, hint=f"install `{package}` again")
        message = f"an artifact of `{package}` is in no tier of the cache ({blob.digest[:12]}…)"
        raise NotBuiltError(message, hint=_build_command(self.project))


def find(source: str | Path) -> Installed:
    """Find the manifest of an import package, or read the one at a path.

    Parameters
    ----------
    source
        Name of an import package, or path of a `manifest.json` or the directory that holds it.

    Raises
    ------
    NotBuiltError
        If there is no such package, or it was built without max-build.
    LoadError
        If its files cannot be looked at, or the manifest is damaged.
    """
    try:
        return _find(source)
    except MaxBuildError:
        raise
    except OSError as error:
        message = f"package `{source}` cannot be read: {error}"
        raise LoadError(message) from error


def find_unit(
    package: str | Path, unit: str | None, kind: Literal["graph", "kernel"]
) -> tuple[Installed, str, ManifestUnit]:
    """The manifest that has a unit, the unit's name and what the manifest says of it.

    Raises
    ------
    NotBuiltError
        As `find`.
    LoadError
        As `find`; if there is no such unit, or it is of the other kind.
    """
    installed = find(package)
    name, found = installed.manifest.unit(unit)
    other = "load_kernels" if kind == "graph" else "load"
    hint = f'`max_build.{other}("{package}", "{name}")` loads it'
    check_kind(name, found.kind, kind, hint=hint)
    return installed, name, found


def check_kind(unit: str, kind: str, wanted: Literal["graph", "kernel"], hint: str = "") -> None:
    """Raise `LoadError` unless a unit is of the kind that is wanted."""
    if kind == wanted:
        return
    if wanted == "graph":
        message = f"`{unit}` is a kernel module, not a graph"
    else:
        message = f"`{unit}` is a graph, not a kernel module"
    raise LoadError(message, hint=hint)


def is_project(folder: Path) -> bool:
    """Whether the project of an editable install is still where it was.

    Raises
    ------
    LoadError
        If that cannot be told.
    """
    try:
        return (folder / "pyproject.toml").is_file()
    except OSError as error:
        message = f"project `{folder}` cannot be looked at: {error.strerror}"
        raise LoadError(message) from error


def _find(source: str | Path) -> Installed:
    if isinstance(source, Path) or "/" in source:
        path = Path(source)
        path = path / manifests.NAME if path.is_dir() else path
        return _read(path, package=None)
    places = _places(source)
    for place in places or ():
        path = place / manifests.FOLDER / manifests.NAME
        if path.is_file():
            return _read(path, package=place)
    for distribution in _distributions(source):
        text = distribution.read_text(f"extra_metadata/{manifests.METADATA_NAME}")
        # A distribution of the package's name can be another's.
        if text is None or not _is_of(source, text.encode(), distribution):
            continue
        where = f"{manifests.METADATA_NAME} of {distribution.name}"
        manifest = manifests.decode(text.encode(), where)
        package = places[0] if places else None
        return Installed(manifest, where, None, package, _project(distribution))
    raise _not_built(source, places)


def _not_built(source: str, places: list[Path] | None) -> NotBuiltError:
    install = "`pip install -e .` in its project"
    if places is None:
        message = f"package `{source}` is not installed"
        return NotBuiltError(message, hint=f"{install}, or install a wheel of it")
    if places and not _is_installed(source, places):
        message = f"package `{source}` is imported from `{places[0]}` and is not installed"
        return NotBuiltError(message, hint=install)
    message = (
        f"package `{source}` is installed, but carries no manifest: it was never built with "
        "max-build"
    )
    hint = (
        "put `[tool.hatch.build.targets.wheel.hooks.max-build]` into its pyproject.toml and "
        "install it again"
    )
    return NotBuiltError(message, hint=hint)


def weights_path(text: str, bases: tuple[Path, ...]) -> Path:
    """The file or directory that a `weights` setting names.

    Parameters
    ----------
    text
        A path, absolute or relative to one of `bases`; or `package:path` inside an installed
        package, which is found without being imported.

    Raises
    ------
    WeightsError
        If there is none, or that cannot be told; the message lists where was looked.
    """
    package, colon, inner = text.partition(":")
    if colon and "/" not in package:
        places = _places(package)
        if places is None:
            message = f"weights `{text}`: package `{package}` is not installed"
            raise WeightsError(message, hint=f"install the distribution that has `{package}`")
        candidates = [place / inner for place in places]
    else:
        path = Path(os.path.expanduser(text))
        if path.parts[:1] and path.parts[0].startswith("~"):
            message = f"weights `{text}`: nobody has the home directory of `{path.parts[0]}`"
            raise WeightsError(message, hint="for a file of that name, write `./` before it")
        candidates = (
            [path] if path.is_absolute() else [base / path for base in (*bases, Path.cwd())]
        )
    for candidate in candidates:
        try:
            if candidate.exists():
                return candidate
        except OSError as error:
            message = f"weights `{text}`: `{candidate}` cannot be looked at: {error.strerror}"
            raise WeightsError(message) from error
    looked = ", ".join(f"`{one}`" for one in dict.fromkeys(candidates))
    message = f"weights `{text}` are not there; looked at {looked}"
    raise WeightsError(message, hint="pass `weights=` with the path of the file")


def _places(package: str) -> list[Path] | None:
    """The directories of an import package, found without an import; None where there is none."""
    top, _, rest = package.partition(".")
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    places = [*(spec.submodule_search_locations or ())]
    name = top
    for part in rest.split(".") if rest else ():
        # `importlib.util.find_spec` would import the parent.
        name = f"{name}.{part}"
        found = None
        below: list[str] = []
        for place in places:
            finder = pkgutil.get_importer(place)
            found = finder.find_spec(name) if finder is not None else None
            if found is not None:
                below += found.submodule_search_locations or ()
                if found.loader is not None:
                    break  # a package with an `__init__`; the others are parts of a namespace
        if found is None and not below:
            return None
        places = below
    return [Path(place) for place in places]


def _read(path: Path, package: Path | None) -> Installed:
    try:
        data = path.read_bytes()
    except OSError as error:
        message = f"manifest `{path}` cannot be read: {error.strerror}"
        hint = f"a wheel that `hatch build` made has it in its package's `{manifests.FOLDER}`"
        raise NotBuiltError(message, hint=hint) from error
    return Installed(manifests.decode(data, str(path)), str(path), path.parent, package)


def _distributions(package: str) -> Iterator[metadata.Distribution]:
    """What may have brought `package`: the distribution of its name first, then all there are."""
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        yield metadata.distribution(package)
    yield from metadata.distributions()


def _is_of(package: str, manifest: bytes, distribution: metadata.Distribution) -> bool:
    """Whether a distribution's manifest is that of `package`; a damaged one goes by the name."""
    of = manifests.package_of(manifest)
    return of == package or (not of and normalise(distribution.name) == normalise(package))


def _is_installed(package: str, places: list[Path]) -> bool:
    """Whether a distribution brought `package`, or is an editable install of where it lies."""
    if metadata.packages_distributions().get(package.partition(".")[0]):
        return True
    return any(
        place.is_relative_to(project)
        for one in metadata.distributions()
        if (project := _project(one)) is not None
        for place in places
    )


def _project(distribution: metadata.Distribution) -> Path | None:
    """Project directory of an editable install: PEP 610, `direct_url.json`."""
    text = distribution.read_text("direct_url.json")
    if not text:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = json.loads(text)
        url = urlsplit(found["url"])
        if url.scheme == "file" and found.get("dir_info", {}).get("editable"):
            return Path(unquote(url.path))
    return None


def _from_cache(installed: Installed, blob: Blob) -> Path | None:
    from max_build.config import cache_settings, load_settings
    from max_build.errors import StoreError
    from max_build.runtime.kept import opened

    project = installed.project
    found = project is not None and is_project(project)
    settings = load_settings(project).cache if project and found else cache_settings()
    with opened(settings) as cache, contextlib.suppress(StoreError):
        return cache.path(blob)
    return None


def _build_command(project: Path | None) -> str:
    where = f" in `{project}`" if project else " in its project"
    return f"run `max-build build`{where}, or install a wheel that `hatch build` made"
