"""The manifest: the JSON in a wheel that says which record each unit has for each target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from max_build.errors import LoadError
from max_build.key import canonical, parsed
from max_build.record import Blob, Record

__all__ = [
    "FOLDER",
    "METADATA_NAME",
    "NAME",
    "Kind",
    "Manifest",
    "ManifestUnit",
    "WeightRules",
    "decode",
    "encode",
    "file_name",
    "make",
    "package_of",
]

Kind = Literal["graph", "kernel"]
"""What a unit is, by the table that declares it."""

MANIFEST_SCHEMA = 1
FOLDER = "_max_build"
"""Folder beside the package's modules that holds the manifest and the artifacts."""
NAME = "manifest.json"
METADATA_NAME = "max-build/manifest.json"
"""Its name in the wheel's metadata, which is all that an editable install can read."""


class WeightRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which files hold a graph's weights, and how their tensors differ from what it names.

    The keys of `[tool.max-build.graphs.NAME]` of the same names, `files` being `weights`; see
    `max_build.weights.binding.bind`.
    """

    files: tuple[str, ...] = ()
    rename: dict[str, str] = {}
    tied: dict[str, str] = {}
    transpose: tuple[str, ...] = ()
    cast: dict[str, str] = {}
    quantised: dict[str, str] = {}

    @classmethod
    def declared(cls, table: Mapping[str, Any]) -> WeightRules:
        """The rules in a unit's decoded table; none for a kernel module."""
        names = cls.__struct_fields__[1:]
        return msgspec.convert(
            {"files": table.get("weights", ())} | {n: table[n] for n in names if n in table}, cls
        )


class ManifestUnit(msgspec.Struct, frozen=True, kw_only=True):
    """One unit: what its loader needs, and target → record."""

    kind: Kind
    weights: WeightRules = WeightRules()
    targets: dict[str, Record]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Units by name. `embedded` says whether the artifacts lie beside it."""

    schema: int = MANIFEST_SCHEMA
    package: str
    embedded: bool
    units: dict[str, ManifestUnit]

    def unit(self, name: str | None) -> tuple[str, ManifestUnit]:
        """The unit of that name; without a name, the only one there is.

        Raises
        ------
        LoadError
            If there is no such unit, or no name was given and there are several.
        """
        names = ", ".join(f"`{one}`" for one in sorted(self.units)) or "none"
        if name is None and len(self.units) == 1:
            return next(iter(self.units.items()))
        if name is None:
            message = f"`{self.package}` has {len(self.units)} units; say which one: {names}"
            raise LoadError(message)
        if name not in self.units:
            message = f"`{self.package}` has no unit `{name}`; it has {names}"
            raise LoadError(message)
        return name, self.units[name]

    def blobs(self) -> Iterable[Blob]:
        """Every blob that a loader may open, each once."""
        seen: dict[str, Blob] = {}
        for unit in self.units.values():
            for record in unit.targets.values():
                seen.update((blob.digest, blob) for blob in record.blobs if blob.role != "ir")
        return seen.values()


def make(package: str, units: Iterable[tuple[str, ManifestUnit]], *, embedded: bool) -> Manifest:
    """A manifest of `units`, with what would differ between two builds of one source left out.

    Log, cost and IR text of a compile stay in the cache: a wheel's bytes depend on what was
    compiled alone.
    """
    return Manifest(
        package=package,
        embedded=embedded,
        units={
            name: msgspec.structs.replace(
                unit,
                targets={target: _stripped(name, one) for target, one in unit.targets.items()},
            )
            for name, unit in units
        },
    )


def _stripped(unit: str, record: Record) -> Record:
    blobs = tuple(blob for blob in record.blobs if blob.role != "ir")
    return msgspec.structs.replace(record, unit=unit, log="", seconds=0.0, blobs=blobs)


def file_name(blob: Blob) -> str:
    """Name of an artifact's file beside the manifest: its digest and its role."""
    return f"{blob.digest}.{blob.role}"


def encode(manifest: Manifest) -> bytes:
    """The manifest as canonical JSON, one line."""
    return canonical(manifest) + b"\n"


def decode(data: bytes, where: str) -> Manifest:
    """Read a manifest; `where` names it in messages.

    Raises
    ------
    LoadError
        If it is damaged or of another schema.
    """
    try:
        schema = parsed(data, _VERSIONED).schema
        if schema != MANIFEST_SCHEMA:
            message = f"`{where}` has schema {schema}, this max-build reads {MANIFEST_SCHEMA}"
            raise LoadError(
                message, hint="build the wheel again, or install the max-build it names"
            )
        return parsed(data, _DECODER)
    except ValueError as error:
        message = f"`{where}` is damaged: {error}"
        raise LoadError(message, hint="install the wheel again") from error


def package_of(data: bytes) -> str:
    """The import package that a manifest of any schema is of; empty where that cannot be told."""
    try:
        return parsed(data, _OWNED).package.replace("/", ".")
    except ValueError:
        return ""


class _Versioned(msgspec.Struct):
    schema: int


class _Owned(msgspec.Struct):
    package: str


_VERSIONED = msgspec.json.Decoder(_Versioned)
_OWNED = msgspec.json.Decoder(_Owned)
_DECODER = msgspec.json.Decoder(Manifest)
