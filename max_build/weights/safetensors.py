"""Read and validate safetensors headers.

Follows the format's description (github.com/huggingface/safetensors, "Format"):
`u64 little-endian n | n bytes of JSON | data`, where the tensors tile the data exactly. Stricter
than the reference where that keeps a wrong tensor out: the header starts with `{`, no name or
field occurs twice, and an entry has no field this reader does not know.

Two readers, one verdict. `_quick` takes canonical headers at msgspec's speed and gives up on
anything unusual; `_careful` then decides, and is the one that explains.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec

from max_build.errors import WeightsError
from max_build.weights.dtypes import SAFETENSORS
from max_build.weights.header import Entry, Header

if TYPE_CHECKING:
    from max_build.weights.pages import File

__all__ = ["MAX_HEADER", "parse", "read"]

#: Longest header the format allows, in bytes.
MAX_HEADER = 100_000_000

_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_LEADING_METADATA = re.compile(
    rb'\{\s*"__metadata__"\s*:\s*(\{\s*(?:%b\s*:\s*%b\s*,?\s*)*+\})\s*([,}])' % (_STRING, _STRING),
    re.DOTALL,
)


if TYPE_CHECKING:
    _Code = str
else:
    _Code = Literal[tuple(SAFETENSORS)]  # decoded to one shared string each


class _Info(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    dtype: _Code
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_decode = msgspec.json.Decoder(dict[str, _Info]).decode


class _Sizes(dict[tuple[str, tuple[int, ...]], int]):
    """Bytes by (dtype, shape), worked out once each: a model has few distinct ones."""

    def __missing__(self, key: tuple[str, tuple[int, ...]]) -> int:
        dtype, shape = key
        if any(dim < 0 for dim in shape):
            message = f"shape {list(shape)} has a negative dimension"
            raise ValueError(message)
        self[key] = size = SAFETENSORS[dtype].nbytes(shape)
        return size


class _Entries(Mapping[str, Entry]):
    """Entries made on request: a hundred thousand objects would cost more than the parse."""

    def __init__(self, infos: dict[str, _Info], data_start: int) -> None:
        self._infos = infos
        self._start = data_start

    def __getitem__(self, name: str) -> Entry:
        info = self._infos[name]
        begin, end = info.data_offsets
        return Entry(SAFETENSORS[info.dtype], info.shape, self._start + begin, end - begin)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos


def read(file: File) -> bytearray:
    """Return the JSON header of `file`.

    Raises
    ------
    WeightsError
        If the file is too short for its header, or the length is beyond the format's limit.
    """
    if file.size < 8:
        message = f"`{file.path}` is {file.size} bytes long, too short for a safetensors file"
        raise WeightsError(message)
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER:
        message = f"`{file.path}` declares a header of {length} bytes; the limit is {MAX_HEADER}"
        raise WeightsError(message, hint="the file is damaged or not safetensors")
    if length > file.size - 8:
        have = f"the file has {file.size - 8} after its length field"
        message = f"`{file.path}` declares a header of {length} bytes, but {have}"
        raise WeightsError(message, hint=_TRUNCATED)
    header = bytearray(length)
    file.read_into(8, memoryview(header))
    return header


_TRUNCATED = "the file is truncated or damaged; fetch it again"


def parse(header: bytearray, *, path: str, size: int) -> Header:
    """Return what `header` says about a file of `size` bytes.

    Parameters
    ----------
    header
        The JSON text, without its length field.
    path, size
        Name of the file, for messages, and its bytes in all.

    Raises
    ------
    WeightsError
        If any rule of the format is broken.
    """
    start = 8 + len(header)
    if header[:1] != b"{":
        message = f"header of `{path}` starts with {bytes(header[:8])!r}, not with an object"
        raise WeightsError(message, hint="the file is damaged or not safetensors")
    # The cyclic collector would walk the growing heap again and again: half the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        found = _quick(header, size - start) or _careful(header, path, size - start)
    finally:
        if collecting:
            gc.enable()
    infos, metadata = found
    entries = _Entries(infos, start)
    return Header("safetensors", entries, Header.frozen(metadata), start)


_Found = tuple[dict[str, _Info], dict[str, Any]]


def _quick(header: bytearray, data_size: int) -> _Found | None:
    """Parse a canonical header; None is no verdict, only "look closer"."""
    metadata: dict[str, Any] = {}
    at = 0
    if match := _LEADING_METADATA.match(header):
        try:
            metadata = json.loads(match[1].decode(), object_pairs_hook=_unique)
        except ValueError:
            return None
        at = match.start(2)
        if match[2] == b"}" or b"\\u" in match[1]:
            return None
    if header.find(b"\\", at) >= 0:
        return None
    text = memoryview(header)[at:]
    separator = header[at]
    header[at] = ord("{")
    try:
        infos = _decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    finally:
        text.release()
        header[at] = separator
    # Every entry as written has four colons or more: its name's and one for each field. So
    # four for each *distinct* name means that nothing occurs twice; a colon inside a name
    # only sends the header to the careful reader.
    if header.count(b":", at) != 4 * len(infos) or _METADATA in infos:
        return None
    sizes = _Sizes()
    position = 0
    try:
        for info in infos.values():
            begin, end = info.data_offsets
            if begin != position or end - begin != sizes[info.dtype, info.shape]:
                return None
            position = end
    except (KeyError, ValueError):
        return None
    return (infos, metadata) if position == data_size else None


class _RepeatedError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        message = f"{name!r} occurs twice"
        raise _RepeatedError(message)
    return found


def _refuse_constant(text: str) -> NoReturn:
    message = f"{text} is not JSON"
    raise ValueError(message)


def _careful(header: bytearray, path: str, data_size: int) -> _Found:
    """Parse any valid header; raise `WeightsError` that names what is wrong with any other."""
    from max_build.key import encodable  # not where `_quick` will do

    where = f"header of `{path}`"
    try:
        found = json.loads(
            header.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except _RepeatedError as error:
        message = f"{where}: {error}"
        raise WeightsError(message, hint="which of the two is meant cannot be known") from None
    except (ValueError, RecursionError) as error:
        message = f"{where} is not valid JSON: {error}"
        raise WeightsError(message, hint=_TRUNCATED) from None
    metadata = found.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        message = f"{where}: `{_METADATA}` must map text to text"
        raise WeightsError(message)
    if not all(encodable(text) for pair in metadata.items() for text in pair):
        message = f"{where}: `{_METADATA}` has half a surrogate pair, which is no text"
        raise WeightsError(message)
    infos: dict[str, _Info] = {}
    sizes = _Sizes()
    for name, entry in found.items():
        try:
            name.encode()
            infos[name] = info = _info(entry)
            begin, end = info.data_offsets
            if end < begin:
                message = f"`data_offsets` {[begin, end]} run backwards"
                raise ValueError(message)
            if end - begin != sizes[info.dtype, info.shape]:
                need = (
                    f"{info.dtype} {list(info.shape)} takes {sizes[info.dtype, info.shape]} bytes"
                )
                message = f"`data_offsets` {[begin, end]} hold {end - begin} bytes, but {need}"
                raise ValueError(message)
        except ValueError as error:
            message = f"{where}: tensor {name!r}: {error}"
            raise WeightsError(message) from None
    _check_tiling(infos, where, data_size)
    return infos, metadata


def _info(entry: object) -> _Info:
    """Return the checked fields of one entry, or raise `ValueError` that names the bad one."""
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        message = f"must have the fields {sorted(_FIELDS)}, has {found}"
        raise ValueError(message)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        message = f"unknown `dtype` {dtype!r}; known are {', '.join(SAFETENSORS)}"
        raise ValueError(message)
    for name, value in (("shape", shape), ("data_offsets", offsets)):
        # `type(…) is int` keeps `true`, which is an int to Python, out.
        if not isinstance(value, list) or not all(
            type(x) is int and 0 <= x < 1 << 63 for x in value
        ):
            message = f"`{name}` must be whole numbers from 0 to 2**63 - 1, got {value!r:.200}"
            raise ValueError(message)
    if len(offsets) != 2:
        message = f"`data_offsets` must be [begin, end], got {offsets!r:.200}"
        raise ValueError(message)
    return _Info(dtype, tuple(shape), tuple(offsets))


def _check_tiling(infos: dict[str, _Info], where: str, data_size: int) -> None:
    """Raise unless the tensors, by offset, cover the data with no hole and no overlap."""
    position, last = 0, "the start of the data"
    for name, info in sorted(infos.items(), key=lambda item: item[1].data_offsets):
        begin, end = info.data_offsets
        if begin != position:
            kind = "overlaps" if begin < position else "leaves a hole after"
            found = f"tensor {name!r} at {[begin, end]} {kind} {last}"
            message = f"{where}: {found}, which ends at {position}"
            raise WeightsError(message)
        position, last = end, f"tensor {name!r}"
    if position != data_size:
        difference = data_size - position
        kind = f"{difference} bytes too many" if difference > 0 else f"{-difference} bytes missing"
        message = f"{where}: the tensors end at {position}, the data at {data_size}: {kind}"
        raise WeightsError(message, hint=_TRUNCATED)
