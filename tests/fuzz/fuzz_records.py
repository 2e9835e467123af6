"""The texts that caches and wheels hold: records, recipes, manifests, and what they travel in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from backports import zstd
from forms import ACTION, ENTRY, JSON, RECIPES, RECORD, ZSTD
from harness import Target, scratch

from max_build import manifest
from max_build.errors import LoadError, StoreError
from max_build.key import Components, canonical, digest, key_of
from max_build.recipes import recipe
from max_build.recipes.surroundings import Here, python
from max_build.record import Blob, Kernel, Record, Tensor, decode, encode
from max_build.store import actionresult
from max_build.store.base import Sink
from max_build.store.compress import Inflater
from max_build.store.entry import holds_recipes, seal, seal_recipes, unseal, unseal_recipes
from max_build.store.index import Memo

__all__ = ["ARTIFACT", "LOOKUP", "RECORD_OF_ALL", "TARGETS", "entry_of", "recipe_text"]

ARTIFACT = bytes(range(256)) * 40
LOOKUP = "0" * 64
_COMPONENTS = Components(
    compiler={"max": "26.7.0"}, target="sm_90a", sources={"ir": digest(b"ir")}, host="x86-64-v3"
)

RECORD_OF_ALL = Record(
    key=key_of(_COMPONENTS),
    unit="encoder",
    components=_COMPONENTS,
    blobs=(
        Blob(role="mef", digest=digest(ARTIFACT), size=len(ARTIFACT)),
        Blob(role="ir", digest=digest(b"ir"), size=2),
    ),
    arch="sm_90a",
    kernels={"saxpy": Kernel(lowered="_Z5saxpy", signature=("*fp32:16", "i32"), num_warps=4)},
    inputs=(Tensor(name="x", dtype="float32", shape=("n", 4), device="gpu:0"),),
    outputs=(Tensor(name="y", dtype="float32", shape=("n", 4), device="gpu:0"),),
    weights=(Tensor(name="w", dtype="bfloat16", shape=(4, 4)),),
    log="warning: none\n",
    seconds=12.5,
)
"""A record that has something in every field."""


def entry_of(record: Record = RECORD_OF_ALL) -> bytes:
    """The entry that a cache keeps under a record's key."""
    return seal(encode(record), {"ci": "c2lnbmF0dXJl"})


def recipe_text() -> bytes:
    """A recipe that holds in an empty project."""
    return recipe.encode(
        recipe.Recipe(
            key=RECORD_OF_ALL.key,
            components=_COMPONENTS,
            python=python(),
            looked={"src/absent.py": "absent"},
            links={"src/absent.py": ""},
            sizes={"src/none": -1},
            listings={"none": ""},
            modules={"none": {"toy": ()}},
            imported=("toy_of_nobody",),
            lacking=("toy_of_nobody",),
            variables={"MAX_BUILD_NOBODY_SETS": ""},
            distributions={"nobodys-toy": recipe.Distribution(identity="")},
        )
    )


def _manifest_text() -> bytes:
    rules = manifest.WeightRules(files=("w.safetensors",), rename={"a.": ""}, transpose=("*.w",))
    unit = manifest.ManifestUnit(kind="graph", weights=rules, targets={"sm_90a": RECORD_OF_ALL})
    return manifest.encode(manifest.make("toy", [("encoder", unit)], embedded=True))


def _named(record: Record) -> None:
    """A record that was read names its blobs as a cache can keep them."""
    for blob in record.blobs:
        assert len(blob.digest) == 64
        assert set(blob.digest) <= set("0123456789abcdef")
        assert blob.size >= 0


def _record(data: bytes) -> bool:
    try:
        key = json.loads(data)["key"]
    except (KeyError, RecursionError, TypeError, ValueError):
        key = RECORD_OF_ALL.key
    try:
        found = decode(data, key)
    except ValueError as error:
        assert str(error)
        return False
    assert found.key == key == key_of(found.components)
    assert decode(encode(found), key) == found
    _named(found)
    return True


def _here() -> Here:
    return Here(str(scratch("recipes")), (), os.environ, Memo(None).digest_of, {})


def _recipe(data: bytes) -> bool:
    found = recipe.decode(data)
    if found is None:
        return False
    assert recipe.decode(recipe.encode(found)) == found
    assert found.key == key_of(found.components)
    assert isinstance(recipe.broken(found, _here()), str)
    return True


def _recipes(data: bytes) -> bool:
    try:
        texts = unseal_recipes(LOOKUP, unseal(data).payload)
    except ValueError:
        return False
    assert unseal_recipes(LOOKUP, seal_recipes(LOOKUP, texts)) == texts
    return min(map(_recipe, texts), default=True)


