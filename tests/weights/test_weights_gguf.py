"""GGUF: every rule broken one at a time, both byte orders, and vocabularies left unparsed."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Gguf,
    payload,
)

from max_build.errors import WeightsError
from max_build.weights import open_weights
from max_build.weights.dtypes import GGML
from max_build.weights.gguf_values import Array


def good(version: int = 3, order: str = "<") -> Gguf:
    file = Gguf(version, order)
    file.pair("general.architecture", STRING, "llama").pair("n", U32, 7)
    file.pair("tokens", ARRAY, (STRING, ["a", "bc", ""]))
    file.tensor("a.weight", [4, 2], 0, payload(32)).tensor("b", [32], 3, payload(20))
    return file.tensor("c", [3], 0, payload(12))


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return path


def with_info(*args: object, **kwargs: object) -> bytes:
    """One tensor info as given, before plenty of data."""
    file = Gguf().info(*args, **kwargs)  # type: ignore[arg-type]
    file.data = bytes(4096)
    return file.build()


def nested(depth: int) -> Gguf:
    value: object = (U8, [1])
    for _ in range(depth - 1):
        value = (ARRAY, [value])
    return Gguf().pair("deep", ARRAY, value)


def string_length(length: int) -> bytes:
    file = Gguf()
    file.pairs.append(file.text("k") + file.pack("IQ", STRING, length))
    return file.build() + bytes(64)


def array_count(kind: int, count: int) -> bytes:
    file = Gguf()
    file.pairs.append(file.text("k") + file.pack("IIQ", ARRAY, kind, count))
    return file.build() + bytes(64)


def aligned(kind: int, value: object) -> bytes:
    return Gguf().pair("general.alignment", kind, value).build() + bytes(64)


HOSTILE = {
    "only_magic": (b"GGUF", "not with"),
    "cut_counts": (good().build()[:20], "ends inside the counts"),
    "version_0": (Gguf(0).build(), "version 0"),
    "version_1": (Gguf(1).build(), "version 1"),
    "version_4": (Gguf(4).build(), "version 4"),
    "version_3_mixed": (b"GGUF\0\0\3\0" + bytes(32), "version 768"),
    "tensors_2_63": (good().build(tensors=1 << 63), "declares 9223372036854775808 tensors"),
    "pairs_2_63": (good().build(pairs=1 << 63), "metadata pairs in"),
    "one_tensor_too_many": (Gguf().build(tensors=1) + bytes(8), "ends inside tensor 1 of 1"),
    "key_2_62": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(32),
        "declares 4611686018427387904 bytes of text",
    ),
    "key_too_long": (Gguf().pair("k" * 65536, U8, 1).build(), "limit is 65535"),
    "key_not_utf8": (Gguf().pair(b"\xff", U8, 1).build() + bytes(8), "not UTF-8"),
    "key_twice": (Gguf().pair("k", U8, 1).pair("k", U8, 2).build(), "key 'k' occurs twice"),
    "value_type_13": (
        Gguf().build(pairs=1)[:24] + struct.pack("<Q1sIQ", 1, b"k", 13, 0) + bytes(64),
        "unknown value type 13",
    ),
    "string_2_62": (string_length(1 << 62), "bytes of text"),
    "string_minus_1": (string_length((1 << 64) - 1), "bytes of text"),
    "string_past_end": (string_length(1000), "ends inside metadata 'k'"),
    "array_2_62": (array_count(U8, 1 << 62), "but .* bytes are left"),
    "array_of_strings_2_40": (array_count(STRING, 1 << 40), "but .* bytes are left"),
    "array_past_end": (array_count(U32, 100), "but .* bytes are left"),
    "array_type_13": (array_count(13, 1), "unknown item type 13"),
    "array_string_past_end": (
        Gguf().pair("k", ARRAY, (STRING, ["a"])).build()[:-24] + struct.pack("<Q", 1 << 63),
        "ends inside|bytes are left",
    ),
    "array_nested_deep": (nested(9).build(), "nest deeper than 8"),
    "array_nested_10000": (
        b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 10_000,
        "nest deeper than 8",
    ),
    "bool_2": (Gguf().pair("k", BOOL, 2).build(), "a bool must be 0 or 1"),
    "bool_2_in_array": (Gguf().pair("k", ARRAY, (BOOL, [1, 2])).build(), "a bool must be"),
    "alignment_0": (aligned(U32, 0), "power of two"),
    "alignment_3": (aligned(U32, 3), "power of two"),
    "alignment_u64": (aligned(U64, 32), "must be u32, is u64"),
    "alignment_i32": (aligned(I32, -32), "must be u32, is i32"),
    "alignment_text": (aligned(STRING, "32"), "power of two"),
    "alignment_array": (aligned(ARRAY, (U32, [32])), "power of two"),
    "name_65": (with_info("n" * 65, [1], 0, 0), "limit is 64"),
    "name_100k": (with_info("n" * 100_000, [1], 0, 0), "limit is 64"),
    "name_2_62": (
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1 << 62) + bytes(64),
        "limit is 64",
    ),
    "name_not_utf8": (with_info(b"\xff\xfe", [1], 0, 0), "can't decode byte 0xff"),
    "name_twice": (
        Gguf().tensor("a", [1], 0, bytes(4)).tensor("a", [1], 0, bytes(4)).build(),
        "'a'.* occurs twice",
    ),
    "five_dims": (with_info("a", [1] * 5, 0, 0), "5 dimensions"),
    "dims_2_31": (with_info("a", [1], 0, 0, count=1 << 31), "dimensions; the limit is 4"),
    "type_4": (with_info("a", [1], 4, 0), "unknown ggml type 4"),
    "type_q8_1": (with_info("a", [32], 9, 0), "unknown ggml type 9"),
    "type_2_31": (with_info("a", [1], 1 << 31, 0), "unknown ggml type"),
    "partial_block": (with_info("a", [33], 2, 0), "32-element q4_0 block"),
    "block_of_scalar": (with_info("a", [], 2, 0), "32-element q4_0 block"),
    "dims_wrap_to_zero": (with_info("a", [1 << 32, 1 << 32], 0, 0), "overflows"),
    "dims_2_63": (with_info("a", [1 << 63], 24, 0), "overflows"),
    "offset_not_zero": (with_info("a", [1], 0, 32), "is at 32, expected at 0"),
    "offset_2_64": (with_info("a", [1], 0, (1 << 64) - 32), "expected at 0"),
    "offset_unaligned": (
        Gguf().tensor("a", [1], 0, bytes(4)).info("b", [1], 0, 4).build() + bytes(64),
        "is at 4, expected at 32",
    ),
    "overlap": (
        Gguf().tensor("a", [16], 0, bytes(64)).info("b", [1], 0, 32).build() + bytes(64),
        "is at 32, expected at 64",
    ),
    "hole": (
        Gguf().tensor("a", [1], 0, bytes(4)).info("b", [1], 0, 64).build() + bytes(99),
        "is at 64, expected at 32",
    ),
    "data_past_end": (with_info("a", [2048], 0, 0), "ends at byte 8"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused(case: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[case]
    path = write(tmp_path, content)
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=expected) as caught:
            open_weights(path)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("order", "<>")
def test_truncation_at_every_byte_is_refused(order: str, tmp_path: Path) -> None:
    content = good(order=order).build()
    for length in range(len(content) - 20):  # 20 bytes of padding follow the last tensor
        with pytest.raises(WeightsError):
            open_weights(write(tmp_path, content[:length]))
    assert len(open_weights(write(tmp_path, content[:-20]))) == 3


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("order", "<>")
def test_both_versions_and_byte_orders(version: int, order: str, tmp_path: Path) -> None:
    file = Gguf(version, order)
    values = np.arange(6, dtype=f"{order}f4").reshape(2, 3)
    scalars = {U8: 200, I8: -3, U16: 60000, I16: -3, U32: 1 << 31, I32: -3, F32: 0.5, BOOL: 1,
               STRING: "é", U64: 1 << 63, I64: -3, F64: 0.1}  # fmt: skip
    for kind, value in scalars.items():
        file.pair(f"k{kind}", kind, value).pair(f"a{kind}", ARRAY, (kind, [value] * 3))
    file.pair("nested", ARRAY, (ARRAY, [(U8, [1, 2]), (STRING, ["x"])])).pair("e", ARRAY, (U8, []))
    file.tensor("a", [3, 2], 0, values.tobytes())
    weights = open_weights(write(tmp_path, file.build()))
    for kind, value in scalars.items():
        assert weights.metadata[f"k{kind}"] == value
        assert weights.metadata[f"a{kind}"] == [value] * 3
    assert weights.metadata[f"k{BOOL}"] is True
    assert weights.metadata["nested"] == [[1, 2], ["x"]]
    assert weights.metadata["e"] == []
    np.testing.assert_array_equal(weights["a"].numpy(), values)
    np.testing.assert_array_equal(weights["a"].dequantize(), values.astype("f4"))
    if order == ">":
        with pytest.raises(BufferError, match="byte order"):
            weights["a"].__dlpack__()


def test_arrays_are_left_in_the_file(tmp_path: Path) -> None:
    weights = open_weights(write(tmp_path, good().build()))
    assert isinstance(weights.metadata.values_or_arrays["tokens"], Array)
    assert weights.metadata["tokens"] == ["a", "bc", ""]


def test_text_that_is_not_utf8_comes_as_bytes(tmp_path: Path) -> None:
    file = Gguf().pair("k", STRING, b"\xff").pair("a", ARRAY, (STRING, [b"\xff", "b"]))
    weights = open_weights(write(tmp_path, file.build()))
    assert weights.metadata["k"] == b"\xff"
    assert weights.metadata["a"] == [b"\xff", "b"]


def test_headers_longer_than_a_window_are_read_on(tmp_path: Path) -> None:
    """Strings, pairs and tensor infos of every length come to lie across a boundary."""
    file = Gguf()
    tokens = [f"token {i}" * (1 + i % 7) for i in range(30_000)]
    file.pair("tokens", ARRAY, (STRING, tokens)).pair("long", STRING, "x" * 3_000_000)
    file.pair("scores", ARRAY, (F32, [0.5] * 300_000)).pair("flags", ARRAY, (BOOL, [1] * 1_100_000))
    for i in range(25_000):
        file.info(f"t{i}" + "n" * (i % 50), [1] * (i % 5), 24, 32 * i)
    file.data = bytes(32 * 25_000)
    weights = open_weights(write(tmp_path, file.build()))
    assert weights.metadata["tokens"] == tokens
    assert weights.metadata["long"] == "x" * 3_000_000
    assert len(weights.metadata["scores"]) == 300_000
    assert len(weights) == 25_000
    first = weights["t0"].offset
    assert all(t.offset == first + 32 * i for i, t in enumerate(weights.values()))


def test_alignment_is_the_files_own(tmp_path: Path) -> None:
    file = Gguf(alignment=256).pair("general.alignment", U32, 256)
    file.tensor("a", [1], 0, b"\0\0\x80?").tensor("b", [1], 0, b"\0\0\0@")
    weights = open_weights(write(tmp_path, file.build()))
    assert [t.offset % 256 for t in weights.values()] == [0, 0]
    assert [float(t.numpy()[0]) for t in weights.values()] == [1.0, 2.0]


def test_names_may_be_64_bytes_long_and_tensors_empty(tmp_path: Path) -> None:
    file = Gguf().tensor("n" * 64, [], 0, bytes(4)).tensor("z", [0, 3], 0, b"")
    weights = open_weights(write(tmp_path, file.build()))
    assert [t.shape for t in weights.values()] == [(), (3, 0)]
    assert weights["z"].numpy().shape == (3, 0)


def test_bytes_behind_the_last_tensor_are_told(tmp_path: Path) -> None:
    weights = open_weights(write(tmp_path, good().build() + b"x"))
    assert "1 bytes follow the last tensor" in weights.problems[0]


def test_type_table_is_that_of_the_gguf_package() -> None:
    ours = {n: (t.block, t.bits // 8) for n, t in GGML.items()}
    theirs = {int(q): sizes for q, sizes in gguf.GGML_QUANT_SIZES.items() if q.name != "Q8_1"}
    assert ours == theirs
    plain = {"f": "float", "i": "int", "bf": "bfloat"}
    for number, kind in GGML.items():
        name = gguf.GGMLQuantizationType(number).name.lower()
        letters = name.rstrip("0123456789")
        expected = name if kind.block > 1 else plain[letters] + name[len(letters) :]
        assert kind.name == expected


def decodable() -> list[str]:
    names = []
    for kind in GGML.values():
        try:
            q = gguf.GGMLQuantizationType[kind.name.upper()]
            gguf.quants.dequantize(np.zeros((1, kind.bits // 8), np.uint8), q)
        except (KeyError, NotImplementedError):
            continue
        names.append(kind.name)
    return names


@pytest.mark.parametrize("name", [n for n in decodable() if GGML[0].name != n])
def test_dequantize_is_that_of_the_gguf_package(name: str, tmp_path: Path) -> None:
    q = gguf.GGMLQuantizationType[name.upper()]
    block, size = gguf.GGML_QUANT_SIZES[q]
    raw = np.random.default_rng(1).integers(0, 60, (3, 2 * size), dtype=np.uint8)
    file = Gguf().tensor("w", [2 * block, 3], int(q), raw.tobytes())
    tensor = open_weights(write(tmp_path, file.build()))["w"]
    assert (tensor.dtype, tensor.shape, tensor.raw_shape) == (name, (3, 2 * block), raw.shape)
    np.testing.assert_array_equal(tensor.numpy(), raw)
    values = tensor.dequantize()
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, gguf.quants.dequantize(raw, q).reshape(3, 2 * block))


def test_types_without_a_decoder_say_so(tmp_path: Path) -> None:
    tensor = open_weights(write(tmp_path, Gguf().tensor("w", [256], 15, bytes(292)).build()))["w"]
    with pytest.raises(WeightsError, match="cannot decode q8_k"):
        tensor.dequantize()


def test_bfloat16_is_what_it_says(tmp_path: Path) -> None:
    """The known wrong answer is `uint8` bytes labelled `bfloat16` with the elements' shape."""
    bits = np.arange(64, dtype=np.uint16) + 0x3F80
    tensor = open_weights(write(tmp_path, Gguf().tensor("w", [16, 4], 30, bits.tobytes()).build()))[
        "w"
    ]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("bfloat16", (4, 16), 128)
    expected = (bits.astype(np.uint32) << 16).view(np.float32).reshape(4, 16)
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    np.testing.assert_array_equal(tensor.writable(), bits.reshape(4, 16))


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "b"])
    writer.add_custom_alignment(64)
    arrays = {"a": np.ones((3, 4), np.float32), "b": np.arange(5, dtype=np.float16)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = open_weights(path)
    assert weights.metadata["general.architecture"] == "llama"
    assert weights.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(weights[name].numpy(), array)


BASES = [good().build(), good(2).build(), good(order=">").build(), nested(3).build()]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good file with a few fields overwritten, and perhaps cut."""
    content = bytearray(draw(st.sampled_from(BASES)))
    numbers = st.sampled_from([0, 1, 2, 31, 32, 255, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1])
    words = st.builds(int.to_bytes, numbers, st.just(8), st.sampled_from(["little", "big"]))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(4, len(content) - 1))
        new = draw(st.one_of(st.binary(min_size=1, max_size=8), words))
        content[at : at + len(new)] = new
    return bytes(content[: draw(st.integers(len(content) // 2, len(content)))])


def judge(content: bytes, path: Path) -> None:
    """Refuse the file, or find every tensor inside it and none over another."""
    path.write_bytes(content)
    try:
        with open_weights(path) as weights:
            end = 0
            for tensor in weights.values():
                assert end <= tensor.offset <= tensor.offset + tensor.nbytes <= len(content)
                end = tensor.offset + tensor.nbytes
                assert tensor.tobytes() == content[tensor.offset : end]
            for key in weights.metadata:
                weights.metadata[key]
    except WeightsError:
        pass


@settings(max_examples=300, deadline=None)
@given(mutated())
def test_mutated_files_are_refused_or_lie_inside_the_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    judge(content, tmp_path_factory.getbasetemp() / "mutated.gguf")


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(mutated())
def test_ten_thousand_mutated_files(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    judge(content, tmp_path_factory.getbasetemp() / "mutated.gguf")


def test_a_file_without_tensors_that_ends_before_the_padding_can_be_prefetched(
    tmp_path: Path,
) -> None:
    path = tmp_path / "vocab.gguf"
    path.write_bytes(Gguf().pair("general.name", STRING, "x").head())
    assert path.stat().st_size % 32
    weights = open_weights(path)
    assert (list(weights), weights.prefetch().nbytes) == ([], 0)
