"""Graph signatures against files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from weights_files import Gguf, safetensors, tensors

from max_build.errors import WeightsError
from max_build.weights import Weights, open_weights
from max_build.weights.binding import bind


class W(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    names = {
        "model.embed.weight": ("F32", [4, 2]),
        "model.layers.0.mlp.weight": ("BF16", [2, 3]),
        "model.layers.1.mlp.weight": ("F32", [2, 3]),
        "model.norm.bias": ("I64", [2]),
        "model.f8": ("F8_E4M3", [2]),
    }
    header, data = tensors(**names)
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors(header, data))
    return open_weights(path)


def test_names_types_and_shapes_that_fit(weights: Weights) -> None:
    bound = bind([W("model.norm.bias", "int64", (2,))], weights)
    assert bound["model.norm.bias"].nbytes == 16
    assert bound.unused == tuple(sorted(weights.keys() - bound.keys()))


def test_prefix_and_pattern_rules(weights: Weights) -> None:
    bound = bind(
        [W("embed.weight", "float32", (4, 2)), W("blocks.1.ffn", "float32", (2, 3))],
        weights,
        rename={r"^model\.layers\.(\d+)\.mlp\.weight$": r"blocks.\1.ffn", "model.": ""},
    )
    assert bound["blocks.1.ffn"].name == "model.layers.1.mlp.weight"
    assert bound["embed.weight"].name == "model.embed.weight"


def test_a_dot_in_a_prefix_is_a_dot(weights: Weights) -> None:
    with pytest.raises(WeightsError, match="'x' is not in the file"):
        bind([W("x", "float32", (4, 2))], weights, rename={"model.embed.weigh.": "x"})


def test_all_mismatches_are_told_at_once(weights: Weights) -> None:
    signature = [
        W("model.embed.weights", "float32", (4, 2)),
        W("model.norm.bias", "int32", (2,)),
        W("model.layers.0.mlp.weight", "bfloat16", (3, 2)),
        W("model.layers.1.mlp.weight", "float32", (2, 3)),
    ]
    with pytest.raises(WeightsError) as caught:
        bind(signature, weights)
    text = str(caught.value)
    assert "m.safetensors` do not fit the graph, 3 problems" in text
    assert "'model.embed.weights' is not in the file; closest are 'model.embed.weight'" in text
    assert "the graph declares int32 [2], the file has int64 [2] as 'model.norm.bias'" in text
    assert "the graph declares bfloat16 [3, 2], the file has bfloat16 [2, 3]" in text


def test_no_type_is_taken_for_another_of_its_width(weights: Weights) -> None:
    for dtype in ("float16", "uint16", "int16"):
        with pytest.raises(WeightsError, match="bfloat16"):
            bind([W("model.layers.0.mlp.weight", dtype, (2, 3))], weights)


def test_ties_share_one_tensor(weights: Weights) -> None:
    signature = [W("model.embed.weight", "float32", (4, 2)), W("head", "float32", (4, 2))]
    bound = bind(signature, weights, tied={"head": "model.embed.weight"})
    assert bound["head"].offset == bound["model.embed.weight"].offset
    with pytest.raises(WeightsError, match=r"'head' is not in the file, nor is 'no', to which"):
        bind(signature, weights, tied={"head": "no"})


def test_a_tie_does_not_replace_a_tensor_of_that_name(weights: Weights) -> None:
    name = "model.layers.1.mlp.weight"
    bound = bind([W(name, "float32", (2, 3))], weights, tied={name: "model.embed.weight"})
    assert bound[name].name == name


def test_a_cast_is_made_only_where_asked_for(weights: Weights) -> None:
    item = W("model.layers.0.mlp.weight", "float32", (2, 3))
    with pytest.raises(WeightsError, match="the file has bfloat16"):
        bind([item], weights)
    tensor = bind([item], weights, cast={"model.layers.*": "float32"})[item.name]
    raw = weights[item.name].writable().astype(np.uint32) << 16
    np.testing.assert_array_equal(tensor.numpy(), raw.view(np.float32))
    assert (tensor.dtype, tensor.nbytes, tensor.tobytes()) == (
        "float32",
        24,
        tensor.numpy().tobytes(),
    )


def test_a_cast_to_the_same_type_copies_nothing(weights: Weights) -> None:
    name = "model.embed.weight"
    bound = bind([W(name, "float32", (4, 2))], weights, cast={"*": "float32"})
    assert type(bound[name]) is type(weights[name])


def test_a_transpose_is_made_only_where_asked_for(weights: Weights) -> None:
    item = W("model.embed.weight", "float32", (2, 4))
    tensor = bind([item], weights, transpose=["*.embed.*"])[item.name]
    assert tensor.numpy().flags.c_contiguous
    np.testing.assert_array_equal(tensor.numpy(), weights[item.name].numpy().T)
    np.testing.assert_array_equal(np.from_dlpack(tensor), weights[item.name].numpy().T)
    with pytest.raises(WeightsError, match="nothing to transpose in int64"):
        bind([W("model.norm.bias", "int64", (2,))], weights, transpose=["*"])


WRONG_RULES = {
    "pattern": ({"rename": {"^(": ""}}, r"rename rule '\^\('"),
    "group": ({"rename": {"^model": r"\2"}}, "invalid group reference"),
    "collision": ({"rename": {r"^.*layers\.\d+": "l"}}, "lead both .* to 'l.mlp.weight'"),
    "tied": ({"tied": {"no": "model.embed.weight"}}, "`tied` names 'no'"),
    "transpose": ({"transpose": ["no*"]}, r"`transpose` pattern 'no\*' matches no weight"),
    "cast": ({"cast": {"no*": "float32"}}, r"`cast` pattern 'no\*' matches no weight"),
    "quantised": ({"quantised": {"no*": "q4_k"}}, r"`quantised` pattern 'no\*' matches no"),
    "no_type": ({"quantised": {"*": "Q4_K"}}, "'Q4_K' names no type; closest are 'q4_k'"),
    "to_bfloat16": ({"cast": {"*embed*": "bfloat16"}}, "cannot cast to 'bfloat16'"),
    "from_f8": ({"cast": {"model.f8": "float32"}}, "no decoder"),
}


@pytest.mark.parametrize("case", WRONG_RULES)
def test_wrong_rules_are_told(case: str, weights: Weights) -> None:
    options, expected = WRONG_RULES[case]
    signature = [
        W("model.embed.weight", "float32", (4, 2)),
        W("model.f8", "float8_e4m3fn", (2,)),
    ]
    with pytest.raises(WeightsError, match=expected):
        bind(signature, weights, **options)


@pytest.fixture
def quantised(tmp_path: Path) -> Weights:
    raw = np.random.default_rng(0).integers(0, 60, 3 * 2 * 20, dtype=np.uint8).tobytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(Gguf().tensor("w", [64, 3], 3, raw).build())
    return open_weights(path)


def test_quantised_tensors_are_declared_as_bytes_or_cast(quantised: Weights) -> None:
    bound = bind([W("w", "uint8", (3, 40))], quantised, quantised={"*": "q4_1"})
    assert bound["w"].raw_shape == (3, 40)
    cast = bind([W("w", "float32", (3, 64))], quantised, cast={"w": "float32"})["w"]
    np.testing.assert_array_equal(cast.numpy(), quantised["w"].dequantize())
    half = bind([W("w", "float16", (3, 64))], quantised, cast={"w": "float16"})["w"]
    assert half.numpy().dtype == np.float16
    with pytest.raises(WeightsError, match=r"the file has q4_1 \[3, 64\] \(bytes \[3, 40\]\)"):
        bind([W("w", "float32", (3, 64))], quantised)
    with pytest.raises(WeightsError, match="cannot transpose the blocks"):
        bind([W("w", "uint8", (40, 3))], quantised, transpose=["w"])


# ggml's numbers of types whose blocks take up as many bytes: q4_0, q4_k, iq4_nl.
@pytest.mark.parametrize(("number", "name"), [(2, "q4_0"), (12, "q4_k"), (20, "iq4_nl")])
def test_blocks_of_one_size_are_not_taken_for_each_other(
    tmp_path: Path, number: int, name: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(Gguf().tensor("w", [256, 2], number, bytes(288)).build())
    weights, item = open_weights(path), W("w", "uint8", (2, 144))
    with pytest.raises(WeightsError, match=rf'`quantised = {{ "w" = "{name}" }}`'):
        bind([item], weights)
    for other in {"q4_0", "q4_k", "iq4_nl"} - {name}:
        with pytest.raises(WeightsError, match=rf"bytes of {other} .*, the file has {name} \["):
            bind([item], weights, quantised={"w": other})
    assert bind([item], weights, quantised={"w": name})["w"].dtype == name


def test_a_rule_for_blocks_holds_for_plain_bytes_and_no_other_weights(tmp_path: Path) -> None:
    header, data = tensors(mask=("U8", [4]), norm=("F32", [2]))
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors(header, data))
    weights, mask = open_weights(path), W("mask", "uint8", (4,))
    with pytest.raises(WeightsError, match=r"bytes of q4_k .*, the file has uint8 \[4\]"):
        bind([mask], weights, quantised={"*": "q4_k"})
    signature = [mask, W("norm", "float32", (2,))]
    assert len(bind(signature, weights, quantised={"mask": "uint8", "*": "q4_k"})) == 2


def test_foreign_byte_order_is_refused_unless_cast(tmp_path: Path) -> None:
    values = np.arange(4, dtype=">f4")
    path = tmp_path / "m.gguf"
    path.write_bytes(Gguf(3, ">").tensor("w", [4], 0, values.tobytes()).build())
    weights = open_weights(path)
    with pytest.raises(WeightsError, match="byte order"):
        bind([W("w", "float32", (4,))], weights)
    tensor = bind([W("w", "float32", (4,))], weights, cast={"w": "float32"})["w"]
    np.testing.assert_array_equal(np.from_dlpack(tensor), np.arange(4, dtype="f4"))


def test_very_many_names_are_searched_in_a_moment(tmp_path: Path) -> None:
    header, data = tensors(**{f"layers.{i}.mlp.weight": ("U8", [1]) for i in range(5000)})
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors(header, data))
    with pytest.raises(WeightsError, match=r"closest are .*layers\.7\.mlp\.weight"):
        bind([W("layer.7.mlp.weight", "uint8", (1,))], open_weights(path))


def test_a_converted_tensor_is_found_where_its_source_lies(weights: Weights) -> None:
    from max_build.weights.fingerprint import fingerprint
    from max_build.weights.plan import make_plan, ranges

    name = "model.layers.0.mlp.weight"
    bound = bind([W(name, "float64", (2, 3))], weights, cast={"*": "float64"})
    assert fingerprint(bound).tensors[name] == fingerprint(weights).tensors[name]
    [(_, offset, nbytes)] = ranges(bound.values())
    assert (offset, nbytes) == (weights[name].offset, 12)
    assert make_plan(bound).places[name].nbytes == 12


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool"])
def test_an_imaginary_part_is_never_dropped(tmp_path: Path, dtype: str) -> None:
    header, _ = tensors(w=("C64", [1]))
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors(header, np.array([1 + 2j], np.complex64).tobytes()))
    weights = open_weights(path)
    with pytest.raises(WeightsError, match="without the imaginary part of complex64"):
        bind([W("w", dtype, (1,))], weights, cast={"w": dtype})
    with pytest.raises(WeightsError, match="float32 cannot hold complex64"):
        weights["w"].dequantize()
    assert bind([W("w", "complex64", (1,))], weights)["w"].numpy().tolist() == [1 + 2j]
