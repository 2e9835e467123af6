"""Fingerprints, the cached index, and the command that shows both."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_files import ARRAY, BOOL, F32, STRING, Gguf, entry, payload, safetensors, tensors

from max_build import stamp
from max_build.cli import weights as command
from max_build.weights import Weights, index, open_weights, remembered
from max_build.weights.fingerprint import compare, fingerprint
from max_build.weights.pages import CHUNK

SPECS = {"a": ("F32", [300]), "b": ("BF16", [5, 2]), "z": ("U8", [0]), "c": ("U8", [7])}


def write(path: Path, specs: dict[str, tuple[str, list[int]]], seed: int = 0) -> Path:
    header, end, data = {}, 0, b""
    for name, (dtype, shape) in specs.items():
        begin = end
        header[name], end = entry(dtype, shape, end)
        data += payload(end - begin, seed + len(name))
    path.write_bytes(safetensors(header, data))
    return path


def test_it_is_that_of_the_bytes(tmp_path: Path) -> None:
    weights = open_weights(write(tmp_path / "a.safetensors", SPECS))
    found = fingerprint(weights)
    assert list(found.tensors) == list(weights)
    for name, tensor in weights.items():
        assert found.tensors[name] == xxhash.xxh3_128_hexdigest(tensor.tobytes())


def test_large_tensors_are_hashed_in_pieces(tmp_path: Path) -> None:
    specs = {"small": ("U8", [3]), "large": ("U8", [CHUNK + 5]), "last": ("U8", [9])}
    header, end = {}, 0
    for name, (dtype, shape) in specs.items():
        header[name], end = entry(dtype, shape, end)
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors(header, bytes(range(251)) * (end // 251) + bytes(end % 251)))
    weights, steps = open_weights(path), []
    found = fingerprint(weights, lambda *step: steps.append(step))
    for name, tensor in weights.items():
        assert found.tensors[name] == xxhash.xxh3_128_hexdigest(tensor.tobytes())
    assert steps[-1] == (end, end)


def test_it_does_not_depend_on_files_or_order(tmp_path: Path) -> None:
    whole = open_weights(write(tmp_path / "a.safetensors", SPECS))
    reverse = open_weights(
        write(tmp_path / "r.safetensors", {name: SPECS[name] for name in reversed(SPECS)})
    )
    parts = [
        write(tmp_path / f"p{i}.safetensors", {name: SPECS[name]}) for i, name in enumerate(SPECS)
    ]
    for other in (reverse, open_weights(parts)):
        assert fingerprint(other).total == fingerprint(whole).total
        assert not compare(whole, other)


def test_names_types_shapes_and_bytes_all_count(tmp_path: Path) -> None:
    base = write(tmp_path / "a.safetensors", {"a": ("F32", [4])})
    others = [
        write(tmp_path / "1.safetensors", {"b": ("F32", [4])}),
        write(tmp_path / "2.safetensors", {"a": ("I32", [4])}),
        write(tmp_path / "3.safetensors", {"a": ("F32", [2, 2])}),
        write(tmp_path / "4.safetensors", {"a": ("F32", [4])}, seed=1),
        write(tmp_path / "5.safetensors", {"a": ("F32", [4]), "e": ("F32", [0])}),
    ]
    totals = {fingerprint(open_weights(path)).total for path in [base, *others]}
    assert len(totals) == 6


def test_what_differs_is_named(tmp_path: Path) -> None:
    one = write(tmp_path / "1.safetensors", {**SPECS, "gone": ("U8", [1]), "kind": ("U8", [4])})
    two = tmp_path / "2.safetensors"
    write(two, {**SPECS, "new": ("U8", [1]), "kind": ("F32", [1])})
    content = bytearray(two.read_bytes())
    offset = open_weights(two)["b"].offset
    content[offset] ^= 1
    two.write_bytes(content)
    found = compare(open_weights(one), open_weights(two))
    assert (found.removed, found.added) == (("gone",), ("new",))
    assert (found.retyped, found.changed) == (("kind",), ("b",))


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    args = parser.parse_args(["weights", *map(str, arguments)])
    return args.run(args)


def test_the_command_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.safetensors", SPECS)
    assert run(path) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["a", "float32", "1.2", "kB", "300"]
    assert out[-1] == "4 tensors, 1.2 kB"
    assert run(path, "--fingerprint") == 0
    assert f"xxh3 {fingerprint(open_weights(path)).total}" in capsys.readouterr().out


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.safetensors", SPECS)
    assert run(path, "--json", "--fingerprint") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tensors"]["b"]["shape"] == [5, 2]
    assert said["tensors"]["b"]["xxh3"] == fingerprint(open_weights(path)).tensors["b"]
    assert said["files"][0]["format"] == "safetensors"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_stdout_cannot_encode_is_escaped(tmp_path: Path, encoding: str) -> None:
    folder = tmp_path / os.fsdecode("é".encode() + b"\xff")
    folder.mkdir()
    for i in (1, 2):
        write(folder / f"m-0000{i}-of-00002.safetensors", {f"t{i}": ("U8", [1])})
    command = [sys.executable, "-m", "max_build", "weights", str(folder)]
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    text = subprocess.run(command, env=env, capture_output=True, check=False)
    assert (text.returncode, text.stderr) == (0, b"")
    assert b"\\udcff/m-00001-of-00002.safetensors" in text.stdout
    data = subprocess.run([*command, "--json"], env=env, capture_output=True, check=False)
    assert (data.returncode, data.stderr) == (0, b"")
    assert Path(json.loads(data.stdout)["files"][0]["path"]).parent == folder


def test_the_command_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "1.safetensors", SPECS)
    two = write(tmp_path / "2.safetensors", SPECS, seed=1)
    assert run(one, one) == 0
    assert capsys.readouterr().out == "the tensors are the same\n"
    assert run(one, two) == 1
    assert capsys.readouterr().out.splitlines() == [
        "other values         a",
        "other values         b",
        "other values         c",
    ]
    assert run(one, two, "--json") == 1
    assert json.loads(capsys.readouterr().out)["changed"] == ["a", "b", "c"]


def test_the_command_tells_problems_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(Gguf().tensor("a", [1], 0, bytes(4)).build() + b"x")
    assert run(path) == 0
    assert "1 bytes follow the last tensor" in capsys.readouterr().err


# The cached index


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(["F32", "BF16", "U8"]), st.lists(st.integers(0, 3), max_size=3)),
        max_size=20,
    )
)
def test_an_index_says_what_the_header_says(
    tmp_path_factory: pytest.TempPathFactory, specs: dict[str, tuple[str, list[int]]]
) -> None:
    header, data = tensors(**specs)
    path = tmp_path_factory.getbasetemp() / "indexed.safetensors"
    path.write_bytes(safetensors({"__metadata__": {"k": "v"}, **header}, data))
    shard = open_weights(path).shards[0]
    found = index.decode(index.encode(shard.header, shard.file), shard.file)
    assert found is not None
    assert list(found.entries) == list(shard.header.entries)
    assert dict(found.entries) == dict(shard.header.entries)
    assert all(name in found.entries for name in specs)
    assert "no such name" not in found.entries
    assert dict(found.metadata) == {"k": "v"}
    assert (found.format, found.data_start) == ("safetensors", shard.header.data_start)


def test_an_index_of_gguf_reads_arrays_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    file = Gguf(3, ">").pair("k", ARRAY, (STRING, ["a", "b"])).pair("f", F32, 0.5)
    file.pair("t", BOOL, 1).pair("raw", STRING, b"\xff").tensor("w", [32], 2, payload(18))
    path.write_bytes(file.build() + b"x")
    shard = open_weights(path).shards[0]
    found = index.decode(index.encode(shard.header, shard.file), shard.file)
    assert found is not None
    assert dict(found.metadata) == {"k": ["a", "b"], "f": 0.5, "t": True, "raw": b"\xff"}
    assert dict(found.entries) == dict(shard.header.entries)
    assert (found.order, found.problems) == (">", shard.header.problems)


def test_a_damaged_index_is_no_index(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", SPECS)
    shard = open_weights(path).shards[0]
    good = index.encode(shard.header, shard.file)
    for at in range(len(good)):
        assert index.decode(good[:at], shard.file) is None
        bad = bytearray(good)
        bad[at] ^= 1
        assert index.decode(bytes(bad), shard.file) is None
    assert index.decode(good + b"x", shard.file) is None


def test_an_index_is_of_one_file_size(tmp_path: Path) -> None:
    shard = open_weights(write(tmp_path / "a.safetensors", SPECS)).shards[0]
    other = open_weights(write(tmp_path / "b.safetensors", {"a": ("U8", [1])})).shards[0]
    assert index.decode(index.encode(shard.header, shard.file), other.file) is None
    assert index.digest(b"{}", 10) != index.digest(b"{}", 11)


# Headers remembered between processes


def many(path: Path, count: int = 2000, order: str = "") -> Path:
    if order:
        file = Gguf(3, order).pair("tokens", ARRAY, (STRING, ["t"] * 9000))
        for i in range(count):
            file.tensor(f"t{i}", [2], 0, payload(8, i))
        path.write_bytes(file.build())
    else:
        write(path, {f"layers.{i}.weight": ("F32", [2]) for i in range(count)})
    return path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stamps be believed at once, in the place of two seconds' wait."""
    monkeypatch.setattr(stamp, "_RACY", -(10**18))


