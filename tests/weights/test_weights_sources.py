"""Which files make up a model: shards, indexes, directories, split sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from weights_files import BOOL, F32, I32, U16, Gguf, payload, safetensors, tensors

from max_build.errors import WeightsError
from max_build.weights import Weights, open_weights


def one(path: Path, *names: str, seed: int = 1) -> Path:
    header, data = tensors(**{name: ("F32", [2]) for name in names})
    path.write_bytes(safetensors(header, payload(len(data), seed)))
    return path


def shards(folder: Path, stem: str = "model", count: int = 3) -> list[Path]:
    return [
        one(folder / f"{stem}-{i:05}-of-{count:05}.safetensors", f"t{i}", f"u{i}")
        for i in range(1, count + 1)
    ]


def index(folder: Path, weight_map: dict[str, str], **metadata: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return path


def test_a_file(tmp_path: Path) -> None:
    path = one(tmp_path / "x.safetensors", "a", "b")
    for given in (path, str(path), [path], (str(path),)):
        assert list(open_weights(given)) == ["a", "b"]


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", ""])
def test_a_shard_or_the_directory_means_the_whole_set(name: str, tmp_path: Path) -> None:
    paths = shards(tmp_path)
    weights = open_weights(tmp_path / name)
    assert list(weights) == ["t1", "u1", "t2", "u2", "t3", "u3"]
    assert weights.files == tuple(map(str, paths))
    assert weights["t2"].path == str(paths[1])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shards(tmp_path)[1].unlink()
    with pytest.raises(WeightsError, match="one of 3 shards; missing are 00002"):
        open_weights(tmp_path / "model-00001-of-00003.safetensors")
    with pytest.raises(WeightsError, match="missing are 00002"):
        open_weights(tmp_path)


def test_a_number_beyond_the_count_is_refused(tmp_path: Path) -> None:
    path = one(tmp_path / "model-00004-of-00003.safetensors", "a")
    with pytest.raises(WeightsError, match="is not one of 3 shards"):
        open_weights(path)


def test_several_files_are_merged(tmp_path: Path) -> None:
    paths = [one(tmp_path / f"{n}.safetensors", n) for n in "ab"]
    assert list(open_weights(paths)) == ["a", "b"]


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = [one(tmp_path / f"{n}.safetensors", n, "both") for n in "ab"]
    with pytest.raises(WeightsError, match=r"'both' is in both .*a\.safetensors.*b\.safetensors"):
        open_weights(paths)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_index_decides_which_file_a_tensor_is_from(reverse: bool, tmp_path: Path) -> None:
    """A stale copy in another shard is ignored, whichever comes first."""
    names = ["x-1.safetensors", "x-2.safetensors"]
    paths = [one(tmp_path / name, "a", "b", seed=i) for i, name in enumerate(names)]
    if reverse:
        names.reverse()
        paths.reverse()
    path = index(tmp_path, {"a": names[0], "b": names[1]}, total_size=16)
    for given in (path, tmp_path):
        weights = open_weights(given)
        assert weights["a"].path == str(paths[0])
        assert weights["b"].path == str(paths[1])
        assert weights["a"].tobytes() != weights["b"].tobytes()
        assert weights.problems == (f"`{path}` leaves out 2 of the tensors in its files",)


def test_a_shard_with_an_index_beside_it_goes_by_the_index(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    index(tmp_path, {"t1": paths[0].name, "t3": paths[2].name}, total_size=99)
    weights = open_weights(paths[1])
    assert list(weights) == ["t1", "t3"]
    assert "declares 99 bytes in all; there are 16" in weights.problems[1]


BAD_INDEX = {
    "no_map": ({"metadata": {}}, "no `weight_map`"),
    "empty_map": ({"weight_map": {}}, "no `weight_map`"),
    "list": ([], "no `weight_map`"),
    "number": ({"weight_map": {"a": 1}}, "not a safetensors file"),
    "pickle": ({"weight_map": {"a": "x.bin"}}, "not a safetensors file"),
    "absolute": ({"weight_map": {"a": "/x.safetensors"}}, "leaves the index's directory"),
    "parent": ({"weight_map": {"a": "../x.safetensors"}}, "leaves the index's directory"),
    "no_file": ({"weight_map": {"a": "no.safetensors"}}, "not there: no.safetensors"),
    "ghost": ({"weight_map": {"ghost": "x.safetensors"}}, r"not there: 'ghost' \(said to be in"),
}


@pytest.mark.parametrize("case", BAD_INDEX)
def test_a_wrong_index_is_refused(case: str, tmp_path: Path) -> None:
    content, expected = BAD_INDEX[case]
    one(tmp_path / "x.safetensors", "a")
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=expected):
        open_weights(path)


def test_an_index_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors.index.json"
    path.write_text("{")
    with pytest.raises(WeightsError, match="not valid JSON"):
        open_weights(path)


def test_two_complete_sets_in_a_directory_are_refused(tmp_path: Path) -> None:
    shards(tmp_path, count=2)
    shards(tmp_path, "consolidated", 3)
    with pytest.raises(WeightsError, match=r"several models: consolidated-\*-of-00003.*model-\*"):
        open_weights(tmp_path)


def test_an_index_owns_its_files_but_not_others(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    index(tmp_path, {f"t{i}": path.name for i, path in enumerate(paths, 1)})
    assert list(open_weights(tmp_path)) == ["t1", "t2", "t3"]
    one(tmp_path / "adapter.safetensors", "a")
    with pytest.raises(WeightsError, match=r"several models: adapter\.safetensors, model"):
        open_weights(tmp_path)


@pytest.mark.parametrize("names", [["x.safetensors", "x.gguf"], ["a.gguf", "b.gguf"]])
def test_several_models_in_a_directory_are_refused(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(WeightsError, match="several models"):
        open_weights(tmp_path)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="holds no safetensors or GGUF"):
        open_weights(tmp_path)
    with pytest.raises(WeightsError, match=r"cannot open .*No such file"):
        open_weights(tmp_path / "no.safetensors")
    with pytest.raises(WeightsError, match="no weights files were named"):
        open_weights([])
    with pytest.raises(WeightsError, match="mode must be"):
        open_weights(tmp_path, mode="mmap")  # type: ignore[arg-type]


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(WeightsError, match="not a regular file"):
        open_weights(tmp_path / "x.safetensors")


def split(
    folder: Path, count: int = 3, *, numbers: list[int] | None = None, total: int = 3
) -> list[Path]:
    paths = []
    for i in range(count):
        file = Gguf().pair("split.no", U16, (numbers or list(range(count)))[i])
        file.pair("split.count", U16, count).pair("split.tensors.count", I32, total)
        if i == 0:
            file.pair("general.architecture", 8, "llama")
        file.tensor(f"t{i}", [1], 0, payload(4, i))
        path = folder / f"m-{i + 1:05}-of-{count:05}.gguf"
        path.write_bytes(file.build())
        paths.append(path)
    return paths


def test_a_split_gguf_set_is_one_model(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for given in (tmp_path, paths[1], list(reversed(paths))):
        weights = open_weights(given)
        assert list(weights) == ["t0", "t1", "t2"]
        assert weights.metadata["general.architecture"] == "llama"


def test_a_split_set_must_be_whole(tmp_path: Path) -> None:
    paths = split(tmp_path)
    with pytest.raises(WeightsError, match="2 of a set of 3"):
        open_weights(paths[:2])
    paths[1].unlink()
    with pytest.raises(WeightsError, match="missing are 00002"):
        open_weights(paths[0])


@pytest.mark.parametrize("key", ["split.count", "split.no", "split.tensors.count"])
@pytest.mark.parametrize(
    ("kind", "value"), [(9, (U16, [2])), (F32, float("nan")), (8, "2"), (BOOL, 1)]
)
def test_what_says_how_a_set_is_split_must_be_a_number(
    tmp_path: Path, key: str, kind: int, value: object
) -> None:
    for i in range(2):
        file = Gguf()
        for name, number in {"split.no": i, "split.count": 2, "split.tensors.count": 2}.items():
            file.pair(name, *((kind, value) if name == key else (U16, number)))
        file.tensor(f"t{i}", [1], 0, payload(4, i))
        (tmp_path / f"m-{i + 1:05}-of-00002.gguf").write_bytes(file.build())
    with pytest.raises(WeightsError, match=f"metadata '{key}' must be a whole number, is "):
        open_weights(tmp_path)


def test_a_renamed_shard_opened_alone_is_refused(tmp_path: Path) -> None:
    path = split(tmp_path)[1].rename(tmp_path / "model.gguf")
    with pytest.raises(WeightsError, match="1 of a set of 3"):
        open_weights(path)


def test_shards_whose_names_were_swapped_are_refused(tmp_path: Path) -> None:
    split(tmp_path, numbers=[1, 0, 2])
    with pytest.raises(WeightsError, match="shard 1 of its set"):
        open_weights(tmp_path)


def test_shard_numbers_must_be_those_of_the_set(tmp_path: Path) -> None:
    split(tmp_path, numbers=[0, 2, 2])
    with pytest.raises(WeightsError, match=r"`split\.no`.*\[0, 2, 2\]"):
        open_weights(tmp_path)


def test_the_tensor_count_must_be_that_of_all_shards(tmp_path: Path) -> None:
    split(tmp_path, total=4)
    with pytest.raises(WeightsError, match=r"`split\.tensors\.count`.*\[4\], found 3"):
        open_weights(tmp_path)


def test_formats_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").write_bytes(Gguf().tensor("g", [1], 0, bytes(4)).build())
    paths = [one(tmp_path / "a.safetensors", "a"), tmp_path / "b.gguf"]
    with pytest.raises(WeightsError, match="cannot be mixed"):
        open_weights(paths)


def test_names_that_are_not_there_are_key_errors(tmp_path: Path) -> None:
    weights: Weights = open_weights(one(tmp_path / "x.safetensors", "a"))
    assert "b" not in weights
    assert weights.get("b") is None
    with pytest.raises(KeyError):
        weights["b"]
