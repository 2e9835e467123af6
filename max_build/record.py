"""The record: the small JSON that stands under a key and says what a compile produced."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import msgspec

from max_build.key import Components, canonical, digest, key_of, parsed

__all__ = ["RECORD_SCHEMA", "Blob", "Kernel", "Record", "Role", "Tensor", "decode", "encode"]

RECORD_SCHEMA = 1

Role = Literal["mef", "cubin", "ptx", "ir", "bundle", "sources"]
"""What a blob is: a MAX artifact, device machine code, the PTX kept beside it, the IR text, a
compiler's own cache as an archive; or a project's sources on their way to a farm, which no record
names."""


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """One output: immutable bytes, named by the SHA-256 (hex) of them, raw, uncompressed."""

    role: Role
    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # a path is made of it
    size: Annotated[int, msgspec.Meta(ge=0)]

    @classmethod
    def of(cls, role: Role, data: bytes) -> Self:
        """The blob that `data` is."""
        return cls(role=role, digest=digest(data), size=len(data))


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """A graph's input, output or weight.

    `dtype` is the lower-case MAX name (`float32`, `bfloat16`); `shape` holds an integer for each
    fixed dimension and a name for each dynamic one; `device` is `cpu` or `gpu:<ordinal>`.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    device: Annotated[str, msgspec.Meta(pattern=r"\A(cpu|gpu:[0-9]{1,3})\Z")] = "cpu"


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch of one kernel needs to know.

    Parameters
    ----------
    lowered
        Its name in the machine code.
    blob
        Digest of the cubin it lies in; empty where the record has only one.
    shared_bytes
        Dynamic shared memory that every launch has to ask for.
    num_warps
        Warps of a block, where the code is compiled for that many; 0 leaves it to the launch.
    cluster
        Blocks of a cluster, as the launch has to ask for them.
    cooperative
        Whether the launch has to be cooperative.
    signature
        Types of the arguments, in order, where they are known: `*fp32:16` is a pointer that
        has to be a multiple of 16.
    scratch_bytes
        Pointers that follow the arguments, each to a buffer of so many bytes per block; a null
        pointer for 0.
    """

    lowered: str
    blob: str = ""
    shared_bytes: int = 0
    num_warps: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False
    signature: tuple[str, ...] = ()
    scratch_bytes: tuple[int, ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about one compiled (unit, target).

    Parameters
    ----------
    unit
        The name it was first compiled under. It tells a reader what this is; a lookup never
        uses it.
    arch
        What the device code says it is for, where that is not the target: MAX answers `sm_90` with
        machine code for `sm_90a`. A loader goes by this.
    kernels
        Source-level name → `Kernel`, for a kernel module.
    inputs, outputs, weights
        The signature of a graph. Weights are what the loader has to find.
    log
        The compiler's own words, cut to 64 KiB.
    seconds
        What the compile cost, in seconds of wall time.
    """

    schema: int = RECORD_SCHEMA
    key: str
    unit: str
    components: Components
    blobs: tuple[Blob, ...]
    arch: str = ""
    kernels: dict[str, Kernel] = {}
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()
    log: str = ""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0  # they are summed up

    def blob(self, role: Role) -> Blob | None:
        """The first blob of that role."""
        return next((blob for blob in self.blobs if blob.role == role), None)


_DECODER = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """The record as canonical JSON."""
    return canonical(record)


def decode(data: bytes, key: str) -> Record:
    """Read a record back and check that it is the one of `key`.

    The components inside must hash to the key itself, so a record that was altered there, cut
    short, or stored under another key is told apart without any other knowledge.

    Raises
    ------
    ValueError
        If the bytes are not a record of this schema, or not of this key.
    """
    try:
        record = parsed(data, _DECODER)
    except ValueError as error:
        message = f"record is not readable: {error}"
        raise ValueError(message) from error
    if record.schema != RECORD_SCHEMA:
        message = f"record has schema {record.schema}, this max-build reads {RECORD_SCHEMA}"
        raise ValueError(message)
    if record.key != key or key_of(record.components) != key:
        message = f"record belongs to key {record.key[:12]}, not to {key[:12]}"
        raise ValueError(message)
    if not record.blobs:
        message = "record names no blob"
        raise ValueError(message)
    return record