def same(one: Weights, other: Weights) -> bool:
    about = [
        [(n, t.dtype, t.shape, t.offset, t.tobytes(), t.order) for n, t in w.items()]
        for w in (one, other)
    ]
    return about[0] == about[1] and dict(one.metadata) == dict(other.metadata)


@pytest.mark.parametrize("order", ["", "<", ">"])
def test_a_remembered_header_is_not_parsed_again(order: str, settled: None, tmp_path: Path) -> None:
    path, memo = many(tmp_path / "x", order=order), tmp_path / "memo"
    first = open_weights(path, memo=memo)
    assert len(list(memo.iterdir())) == 2
    again = open_weights(path, memo=memo)
    assert type(again.shards[0].header.entries) is index._Entries
    assert same(first, again)
    assert same(first, open_weights(path))


def test_a_copy_of_the_file_is_known_by_its_header(settled: None, tmp_path: Path) -> None:
    path, memo = many(tmp_path / "x"), tmp_path / "memo"
    first = open_weights(path, memo=memo)
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    again = open_weights(copy, memo=memo)
    assert type(again.shards[0].header.entries) is index._Entries
    assert same(first, again)


def test_a_changed_file_is_parsed_again(settled: None, tmp_path: Path) -> None:
    path, memo = many(tmp_path / "x"), tmp_path / "memo"
    open_weights(path, memo=memo)
    content = path.read_bytes().replace(b"layers.7.weight", b"layers.7.weighs")
    path.write_bytes(content)
    assert "layers.7.weighs" in open_weights(path, memo=memo)


