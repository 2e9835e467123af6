"""What fuzzing found, each as the plainest test of it."""

from __future__ import annotations

import base64
import io
import json
import os
import pwd
import struct
import tarfile
from pathlib import Path

import msgspec
import pytest
from elf_files import cubin, notes
from fuzz_records import ARTIFACT, RECORD_OF_ALL, entry_of, recipe_text

from max_build import manifest
from max_build.compilers.cubin import read_cubin
from max_build.compilers.mef import read_mef
from max_build.compilers.scan import scan
from max_build.config import load_settings
from max_build.errors import CompileError, ConfigError, LoadError, StoreError, WeightsError
from max_build.key import digest
from max_build.recipes import recipe
from max_build.record import Blob, decode, encode
from max_build.store import CacheSettings, Hit, Miss, actionresult, open_cache
from max_build.store.amounts import parse_size
from max_build.store.bundle import unpack
from max_build.store.compress import open_packed
from max_build.store.connection import authorization
from max_build.store.entry import seal, unseal, unseal_recipes
from max_build.store.gc import gc
from max_build.store.index import Memo
from max_build.weights import open_weights

KEY = RECORD_OF_ALL.key
DEEP = b"[" * 100_000 + b"]" * 100_000


# --- records


@pytest.mark.parametrize(
    "name", ["../victim", "/etc/hostname", "0" * 63, "A" * 64, "0" * 64 + "\n"]
)
def test_a_blob_is_named_by_a_digest_and_by_nothing_else(name: str) -> None:
    blob = Blob(role="mef", digest=name, size=1)
    data = encode(msgspec.structs.replace(RECORD_OF_ALL, blobs=(blob,)))
    with pytest.raises(ValueError, match="not readable"):
        decode(data, KEY)


def test_a_blob_has_no_negative_size() -> None:
    blob = Blob(role="mef", digest="0" * 64, size=-1)
    with pytest.raises(ValueError, match="not readable"):
        decode(encode(msgspec.structs.replace(RECORD_OF_ALL, blobs=(blob,))), KEY)


@pytest.mark.parametrize("fetch", [True, False])
def test_a_record_cannot_have_a_file_outside_the_cache_moved_away(
    tmp_path: Path, fetch: bool
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    team = tmp_path / "team"
    team.mkdir(0o700)
    outside = (Blob(role="mef", digest="../victim", size=4),)
    path = team / "ac" / KEY[:2] / KEY
    path.parent.mkdir(parents=True)
    path.write_bytes(seal(encode(msgspec.structs.replace(RECORD_OF_ALL, blobs=outside))))
    with open_cache(CacheSettings(dir=str(tmp_path / "local"), shared=str(team))) as cache:
        found = cache.lookup(KEY, fetch=fetch)
        assert isinstance(found, Miss)
        assert found.reason == "damaged"
    assert victim.read_text() == "mine"


# --- JSON that nests deeper than the stack


def test_no_text_of_a_cache_exhausts_the_stack(tmp_path: Path) -> None:
    def deep(data: bytes) -> bytes:
        return data[:-1] + b',"later":' + DEEP + b"}"

    with pytest.raises(ValueError, match="nests too deeply"):
        decode(deep(encode(RECORD_OF_ALL)), KEY)
    with pytest.raises(ValueError, match="nests too deeply"):
        unseal(b"{}\n" + deep(b'{"schema":1}') + b"\n")
    with pytest.raises(ValueError, match="nests too deeply"):
        unseal_recipes("0" * 64, b'{"later":' + DEEP)
    with pytest.raises(ValueError, match="nests too deeply"):
        actionresult.encode(seal(b'{"later":' + DEEP))
    with pytest.raises(LoadError, match="nests too deeply"):
        manifest.decode(b'{"schema":1,"later":' + DEEP, "manifest.json")
    assert recipe.decode(b'{"schema":' + DEEP) is None


def test_a_deep_entry_is_a_miss_and_gc_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ac" / KEY[:2] / KEY
    path.parent.mkdir(parents=True)
    tmp_path.chmod(0o700)
    path.write_bytes(seal(b'{"x":' + DEEP))
    with open_cache(CacheSettings(dir=str(tmp_path))) as cache:
        assert cache.local.store is not None
        gc(cache.local.store)
        found = cache.lookup(KEY)
        assert isinstance(found, Miss)
        assert found.reason == "damaged"


# --- recipes


def test_a_recipe_that_names_what_has_no_end_does_not_hold(tmp_path: Path) -> None:
    from max_build.recipes.surroundings import Here

    os.mkfifo(tmp_path / "pipe")
    here = Here(str(tmp_path), (), {}, Memo(None).digest_of, {})
    for path in ("/dev/zero", "pipe"):
        found = recipe.decode(recipe_text())
        assert found is not None
        assert recipe.broken(found, here) == ""
        endless = msgspec.structs.replace(found, files={path: "0" * 64})
        assert recipe.broken(endless, here)


# --- settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("targets = " + "[" * 3000 + "]" * 3000, "cannot be read"),
        ("jobs = " + "9" * 5000, "cannot be read"),
        (f'cache = {{ max-size = "{"9" * 400}" }}', "cache.max-size"),
    ],
)
def test_settings_without_end_are_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.max-build]\n{text}\n")
    with pytest.raises(ConfigError, match=message):
        load_settings(tmp_path, environ={})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('cache = { dir = "~no-such-user/x" }', "home directory of '~no-such-user/x'"),
        ('cache = { signing-key = "a\\u0000" }', "cache.signing-key` must be a non-empty string"),
        ('python-path = ["src", "a\\u0000"]', "item 2 is"),
        (
            'kernels.k = { source = "a\\u0000.cu", targets = ["sm_90"] }',
            "kernels.k.source` must be",
        ),
    ],
)
def test_paths_that_are_none_are_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.max-build]\n{text}\n")
    with pytest.raises(ConfigError, match=message):
        load_settings(tmp_path, environ={})


