"""Ways to see an input as a tree of values, and to write the altered tree as an input again.

What protects an input from chance, such as a digest or a length, is worked out anew: the damage
reaches what lies behind it.
"""

from __future__ import annotations

import io
import json
import tarfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from backports import zstd

from max_build.key import Components, key_of
from max_build.store import actionresult
from max_build.store.entry import seal, unseal

__all__ = [
    "ACTION",
    "BUNDLE",
    "DEEP",
    "ENTRY",
    "HTTP",
    "JSON",
    "RECIPES",
    "RECORD",
    "SAFETENSORS",
    "TOML",
    "ZSTD",
    "Form",
    "raw_answers",
]

DEEP = "\N{SKULL AND CROSSBONES}"
"""Stands for a value that nests deeper than any reader can follow."""

_NESTED = b"[" * 6000 + b"]" * 6000


@dataclass(frozen=True, slots=True)
class Form:
    """How to take an input apart, and how to put it together."""

    open: Callable[[bytes], Any]
    close: Callable[[Any], bytes]


def _json(tree: Any) -> bytes:
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"), default=_text)
    return text.encode("utf-8", "surrogatepass").replace(f'"{DEEP}"'.encode(), _NESTED)


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _keyed(tree: Any) -> Any:
    """A record or recipe under the key that its components have."""
    if isinstance(tree, dict) and isinstance(tree.get("components"), dict):
        try:
            components = msgspec.json.decode(_json(tree["components"]), type=Components)
        except (msgspec.DecodeError, RecursionError):
            return tree
        return {**tree, "key": key_of(components)}
    return tree


def _sealed(data: bytes) -> dict[str, Any]:
    found = unseal(data)
    return {"payload": json.loads(found.payload), "signatures": found.signatures}


def _seal(tree: Any, wrap: Callable[[Any], Any] = lambda tree: tree) -> bytes:
    signatures = tree.get("signatures", {})
    kept = {str(k): str(v) for k, v in signatures.items()} if isinstance(signatures, dict) else {}
    return seal(_json(wrap(tree["payload"])), kept)


def _toml(tree: Any) -> bytes:
    """A document as inline tables."""
    return "\n".join(f"{_string(k)} = {_inline(v)}" for k, v in tree.items()).encode(
        "utf-8", "surrogatepass"
    )


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _inline(value: Any) -> str:
    if value == DEEP:
        return _NESTED.decode()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_string(str(k))} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)  # a number, or `None`, which TOML has not


def _safetensors(data: bytes) -> dict[str, Any]:
    end = 8 + int.from_bytes(data[:8], "little")
    return {"header": json.loads(data[8:end]), "data": data[end:]}


def _unsafetensors(tree: Any) -> bytes:
    header = _json(tree["header"])
    return len(header).to_bytes(8, "little") + header + tree.get("data", b"")


def _members(data: bytes) -> list[dict[str, Any]]:
    with tarfile.open(fileobj=io.BytesIO(zstd.decompress(data))) as tar:
        return [
            {
                "name": one.name,
                "type": one.type,
                "link": one.linkname,
                "pax": dict(one.pax_headers),
                "content": (tar.extractfile(one) or io.BytesIO()).read() if one.isreg() else b"",
            }
            for one in tar
        ]


def _bundle(tree: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for one in tree:
            info = tarfile.TarInfo(one["name"])
            content = one.get("content", b"")
            info.type = one.get("type", tarfile.REGTYPE)[:1]
            info.linkname = one.get("link", "")
            info.pax_headers = {k: v for k, v in one.get("pax", {}).items() if isinstance(v, str)}
            info.size = one.get("size", len(content))
            tar.addfile(info, io.BytesIO(content + bytes(max(0, min(info.size, 1 << 20)))))
    return zstd.compress(out.getvalue())


_SEPARATOR = b"\n--- the answer for blobs ---\n"


def raw_answers(data: bytes) -> tuple[bytes, bytes]:
    """The bytes that a server sends for an entry, and for a blob."""
    entry, _, blob = data.partition(_SEPARATOR)
    return entry, blob


def _answer(data: bytes) -> dict[str, Any]:
    head, _, body = data.partition(b"\r\n\r\n")
    status, *headers = head.decode("latin-1").split("\r\n")
    return {"status": status, "headers": [h.split(": ", 1) for h in headers], "body": body}


def _answers(data: bytes) -> list[dict[str, Any]]:
    return [_answer(one) for one in raw_answers(data)]


def _unanswers(tree: Any) -> bytes:
    def raw(answer: Mapping[str, Any]) -> bytes:
        lines = [str(answer.get("status", "")), *(": ".join(h) for h in answer.get("headers", []))]
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + answer["body"]

    return _SEPARATOR.join(raw(one) for one in tree)


JSON = Form(json.loads, _json)
TOML = Form(lambda data: tomllib.loads(data.decode()), _toml)
RECORD = Form(json.loads, lambda tree: _json(_keyed(tree)))
ENTRY = Form(_sealed, _seal)
RECIPES = Form(
    lambda data: [json.loads(one) for one in json.loads(unseal(data).payload)["recipes"]],
    lambda tree: seal(
        _json({"lookup": "0" * 64, "recipes": [_json(_keyed(one)).decode() for one in tree]})
    ),
)
ACTION = Form(
    lambda data: _sealed(actionresult.decode(data)),
    lambda tree: actionresult.encode(_seal(tree)),
)
SAFETENSORS = Form(_safetensors, _unsafetensors)
ZSTD = Form(zstd.decompress, zstd.compress)
BUNDLE = Form(_members, _bundle)
HTTP = Form(_answers, _unanswers)
