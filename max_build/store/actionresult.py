"""An entry as the `ActionResult` that a Bazel cache server stores under `/ac/<key>`.

Of `build.bazel.remote.execution.v2.ActionResult` (protobuf wire format), these fields are used:
`output_files = 2` {`path = 1`, `digest = 2` {`hash = 1`, `size_bytes = 2`}} names the blobs, so
that the server can tell when one of them is gone; `stdout_raw = 5` holds the entry itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from max_build.store.entry import Named, named_blobs, unseal

__all__ = ["decode", "encode"]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_OUTPUT_FILES, _STDOUT_RAW = 2, 5


def encode(entry: bytes) -> bytes:
    """Wrap an entry, naming the blobs of the record in it."""
    files = b"".join(
        _field(_OUTPUT_FILES, _output(f"{number}.{blob.role}", blob))
        for number, blob in enumerate(named_blobs(unseal(entry).payload))
    )
    return files + _field(_STDOUT_RAW, entry)


def decode(data: bytes) -> bytes:
    """The entry in an `ActionResult`.

    Raises
    ------
    ValueError
        If the bytes are not one, or hold no entry.
    """
    for number, value in _fields(data):
        if number == _STDOUT_RAW:
            return value
    message = "action result holds no entry"
    raise ValueError(message)


def _output(path: str, blob: Named) -> bytes:
    size = _varint(2 << 3 | _VARINT) + _varint(blob.size) if blob.size else b""
    return _field(1, path.encode()) + _field(2, _field(1, blob.digest.encode()) + size)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a message; the others are stepped over."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        wire = tag & 7
        if wire == _VARINT:
            _, at = _read_varint(data, at)
            continue
        if wire == _BYTES:
            size, at = _read_varint(data, at)
        elif wire in {_FIXED32, _FIXED64}:
            size = 4 if wire == _FIXED32 else 8
        else:
            message = f"action result has wire type {wire} at byte {at}"
            raise ValueError(message)
        if at + size > len(data):
            message = f"action result is cut at byte {len(data)}"
            raise ValueError(message)
        if wire == _BYTES:
            yield tag >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
    message = f"action result has no number at byte {at}"
    raise ValueError(message)
