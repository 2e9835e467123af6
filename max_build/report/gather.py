"""What a report shows, as data: read from the index, the records and the machine code.

Nothing is compiled, counted or fetched here. What is gone since is left out and said.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from importlib import metadata

import msgspec

from max_build.compilers.elf_headers import AMDGPU, CUDA
from max_build.compilers.mef import CODE, Image, read_code
from max_build.config import Settings
from max_build.errors import MaxBuildError, StoreError
from max_build.record import Record, decode
from max_build.report.history import Noted, Past, last_of, pasts
from max_build.store import Cache, Hit
from max_build.store.entry import holds_recipes, unseal
from max_build.store.settings import without_secrets
from max_build.store.stats import Totals, load_totals

__all__ = ["Artifact", "Kernel", "Report", "Tier", "of_cache", "of_project"]

_KERNEL_RECORDS = 300
_RECORDS = 2000


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel of an artifact's machine code.

    Sizes in bytes: registers and stack per thread, shared per block; `stack` is None where a
    recursion leaves it unknown. `name` is that of the machine code, `source` the one the
    project uses, where that is another.
    """

    unit: str
    target: str
    arch: str
    name: str
    source: str
    registers: int
    shared: int
    stack: int | None
    code: int


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """One record: `size` is that of its blobs in bytes, `cost` what its compile took in seconds,
    `used` when it was last used (seconds since 1970; 0 where nobody looked).
    """

    unit: str
    target: str
    key: str
    compiler: str
    size: int
    host_code: int
    device_code: int
    cost: float
    used: float


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """One place of the cache, and what this machine's builds saw of it since ever."""

    name: str
    place: str
    access: str
    trust: str
    usable: bool
    hits: int
    received: int
    sent: int
    faults: dict[str, int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page shows. `build` is None in the report of a cache."""

    title: str
    made: float
    version: str
    build: Noted | None
    history: tuple[Past, ...]
    totals: Totals
    last: Totals
    tiers: tuple[Tier, ...]
    artifacts: tuple[Artifact, ...]
    kernels: tuple[Kernel, ...]
    notes: tuple[str, ...]


def of_project(settings: Settings, cache: Cache) -> Report | None:
    """The report of the project's last build on this machine; None if no build is noted."""
    noted = last_of(cache, settings)
    if noted is None:
        return None
    notes: list[str] = []
    records: list[tuple[Record, str, float]] = []
    gone = []
    for span in noted.spans:
        if not span.key or span.state not in ("cached", "compiled"):
            continue
        found = cache.lookup(span.key, fetch=False)
        if isinstance(found, Hit):
            records.append((found.record, span.unit, 0.0))
        else:
            gone.append(f"{span.unit} × {span.target}")
    if gone:
        notes.append(f"No longer in the cache: {_listed(gone)}.")
    past = noted.past
    mine = tuple(
        one for one in pasts(cache) if (one.project, one.root) == (past.project, past.root)
    )
    title = past.project or past.root.rpartition("/")[2]
    return _report(title, noted, mine, cache, records, notes)


def of_cache(cache: Cache) -> Report:
    """The report of all that this machine's cache directory holds, newest use first."""
    notes: list[str] = []
    records = [(record, record.unit, used) for record, used in _records(cache, notes)]
    return _report("cache", None, pasts(cache), cache, records, notes)


def _report(
    title: str,
    noted: Noted | None,
    history: tuple[Past, ...],
    cache: Cache,
    records: list[tuple[Record, str, float]],
    notes: list[str],
) -> Report:
    totals = load_totals(cache.memo, "ever")
    artifacts: list[Artifact] = []
    kernels: list[Kernel] = []
    unread: list[str] = []
    for position, (record, unit, used) in enumerate(records):
        images: list[Image] = []
        if position < _KERNEL_RECORDS:
            try:
                images = list(_images(cache, record))
            except (MaxBuildError, OSError) as error:
                unread.append(f"{unit} × {record.components.target}")
                cache.warnings.append(f"`{unit}`: {error}")
        kernels.extend(_kernels(record, unit, images))
        artifacts.append(_artifact(record, unit, images, used))
    if unread:
        notes.append(f"Machine code that could not be read: {_listed(unread)}.")
    if len(records) > _KERNEL_RECORDS:
        notes.append(
            f"Kernels are those of the {_KERNEL_RECORDS} artifacts used last, of {len(records)}."
        )
    return Report(
        title=title,
        made=time.time(),
        version=_version(),
        build=noted,
        history=history,
        totals=totals,
        last=load_totals(cache.memo, "last"),
        tiers=tuple(_tiers(cache, totals)),
        artifacts=tuple(artifacts),
        kernels=tuple(kernels),
        notes=(*notes, *cache.warnings),
    )


def _records(cache: Cache, notes: list[str]) -> Iterator[tuple[Record, float]]:
    """The records in the local directory with the time of their last use, newest first."""
    store = cache.local.store
    if store is None:
        return
    try:
        items = sorted(store.list("ac"), key=lambda item: -item.modified)
    except StoreError as error:
        notes.append(error.message)
        return
    damaged = shown = 0
    for item in items:
        try:
            payload = unseal(store.get_entry(item.name) or b"").payload
            if holds_recipes(payload):
                continue
            record = decode(payload, item.name)
        except (StoreError, ValueError):
            damaged += 1
            continue
        if shown == _RECORDS:
            notes.append(f"Only the {_RECORDS} artifacts used last are shown.")
            break
        shown += 1
        yield record, item.modified
    if damaged:
        notes.append(f"{damaged} entries are damaged; `max-build verify` removes them.")


def _images(cache: Cache, record: Record) -> Iterator[Image]:
    """Every piece of machine code in the artifact."""
    for blob in record.blobs:
        if blob.role in CODE:
            yield from read_code(cache.path(blob).read_bytes(), blob.role)


def _kernels(record: Record, unit: str, images: Iterable[Image]) -> Iterator[Kernel]:
    sources = {kernel.lowered: name for name, kernel in record.kernels.items()}
    for image in images:
        for kernel in image.kernels:
            source = sources.get(kernel.name, "")
            yield Kernel(
                unit=unit,
                target=record.components.target,
                arch=image.arch,
                name=kernel.name,
                source="" if source == kernel.name else source,
                registers=kernel.registers,
                shared=kernel.shared_bytes,
                stack=kernel.stack_bytes,
                code=kernel.code_bytes,
            )


def _artifact(record: Record, unit: str, images: Iterable[Image], used: float) -> Artifact:
    host = device = 0
    for image in images:
        if image.machine in (CUDA, AMDGPU):
            device += image.size
        else:
            host += image.size
    compiler = next(iter(sorted(record.components.compiler.items())), ("", ""))
    return Artifact(
        unit=unit,
        target=record.components.target,
        key=record.key,
        compiler=f"{compiler[0]} {re.split(r'[+ ]', compiler[1])[0]}".strip(),
        size=sum(blob.size for blob in record.blobs),
        host_code=max(0, host - device),  # device code lies inside the host code
        device_code=device,
        cost=record.seconds,
        used=used,
    )


def _tiers(cache: Cache, totals: Totals) -> Iterator[Tier]:
    settings = cache.settings
    store = cache.local.store
    open_now = {tier.label: tier for tier in cache.outer}

    def tier(name: str, place: str, *, writable: bool, usable: bool, trust: str) -> Tier:
        faults = {
            kind.partition("/")[2]: count
            for kind, count in totals.faults.items()
            if kind.partition("/")[0] == name
        }
        return Tier(
            name=name,
            place=place,
            access="read and write" if writable else "read only",
            trust=trust,
            usable=usable,
            hits=totals.hits.get(name, 0),
            received=totals.received.get(name, 0),
            sent=totals.sent.get(name, 0),
            faults=faults,
        )

    yield tier(
        "local",
        str(store.root) if store is not None else "no usable directory",
        writable=store is not None and store.writable,
        usable=store is not None,
        trust="",
    )
    for name, place, mode, trust in (
        ("shared", settings.shared, settings.shared_mode, settings.shared_trust),
        ("remote", without_secrets(settings.remote), settings.remote_mode, settings.remote_trust),
    ):
        if place:
            one = open_now.get(name)
            writable = one.store.writable if one is not None else mode == "read-write"
            usable = one is not None and one.open
            yield tier(name, place, writable=writable, usable=usable, trust=trust)


def _version() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("max-build")
    return ""


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
