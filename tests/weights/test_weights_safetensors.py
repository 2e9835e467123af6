"""Every rule of the format broken one at a time, and every valid oddity taken."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_files import BITS, entry, payload, safetensors, tensors

from max_build.errors import WeightsError
from max_build.weights import open_weights
from max_build.weights import safetensors as ours

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
GOOD, DATA = tensors(a=("F32", [2]), b=("U8", [3]), c=("F32", [1]))


def changed(name: str = "a", **fields: object) -> bytes:
    """The good file with fields of one tensor changed (None takes one away)."""
    one = {k: v for k, v in {**GOOD[name], **fields}.items() if v is not None}
    return safetensors({**GOOD, name: one}, DATA)


def raw(text: str, data: bytes = b"") -> bytes:
    """`text` as it is, but for a valid entry in the place of `ENTRY`."""
    return safetensors(text.replace("ENTRY", ENTRY).encode(), data)


ENTRY = json.dumps(F32)
HOSTILE = {
    "empty_file": (b"", "too short"),
    "seven_bytes": (b"\2\0\0\0\0\0\0", "too short"),
    "header_length_zero": (struct.pack("<Q", 0), "not with an object"),
    "header_longer_than_file": (struct.pack("<Q", 100) + b"{}", "header of 100 bytes"),
    "header_over_limit": (struct.pack("<Q", 100_000_001) + b"{}", "limit is 100000000"),
    "header_length_2_64": (b"\xff" * 8 + b"{}", "limit is"),
    "leading_space": (safetensors(b" {}"), "not with an object"),
    "leading_bom": (safetensors(b"\xef\xbb\xbf{}"), "not with an object"),
    "array_at_top": (safetensors(b"[]"), "not with an object"),
    "not_json": (safetensors(b"{a}"), "not valid JSON"),
    "not_utf8": (safetensors(b'{"\xff":' + ENTRY.encode() + b"}", bytes(8)), "not valid JSON"),
    "utf16": (safetensors('{"a":1}'.encode("utf-16-le")), "not valid JSON"),
    "cut_json": (safetensors(b'{"a":{"dtype":"F32"'), "not valid JSON"),
    "trailing_comma": (raw('{"a":ENTRY,}', bytes(8)), "not valid JSON"),
    "trailing_text": (raw('{"a":ENTRY}x', bytes(8)), "not valid JSON"),
    "nul_padding": (safetensors({"a": F32}, bytes(8), pad=b"\0"), "not valid JSON"),
    "nan": (raw('{"a":NaN}'), "not JSON"),
    "deep_json": (raw('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "not valid JSON"),
    "deep_open": (raw('{"a":' * 100_000), "not valid JSON"),
    "duplicate_name": (raw('{"a":ENTRY,"a":ENTRY}', bytes(8)), "'a' occurs twice"),
    "duplicate_escaped": (raw(r'{"a":ENTRY,"\u0061":ENTRY}', bytes(8)), "occurs twice"),
    "duplicate_other": (
        raw('{"a":ENTRY,"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}', bytes(8)),
        "'a' occurs twice",
    ),
    "duplicate_field": (
        raw('{"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "'shape' occurs twice",
    ),
    "duplicate_field_escaped": (
        raw(
            r'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"data\u005foffsets":[0,8]}}',
            bytes(8),
        ),
        "'data_offsets' occurs twice",
    ),
    "duplicate_metadata": (
        raw('{"__metadata__":{},"__metadata__":{},"a":ENTRY}', bytes(8)),
        "occurs twice",
    ),
    "duplicate_metadata_key": (
        raw('{"__metadata__":{"k":"1","k":"2"},"a":ENTRY}', bytes(8)),
        "'k' occurs twice",
    ),
    "metadata_number": (safetensors({"__metadata__": {"k": 1}, **GOOD}, DATA), "text to text"),
    "metadata_nested": (safetensors({"__metadata__": {"k": {}}, **GOOD}, DATA), "text to text"),
    "metadata_list": (safetensors({"__metadata__": [], **GOOD}, DATA), "text to text"),
    "metadata_is_entry": (safetensors({**GOOD, "__metadata__": F32}, DATA), "text to text"),
    "lone_surrogate": (raw(r'{"\ud800":ENTRY}', bytes(8)), "surrogates not allowed"),
    "entry_is_list": (safetensors({"a": []}), "must have the fields"),
    "entry_is_null": (safetensors({"a": None}), "must have the fields"),
    "no_dtype": (changed(dtype=None), "must have the fields"),
    "no_shape": (changed(shape=None), "must have the fields"),
    "no_offsets": (changed(data_offsets=None), "must have the fields"),
    "extra_field": (changed(strides=[1]), "must have the fields"),
    "dtype_unknown": (changed(dtype="F33"), "unknown `dtype` 'F33'"),
    "dtype_lower_case": (changed(dtype="f32"), "unknown `dtype`"),
    "dtype_number": (changed(dtype=1), "unknown `dtype`"),
    "shape_negative": (changed(shape=[-2]), "whole numbers"),
    "shape_two_negatives": (changed(shape=[-1, -2]), "whole numbers"),
    "shape_float": (changed(shape=[2.0]), "whole numbers"),
    "shape_bool": (changed(shape=[True, 2]), "whole numbers"),
    "shape_text": (changed(shape=["2"]), "whole numbers"),
    "shape_number": (changed(shape=2), "whole numbers"),
    "shape_null": (safetensors({"a": {**F32, "shape": None}}, bytes(8)), "whole numbers"),
    "shape_1e30": (changed(shape=[10**30]), "whole numbers"),
    "shape_wraps_to_zero": (changed(shape=[1 << 32, 1 << 32]), "overflows"),
    "shape_zero_hides_overflow": (changed(shape=[0, 1 << 40, 1 << 40]), "overflows"),
    "shape_too_large": (changed(shape=[3]), "hold 8 bytes"),
    "shape_too_small": (changed(shape=[1]), "hold 8 bytes"),
    "rank_0_of_8_bytes": (changed(shape=[]), "hold 8 bytes"),
    "half_a_byte": (
        safetensors({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, bytes(1)),
        "not a whole number of bytes",
    ),
    "six_bits": (
        safetensors({"a": {"dtype": "F6_E2M3", "shape": [2], "data_offsets": [0, 2]}}, bytes(2)),
        "not a whole number of bytes",
    ),
    "offsets_one": (changed(data_offsets=[8]), r"\[begin, end\]"),
    "offsets_three": (changed(data_offsets=[0, 8, 8]), r"\[begin, end\]"),
    "offset_negative": (changed(data_offsets=[-8, 0]), "whole numbers"),
    "offset_float": (changed(data_offsets=[0.0, 8.0]), "whole numbers"),
    "offset_1e30": (changed(data_offsets=[0, 10**30]), "whole numbers"),
    "offset_2_64": (changed(data_offsets=[1 << 64, (1 << 64) + 8]), "whole numbers"),
    "begin_after_end": (changed(data_offsets=[8, 0]), "run backwards"),
    "overlap": (changed("b", data_offsets=[7, 10]), "overlaps tensor 'a'"),
    "alias": (safetensors({"a": F32, "b": F32}, bytes(8)), "overlaps tensor 'a'"),
    "hole": (
        safetensors({"a": F32, "b": {**F32, "data_offsets": [9, 17]}}, bytes(17)),
        "leaves a hole after tensor 'a'",
    ),
    "first_not_zero": (
        safetensors({"a": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        "leaves a hole after the start",
    ),
    "empty_tensor_in_hole": (
        safetensors({"a": F32, "z": {**F32, "shape": [0], "data_offsets": [9, 9]}}, bytes(9)),
        "leaves a hole",
    ),
    "empty_tensor_inside": (
        safetensors({"a": F32, "z": {**F32, "shape": [0], "data_offsets": [4, 4]}}, bytes(8)),
        "overlaps",
    ),
    "truncated_by_one": (safetensors(GOOD, DATA[:-1]), "1 bytes missing"),
    "no_data": (safetensors(GOOD), "15 bytes missing"),
    "trailing_byte": (safetensors(GOOD, DATA + b"\0"), "1 bytes too many"),
    "data_without_tensors": (safetensors({}, b"\0"), "1 bytes too many"),
    "pickle": (b"\x80\x04\x95" + bytes(20), "is a pickle"),
    "torch_zip": (b"PK\3\4" + bytes(20), "a zip archive"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused(case: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=expected) as caught:
            open_weights(path)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_truncation_at_every_byte_is_refused(tmp_path: Path) -> None:
    content = safetensors({"__metadata__": {"format": "pt"}, **GOOD}, DATA)
    path = tmp_path / "cut.safetensors"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(WeightsError):
            open_weights(path)
    path.write_bytes(content)
    assert list(open_weights(path)) == ["a", "b", "c"]


def shuffled() -> bytes:
    """Header order is not data order."""
    return safetensors({name: GOOD[name] for name in ("c", "a", "b")}, DATA)


ODD = {
    "no_tensors": safetensors({}),
    "only_metadata": safetensors({"__metadata__": {"a": "b"}}),
    "empty_metadata": safetensors({"__metadata__": {}, **GOOD}, DATA),
    "metadata_last": safetensors({**GOOD, "__metadata__": {"k": "v"}}, DATA),
    "metadata_with_braces": safetensors({"__metadata__": {"k": '{"}": "\\"}'}, **GOOD}, DATA),
    "metadata_with_newline": safetensors({"__metadata__": {"k\n": "\u00e9\n"}, **GOOD}, DATA),
    "unpadded": safetensors(GOOD, DATA),
    "spaces_behind": safetensors(GOOD, DATA, pad=b"     "),
    "newline_behind": safetensors(GOOD, DATA, pad=b"\n"),
    "pretty": safetensors(json.dumps(GOOD, indent=2).encode(), DATA),
    "shuffled": shuffled(),
    "colon_in_name": safetensors({"w:0": F32}, bytes(8)),
    "empty_name": safetensors({"": F32}, bytes(8)),
    "escaped_name": safetensors(rb'{"\u00e9\"":%b}' % ENTRY.encode(), bytes(8)),
    "raw_unicode_name": safetensors('{"é→":%s}'.encode() % ENTRY.encode(), bytes(8)),
    "path_like_name": safetensors({"../../x": F32}, bytes(8)),
    "name_like_a_field": safetensors({"data_offsets": F32}, bytes(8)),
    "rank_0": safetensors({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4)),
    "rank_9": safetensors(
        {"a": {"dtype": "U8", "shape": [1] * 9, "data_offsets": [0, 1]}}, bytes(1)
    ),
    "empty_first": safetensors(
        {"z": {"dtype": "F32", "shape": [0, 7], "data_offsets": [0, 0]}, "a": F32}, bytes(8)
    ),
    "empty_between": safetensors(
        {
            "a": F32,
            "z": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]},
            "b": {"dtype": "U8", "shape": [1], "data_offsets": [8, 9]},
        },
        bytes(9),
    ),
    "all_empty": safetensors({"z": {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}}),
    "odd_offsets": safetensors(*tensors(a=("U8", [1]), b=("F64", [2]), c=("F16", [3]))),
}


@pytest.mark.parametrize("case", ODD)
def test_valid_oddity_reads_as_the_reference_does(case: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(ODD[case])
    weights = open_weights(path)
    expected = dict(reference.deserialize(ODD[case]))
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert list(tensor.shape) == expected[name]["shape"]
        assert tensor.tobytes() == bytes(expected[name]["data"])
        assert tensor.numpy().tobytes() == tensor.tobytes()
    with reference.safe_open(path, "np") as opened:
        assert dict(weights.metadata) == (opened.metadata() or {})


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("lead", [0, 1])
def test_every_dtype_comes_through(dtype: str, lead: int, tmp_path: Path) -> None:
    one, end = entry(dtype, [2, 4], lead)
    header = {"lead": {"dtype": "U8", "shape": [lead], "data_offsets": [0, lead]}, "x": one}
    path = tmp_path / "one.safetensors"
    path.write_bytes(safetensors(header, payload(end)))
    tensor = open_weights(path)["x"]
    assert tensor.shape == (2, 4)
    assert tensor.tobytes() == payload(end)[lead:]
    array = tensor.numpy()
    assert array.tobytes() == payload(end)[lead:]
    assert array.flags.aligned
    assert not array.flags.writeable
    assert array.strides == tensor.strides
    assert array.shape == tensor.raw_shape


def test_numbers_are_those_that_numpy_wrote(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    arrays = {
        f"w{i}": rng.standard_normal((i, 3)).astype(kind)
        for i, kind in enumerate((np.float32, np.float64, np.float16, np.int32, np.uint8), 1)
    }
    save_file(arrays, tmp_path / "x.safetensors", {"format": "np"})
    weights = open_weights(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(weights[name].numpy(), array)
        np.testing.assert_array_equal(np.asarray(weights[name]), array)
        np.testing.assert_array_equal(np.from_dlpack(weights[name]), array)
    assert weights.metadata == {"format": "np"}


def verdicts(content: bytes, path: str) -> tuple[object, object]:
    """Our reading of `content` and the reference's; an error is its message."""
    length = int.from_bytes(content[:8], "little")
    header = bytearray(content[8 : 8 + length])
    try:
        found = ours.parse(header, path=path, size=len(content))
        mine: object = {
            name: (e.shape, content[e.offset : e.offset + e.nbytes])
            for name, e in found.entries.items()
        }
    except WeightsError as error:
        mine = str(error)
    try:
        theirs: object = {
            name: (tuple(t["shape"]), bytes(t["data"]))
            for name, t in reference.deserialize(content)
        }
    except (reference.SafetensorError, ValueError, OverflowError) as error:
        theirs = str(error)
    return mine, theirs


