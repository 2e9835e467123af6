"""Headers of safetensors and GGUF files, and the index of a sharded set."""

from __future__ import annotations

import json
import struct
from typing import Any

import gguf
import numpy as np
import safetensors as reference
from forms import JSON, SAFETENSORS
from harness import Target, scratch

from max_build.errors import WeightsError
from max_build.weights import Weights, index, open_weights

__all__ = ["TARGETS"]


def _inside(weights: Weights, content: bytes) -> None:
    """Every tensor lies inside the file and over no other one, and its bytes are those there."""
    end = 0
    for tensor in sorted(weights.values(), key=lambda one: (one.offset, one.nbytes)):
        assert end <= tensor.offset <= tensor.offset + tensor.nbytes <= len(content)
        end = tensor.offset + tensor.nbytes
        assert tensor.tobytes() == content[tensor.offset : end]
    # What is remembered of a header is what it says.
    shard = weights.shards[0]
    again = index.decode(index.encode(shard.header, shard.file), shard.file)
    assert again is not None
    assert dict(again.entries) == dict(shard.header.entries)
    assert again.data_start == shard.header.data_start
    assert dict(again.metadata) == dict(shard.header.metadata)


def _safetensors(data: bytes) -> bool:
    path = scratch("weights") / "fuzzed.safetensors"
    path.write_bytes(data)
    try:
        with open_weights(path) as weights:
            _inside(weights, data)
            mine = {n: (list(t.shape), t.tobytes()) for n, t in weights.items()}
            metadata = dict(weights.metadata)
    except WeightsError:
        return False
    if data.startswith(b"GGUF"):
        return True
    theirs = {n: (t["shape"], bytes(t["data"])) for n, t in reference.deserialize(data)}
    assert mine == theirs
    with reference.safe_open(path, "np") as opened:
        assert metadata == (opened.metadata() or {})
    return True


def _gguf(data: bytes) -> bool:
    path = scratch("weights") / "fuzzed.gguf"
    path.write_bytes(data)
    try:
        with open_weights(path) as weights:
            if weights.shards[0].header.format != "gguf":
                return True
            _inside(weights, data)
            mine = {n: (t.offset, t.nbytes) for n, t in weights.items()}
    except WeightsError:
        return False
    # The package's reader gives up on some valid files (a big-endian one without a hint, …), but
    # where it has an answer, that is the same.
    try:
        with np.errstate(all="ignore"):
            tensors = gguf.GGUFReader(path).tensors
    except Exception:  # noqa: BLE001 - it lets out whatever its libraries raise
        return True
    assert mine == {one.name: (int(one.data_offset), int(one.n_bytes)) for one in tensors}
    return True


def _index(data: bytes) -> bool:
    folder = scratch("weights-index")
    for number in (1, 2):
        shard = folder / f"model-0000{number}-of-00002.safetensors"
        if not shard.exists():
            shard.write_bytes(_file({f"t{number}": ("U8", [4], [0, 4])}, bytes([number] * 4)))
    path = folder / "model.safetensors.index.json"
    path.write_bytes(data)
    try:
        with open_weights(path) as weights:
            assert weights.keys() <= {"t1", "t2"}
            for name, tensor in weights.items():
                assert tensor.tobytes() == bytes([int(name[1:])] * 4)
    except WeightsError:
        return False
    return True


def _file(tensors: dict[str, tuple[str, list[int], list[int]]], data: bytes, **more: Any) -> bytes:
    header = more | {
        name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        for name, (dtype, shape, offsets) in tensors.items()
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def _gguf_file(order: str, version: int) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack(order + "Q", len(value)) + value.encode()

    def pair(key: str, kind: int, value: bytes) -> bytes:
        return text(key) + struct.pack(order + "I", kind) + value

    pairs = [
        pair("general.architecture", 8, text("toy")),
        pair("general.alignment", 4, struct.pack(order + "I", 32)),
        pair("x.flag", 7, b"\1"),
        pair("x.tokens", 9, struct.pack(order + "IQ", 8, 2) + text("a") + text("b")),
        pair("x.nested", 9, struct.pack(order + "IQIQ", 9, 1, 5, 1) + struct.pack(order + "i", 7)),
    ]
    info = struct.Struct(order + "IQQIQ")
    infos = [
        text("plain") + info.pack(2, 4, 2, 0, 0),
        text("blocks") + info.pack(2, 32, 1, 8, 32),
    ]
    head = b"GGUF" + struct.pack(order + "IQQ", version, len(infos), len(pairs))
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(range(32)) + bytes(range(34)) + bytes(30)


def _safetensors_seeds() -> dict[str, bytes]:
    two = {"a": ("F32", [2, 2], [0, 16]), "b": ("BF16", [3], [16, 22])}
    return {
        "good-two": _file(two, bytes(range(22)), __metadata__={"format": "pt"}),
        "good-empty": _file({}, b""),
        "good-packed": _file({"q": ("F4", [2, 4], [0, 4]), "z": ("U8", [0], [4, 4])}, bytes(4)),
        "bad-length": struct.pack("<Q", 1 << 62) + b"{}",
        "bad-depth": struct.pack("<Q", 20_000) + b"{" + b'"a":[' * 3999 + b"{}}}",
        "bad-metadata": _file(two, bytes(22), __metadata__={"a": "@"}).replace(b"@", b"\xff"),
        "bad-number": struct.pack("<Q", 5_010) + b'{"a":' + b"9" * 5000 + b"    }",
    }  # fmt: skip


_LARGE = tuple(struct.pack("<Q", n) for n in (0, 1, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1))
_INDEX = {
    "metadata": {"total_size": 8},
    "weight_map": {f"t{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)},
}

TARGETS = (
    Target(
        "safetensors",
        _safetensors,
        _safetensors_seeds,
        (SAFETENSORS,),
        (b'"F32"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b":", b",", b"{", b"[", b"\\",
         b"\\u0061", *_LARGE),
        bounded=True,
        weight=2,
    ),
    Target(
        "gguf",
        _gguf,
        lambda: {
            "good-3": _gguf_file("<", 3),
            "good-2": _gguf_file("<", 2),
            "good-big-endian": _gguf_file(">", 3),
            "bad-count": _gguf_file("<", 3).replace(
                struct.pack("<IQ", 8, 2), struct.pack("<IQ", 8, 1 << 61)
            ),
            "bad-alignment": _gguf_file("<", 3).replace(
                b"alignment" + struct.pack("<II", 4, 32), b"alignment" + struct.pack("<II", 4, 0)
            ),
        },
        tokens=(b"GGUF", b"general.alignment", *_LARGE),
        bounded=True,
        weight=4,
    ),
    Target(
        "weights-index",
        _index,
        lambda: {
            "good-index": json.dumps(_INDEX).encode(),
            "bad-path": json.dumps({"weight_map": {"t": "../x.safetensors"}}).encode(),
            "bad-size": b'{"metadata":{"total_size":1e309},"weight_map":{}}',
        },
        (JSON,),
        bounded=True,
        weight=3,
    ),
)  # fmt: skip