def _entry(data: bytes) -> bool:
    try:
        found = unseal(data)
    except ValueError:
        return False
    again = unseal(seal(found.payload, found.signatures))
    assert again == found
    assert isinstance(holds_recipes(found.payload), bool)
    return True


def _manifest(data: bytes) -> bool:
    try:
        found = manifest.decode(data, "manifest.json")
    except LoadError as error:
        assert error.message.startswith("`manifest.json` ")
        return False
    assert manifest.decode(manifest.encode(found), "again") == found
    for blob in found.blobs():
        assert "/" not in manifest.file_name(blob)
    for unit in found.units.values():
        for record in unit.targets.values():
            _named(record)
    return True


def _action(data: bytes) -> bool:
    try:
        found = actionresult.decode(data)
    except ValueError:
        return False
    assert found in data
    try:
        again = actionresult.encode(found)
    except ValueError:
        return False
    assert actionresult.decode(again) == found
    return True


class _Kept:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | bytearray | memoryview, /) -> None:
        self.data += data


def _compressed(data: bytes) -> bool:
    kept = _Kept()
    sink = Sink(kept, len(ARTIFACT))
    inflater = Inflater(sink)
    try:
        for at in range(0, len(data), 100):  # as it comes from a network
            inflater.feed(data[at : at + 100])
        inflater.finish()
    except StoreError as error:
        assert error.kind == "corrupt"
        return False
    assert bytes(kept.data) == zstd.decompress(data)
    assert sink.holds(digest(ARTIFACT)) == (bytes(kept.data) == ARTIFACT)
    return sink.holds(digest(ARTIFACT))


def _changed(data: bytes, **fields: object) -> bytes:
    return canonical({**json.loads(data), **fields})


def _record_seeds() -> Mapping[str, bytes]:
    good = encode(RECORD_OF_ALL)
    outside = {"role": "mef", "digest": "../sentinel", "size": 1}
    return {
        "good-record": good,
        "good-later": _changed(good, later=[1, {"x": None}]),
        "bad-name": _changed(good, blobs=[outside]),
        "bad-size": _changed(good, blobs=[outside | {"digest": "0" * 64, "size": -1}]),
        "bad-depth": good[:-1] + b',"later":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    }


def _compressed_seeds() -> Mapping[str, bytes]:
    return {
        "good-frame": zstd.compress(ARTIFACT),
        "bad-two-frames": zstd.compress(ARTIFACT) + zstd.compress(b"more"),
        "bad-bomb": zstd.compress(bytes(1 << 18)),
        "bad-skippable": b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstd.compress(ARTIFACT),
    }


TARGETS = (
    Target("record", _record, _record_seeds, (RECORD, JSON), (b'"digest":"', b'"blobs":[')),
    Target(
        "recipe",
        _recipe,
        lambda: {
            "good-recipe": recipe_text(),
            "bad-depth": recipe_text()[:-1] + b"," + b"[" * 100_000,
            "good-null-byte": _changed(recipe_text(), files={"a\0b": "0" * 64}),
            "good-endless": _changed(recipe_text(), files={"/dev/zero": "0" * 64}),
            "good-long": _changed(recipe_text(), looked={"x" * 5000: "absent"}),
        },
        (RECORD, JSON),
        weight=2,
    ),
    Target(
        "recipes",
        _recipes,
        lambda: {"good-one": seal(seal_recipes(LOOKUP, (recipe_text(),)))},
        (RECIPES, ENTRY),
        weight=2,
    ),
    Target(
        "manifest",
        _manifest,
        lambda: {
            "good-manifest": _manifest_text(),
            "bad-text": _manifest_text().replace(b"encoder", b"\xff\xfe"),
            "bad-depth": b'{"schema":1,"x":' + b"[" * 100_000,
        },
        (JSON,),
    ),
    Target("entry", _entry, lambda: {"good-entry": entry_of()}, (ENTRY,), (b"\n", b'"schema":1')),
    Target(
        "action-result",
        _action,
        lambda: {
            "good-result": actionresult.encode(entry_of()),
            "bad-length": b"\x2a" + b"\xff" * 9 + b"\x01",
            "bad-group": b"\x2b",
        },
        (ACTION,),
        (b"\x2a", b"\x12", b"\xff\xff\xff\xff\x0f", b"\x80"),
    ),
    Target("compressed", _compressed, _compressed_seeds, (ZSTD,), bounded=True),
)