def test_a_fresh_file_is_not_remembered(tmp_path: Path) -> None:
    """Its stamp could stay the same through one more change."""
    path, memo = many(tmp_path / "x"), tmp_path / "memo"
    open_weights(path, memo=memo)
    assert not memo.exists()


def test_short_headers_are_not_worth_it(settled: None, tmp_path: Path) -> None:
    path, memo = write(tmp_path / "x", SPECS), tmp_path / "memo"
    open_weights(path, memo=memo)
    assert not memo.exists()


def test_a_damaged_memo_is_no_memo(settled: None, tmp_path: Path) -> None:
    path, memo = many(tmp_path / "x"), tmp_path / "memo"
    first = open_weights(path, memo=memo)
    for damage in (b"", b"x", index.encode(first.shards[0].header, first.shards[0].file)[:-1]):
        for name in memo.iterdir():
            name.unlink()
            name.write_bytes(damage)
        assert same(first, open_weights(path, memo=memo))
    (tmp_path / "file").touch()
    assert same(first, open_weights(path, memo=tmp_path / "file"))


def test_a_file_that_changed_since_it_was_opened_is_not_remembered(
    settled: None, tmp_path: Path
) -> None:
    path, memo = many(tmp_path / "x"), tmp_path / "memo"
    (shard,) = open_weights(path).shards
    content = path.read_bytes().replace(b"layers.7.weight", b"layers.7.weighs")
    path.write_bytes(content)
    remembered.Remembered(str(memo)).put(shard.file, shard.header)
    assert not memo.exists()


def test_the_oldest_are_forgotten(
    settled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "_MOST", 4)
    memo = tmp_path / "memo"
    paths = [many(tmp_path / f"{n}", 2000 + n) for n in range(3)]
    for path in paths:
        open_weights(path, memo=memo)
        os.utime(path)  # another stamp: the header alone is known from here on
    assert len(list(memo.iterdir())) == 4
    known = [
        type(open_weights(path, memo=memo).shards[0].header.entries) is index._Entries
        for path in reversed(paths)
    ]
    assert known == [True, True, False]


def test_the_folder_is_in_the_cache_and_nobody_elses(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    named = {"MAX_BUILD_CACHE_DIR": str(root)}
    assert remembered.default_folder(named) is None
    root.mkdir(mode=0o700)
    assert remembered.default_folder(named) == str(root / "weights")
    root.chmod(0o770)
    assert remembered.default_folder(named) is None
    (tmp_path / "max-build").mkdir(mode=0o700)
    assert remembered.default_folder({"XDG_CACHE_HOME": str(tmp_path)}) == str(
        tmp_path / "max-build" / "weights"
    )
    assert remembered.default_folder({"HOME": str(tmp_path)}) is None
    assert remembered.default_folder({"MAX_BUILD_CACHE_DIR": "relative"}) is None
