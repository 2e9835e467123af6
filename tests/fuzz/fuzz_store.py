"""What lies in a cache's directory, in the team's, and in a bundle: believed if it is right."""

from __future__ import annotations

import functools
import io
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

from backports import zstd
from forms import BUNDLE, ENTRY, ZSTD
from fuzz_records import ARTIFACT, LOOKUP, RECORD_OF_ALL, entry_of, recipe_text
from harness import Target, scratch

from max_build.errors import StoreError
from max_build.key import digest
from max_build.record import Record, decode, encode
from max_build.store import Cache, CacheSettings, Hit, Miss, open_cache
from max_build.store.bundle import unpack
from max_build.store.entry import holds_recipes, seal, seal_recipes, unseal, unseal_recipes
from max_build.store.gc import gc
from max_build.store.verify import verify

__all__ = ["CONTENT", "TARGETS", "whole"]

CONTENT = {digest(data): data for data in (ARTIFACT, b"ir")}
_KEY = RECORD_OF_ALL.key
_IR = b'"digest":"%s"' % digest(b"ir").encode()


def whole(cache: Cache, record: Record) -> None:
    """Every blob of a record that was hit is right, to the last byte."""
    for blob in record.blobs:
        data = cache.path(blob).read_bytes()
        assert (len(data), digest(data)) == (blob.size, blob.digest)


@functools.cache
def _sentinel() -> Path:
    """A file beside the caches, which is nobody's to touch."""
    path = scratch("store") / "sentinel"
    path.write_text("mine")
    return path


def _empty(name: str) -> Path:
    folder = scratch("store") / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(0o700)
    assert _sentinel().read_text() == "mine"
    return folder


def _put(root: Path, kind: str, name: str, data: bytes) -> None:
    path = root / kind / name[:2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _found(cache: Cache) -> bool:
    """Look up the one key, and mend what is wrong."""
    found = cache.lookup(_KEY)
    hit = isinstance(found, Hit)
    if isinstance(found, Hit):
        assert found.record.key == _KEY
        whole(cache, found.record)
    else:
        assert found.reason in ("absent", "damaged", "dangling", "fault")
        cache.publish(RECORD_OF_ALL, CONTENT)
        again = cache.lookup(_KEY)
        assert isinstance(again, Hit)
        assert again.record == RECORD_OF_ALL
        whole(cache, again.record)
    assert _sentinel().read_text() == "mine"
    return hit


def _local_entry(data: bytes) -> bool:
    root = _empty("local")
    for name, content in CONTENT.items():
        _put(root, "cas", name, content)
    _put(root, "ac", _KEY, data)
    _put(root, "ac", LOOKUP, data)
    with open_cache(CacheSettings(dir=str(root))) as cache:
        store = cache.local.store
        assert store is not None
        gc(store, grace=3600)
        assert all(cache.local.file(blob) for blob in RECORD_OF_ALL.blobs)
        cache.recipes(LOOKUP)
        found = _found(cache)
        verify(store)
        assert isinstance(cache.lookup(_KEY), Hit)
    return found


def _local_blob(data: bytes) -> bool:
    root = _empty("local")
    _put(root, "ac", _KEY, entry_of())
    _put(root, "cas", digest(b"ir"), b"ir")
    _put(root, "cas", digest(ARTIFACT), data)
    with open_cache(CacheSettings(dir=str(root))) as cache:
        return _found(cache)


def _shared_blob(data: bytes) -> bool:
    root, team = _empty("local"), _empty("team")
    _put(team, "ac", _KEY, entry_of())
    _put(team, "cas", digest(b"ir"), zstd.compress(b"ir"))
    _put(team, "cas", digest(ARTIFACT), data)
    with open_cache(CacheSettings(dir=str(root), shared=str(team))) as cache:
        found = _found(cache)
    # Whatever was found there, the next one finds it mended.
    with open_cache(CacheSettings(dir=str(_empty("local")), shared=str(team))) as cache:
        assert isinstance(cache.lookup(_KEY), Hit)
    return found


def _shared_entry(data: bytes) -> bool:
    root, team = _empty("local"), _empty("team")
    for name, content in CONTENT.items():
        _put(team, "cas", name, zstd.compress(content))
    _put(team, "ac", _KEY, data)
    _put(team, "ac", LOOKUP, data)
    with open_cache(CacheSettings(dir=str(root), shared=str(team))) as cache:
        cache.recipes(LOOKUP, everywhere=True)
        cache.add_recipe(LOOKUP, recipe_text())
        assert cache.recipes(LOOKUP)[0] == recipe_text()
        return _found(cache)


def _bundle(data: bytes) -> bool:
    root = _empty("local")
    path = scratch("store") / "bundle"
    path.write_bytes(data)
    with open_cache(CacheSettings(dir=str(root))) as cache:
        try:
            carried = unpack(cache, path)
        except StoreError:
            carried = None
        assert isinstance(cache.lookup(_KEY), Hit | Miss)
    for one in root.glob("cas/*/*"):
        assert digest(one.read_bytes()) == one.name
    for one in root.glob("ac/*/*"):
        payload = unseal(one.read_bytes()).payload
        if holds_recipes(payload):
            unseal_recipes(one.name, payload)
        else:
            decode(payload, one.name)
    assert _sentinel().read_text() == "mine"
    return carried is not None and not carried.refused


def _members(*members: tuple[str, bytes], **pax: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.pax_headers = pax
            tar.addfile(info, io.BytesIO(content))
    return zstd.compress(out.getvalue())


def _bundle_seeds() -> Mapping[str, bytes]:
    blobs = [(f"cas/{name[:2]}/{name}", data) for name, data in CONTENT.items()]
    entry = (f"ac/{_KEY[:2]}/{_KEY}", entry_of())
    recipes = (f"ac/00/{LOOKUP}", seal(seal_recipes(LOOKUP, (recipe_text(),))))
    return {
        "good-bundle": _members(*blobs, entry, recipes),
        "bad-path": _members(*blobs, entry, ("../../sentinel", b"evil")),
        "bad-size": _members(*blobs, entry, size="-1"),
        "bad-sparse": _members(*blobs, **{"GNU.sparse.map": "x", "GNU.sparse.size": "9"}),
        "good-time": _members(*blobs, entry, mtime="x"),
    }


TARGETS = (
    Target(
        "local-entry",
        _local_entry,
        lambda: {
            "good-entry": entry_of(),
            "bad-outside": seal(encode(RECORD_OF_ALL).replace(_IR, b'"digest":"../sentinel"')),
            "bad-depth": b'{"x":' + b"[" * 100_000 + b"\n{}\n",
        },
        (ENTRY,),
        weight=20,
    ),
    Target("local-blob", _local_blob, lambda: {"good-blob": ARTIFACT}, weight=20),
    Target("shared-entry", _shared_entry, lambda: {"good-entry": entry_of()}, (ENTRY,), weight=20),
    Target(
        "shared-blob",
        _shared_blob,
        lambda: {
            "good-blob": zstd.compress(ARTIFACT),
            "bad-bomb": zstd.compress(bytes(1 << 18)),
        },
        (ZSTD,),
        weight=25,
    ),
    Target("bundle", _bundle, _bundle_seeds, (BUNDLE, ZSTD), weight=15),
)