#: What we refuse and the reference takes.
STRICTER = ("occurs twice", "must have the fields", "not with an object", "overflows")


def agree(content: bytes) -> None:
    mine, theirs = verdicts(content, "x")
    if isinstance(mine, dict):
        assert mine == theirs
    elif isinstance(theirs, dict):
        assert any(rule in str(mine) for rule in STRICTER), mine


TOKENS = st.sampled_from(
    [b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"8", b"-1", b"1.0", b"null", b"true", b" ",
     b'"a"', b'"F32"', b'"BF16"', b'"shape"', b'"data_offsets"', b'"__metadata__":{"a":"b"},',
     b"\\", b"\\u0061", b"\xff", b"\0", b"18446744073709551616", b"99", b"[0,8]", b"[8,8]"]
)  # fmt: skip
BASES = [
    json.dumps({"__metadata__": {"format": "pt"}, **GOOD}, separators=(",", ":")).encode(),
    json.dumps(GOOD, separators=(",", ":")).encode(),
    json.dumps({"a": GOOD["a"]}).encode(),
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good header with a few pieces cut, doubled, swapped or replaced."""
    text = bytearray(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(text)))
        end = min(len(text), begin + draw(st.integers(0, 12)))
        piece = draw(st.one_of(TOKENS, st.binary(max_size=3), st.just(bytes(text[begin:end]) * 2)))
        text[begin:end] = piece
    return safetensors(bytes(text), DATA[: draw(st.sampled_from([15, 15, 15, 14, 8]))])


@settings(max_examples=400, deadline=None)
@given(mutated())
def test_mutated_headers_are_judged_as_by_the_reference(content: bytes) -> None:
    agree(content)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(mutated())
def test_ten_thousand_mutated_headers(content: bytes) -> None:
    agree(content)


SPECS = st.lists(
    st.tuples(st.sampled_from(sorted(BITS)), st.lists(st.integers(0, 3), max_size=3)), max_size=6
)


@settings(max_examples=150, deadline=None)
@given(SPECS, st.randoms(use_true_random=False), st.booleans())
def test_valid_headers_are_taken(specs, random, metadata: bool) -> None:
    header, end = {}, 0
    for number, (dtype, shape) in enumerate(specs):
        padded = [*shape, 4] if BITS[dtype] < 8 else shape
        header[f"t{number}"], end = entry(dtype, padded, end)
    names = list(header)
    random.shuffle(names)
    shuffled = {name: header[name] for name in names}
    if metadata:
        shuffled = {"__metadata__": {"k": "v"}, **shuffled}
    mine, theirs = verdicts(safetensors(shuffled, payload(end)), "x")
    assert isinstance(mine, dict)
    assert mine == theirs


@pytest.mark.parametrize("first", [0, 1])
def test_more_dimensions_than_numpy_has(tmp_path: Path, first: int) -> None:
    header, data = tensors(x=("F32", [first] + [1] * 70))
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors(header, data))
    tensor = open_weights(path)["x"]
    for view in (tensor.numpy, tensor.dequantize, lambda: tensor.__array_interface__):
        with pytest.raises(WeightsError, match="tensor 'x' does not fit a NumPy array"):
            view()