def test_a_user_without_a_home_directory_has_no_netrc(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        message = "no such user"
        raise KeyError(message)

    for name in ("HOME", "MAX_BUILD_REMOTE_TOKEN", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert authorization("http://host/") == {}


def test_a_size_beyond_63_bits_is_none() -> None:
    assert parse_size("8191 TiB") == 8191 << 40
    for text in ("9" * 400, "9" * 30, "99999999 TiB"):
        with pytest.raises(ValueError, match="a size is"):
            parse_size(text)


@pytest.mark.parametrize(
    "url", ["http://[x", "https://ci:secret@[::1", "http://h:port", "http://h:99999", "file://[x"]
)
def test_a_remote_without_readable_host_is_told_and_not_shown(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="host or port") as caught:
        open_cache(CacheSettings(dir=str(tmp_path), remote=url))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://ci:secret@", "http://?token=secret", "https://:80#secret", "http://u@/x?secret"]
)
def test_a_remote_without_host_is_told_without_what_is_secret(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="names no host") as caught:
        open_cache(CacheSettings(dir=str(tmp_path), remote=url))
    assert "secret" not in str(caught.value)


def test_credentials_in_a_url_are_sent_as_the_bytes_they_are() -> None:
    def sent(url: str) -> bytes:
        return base64.b64decode(authorization(url)["Authorization"].removeprefix("Basic "))

    assert sent("https://ci:pässwört→@host/") == "ci:pässwört→".encode()
    assert sent("https://ci:%E2%86%92%ff@host/") == "ci:→".encode() + b"\xff"


# --- weights


@pytest.mark.parametrize("text", [b"\xed\xa0\x80", b"\xff", b"\\ud800", b"\\udfff\\ud800"])
@pytest.mark.parametrize("place", ["key", "value"])
def test_metadata_of_safetensors_is_text(tmp_path: Path, text: bytes, place: str) -> None:
    pair = b'"%s":"x"' % text if place == "key" else b'"x":"%s"' % text
    header = b'{"__metadata__":{%s},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' % pair
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(WeightsError, match=r"is not valid JSON|surrogate"):
        open_weights(path)


def test_metadata_of_safetensors_may_be_any_text(tmp_path: Path) -> None:
    text = "→ \U0001f600 \\ é"
    header = json.dumps({"__metadata__": {text: text}}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with open_weights(path) as weights:
        assert dict(weights.metadata) == {text: text}


# --- machine code


def test_names_are_not_read_from_an_unused_section() -> None:
    data = bytearray(cubin())
    table = int.from_bytes(data[62:64], "little")
    row = 64 + 64 * table
    data[row + 4 : row + 8] = bytes(4)  # of the kind that has no bytes, wherever they lie
    with pytest.raises(CompileError, match="no name at byte"):
        read_cubin(bytes(data))


def test_a_section_that_is_named_many_times_is_not_read_as_often() -> None:
    with pytest.raises(CompileError, match="more sections than it has bytes for"):
        read_mef(notes(2000, 1 << 20))


# --- sources


@pytest.mark.parametrize("number", ["1.", "1e+", ".5p-", "1'0", "0x1."])
def test_a_number_takes_the_letters_that_follow_it(number: str) -> None:
    """Or else a raw string would begin, and hide an include that the compiler sees."""
    text = f'#if 0\n{number}R"(\n#endif\n#include "a.h"\n//)"\n'
    assert [include.name for include in scan(text.encode()).includes] == ["a.h"]


# --- bundles


def bundle(path: Path, *members: tuple[str, bytes], **pax: str) -> Path:
    with open_packed(path, "wb") as out, tarfile.open(fileobj=out, mode="w|") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.pax_headers = pax
            tar.addfile(info, io.BytesIO(data))
    return path


BLOBS = [(f"cas/{digest(d)[:2]}/{digest(d)}", d) for d in (ARTIFACT, b"ir")]


def test_a_bundle_with_a_header_that_is_no_number_is_told(tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", *BLOBS, **{"GNU.sparse.map": "x", "GNU.sparse.size": "9"})
    with (
        open_cache(CacheSettings(dir=str(tmp_path / "c"))) as cache,
        pytest.raises(StoreError, match="cannot be read"),
    ):
        unpack(cache, path)


def test_a_bundle_with_an_endless_header_is_told_before_it_is_read(tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", *BLOBS, comment="x" * (1 << 20))
    with (
        open_cache(CacheSettings(dir=str(tmp_path / "c"))) as cache,
        pytest.raises(StoreError, match=r"header of 10\d{5} bytes"),
    ):
        unpack(cache, path)


def test_a_bundle_of_many_entries_is_taken_one_by_one(tmp_path: Path) -> None:
    import tracemalloc

    large = [(f"ac/{n:02x}/{n:02x}{n:062x}", b"x" * (3 << 20)) for n in range(20)]
    path = bundle(tmp_path / "b", *BLOBS, *large, (f"ac/{KEY[:2]}/{KEY}", entry_of()))
    with open_cache(CacheSettings(dir=str(tmp_path / "c"))) as cache:
        tracemalloc.start()
        try:
            carried = unpack(cache, path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (carried.entries, carried.blobs, len(carried.refused)) == (1, 2, 20)
        assert isinstance(cache.lookup(KEY), Hit)
    assert peak < 30 << 20
