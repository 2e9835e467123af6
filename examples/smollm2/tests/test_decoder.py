"""The compiled decoder against a float64 forward pass over the same weights."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from max_build import open_weights
from reference import Reference
from smollm2.decoder import CHUNK, Decoder
from smollm2.files import model_file
from smollm2.model import MODEL
from smollm2.text import make_tokenizer
from smollm2.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Logits = Callable[[list[int]], NDArray[np.float64]]

TOLERANCE = 1e-3
NEVER = -1
TEXTS = [
    "Once upon a time, in a village by the sea,",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
]


@pytest.fixture(scope="session")
def model(max_build_model: Callable[..., Any]) -> Any:
    return max_build_model("decoder", target="cpu")


@pytest.fixture(scope="session")
def encode() -> Callable[[str], list[int]]:
    tokenizer = make_tokenizer(open_weights(model_file()).metadata)
    return lambda text: tokenizer.encode(text).ids


@pytest.fixture(scope="session")
def reference() -> Logits:
    """Logits after every token of a sequence; answers are kept."""
    logits = cache(Reference(model_file()).logits)
    return lambda token_ids: logits(tuple(token_ids))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_20_greedy_tokens_are_the_references(
    model: Any, reference: Logits, encode: Callable[[str], list[int]], text: str
) -> None:
    prompt = encode(text)
    tokens = list(Decoder(model).greedy(prompt, 20, NEVER))
    # What the reference finds likeliest after the prompt and after each token that followed: if
    # these are the tokens, it would have written them itself.
    likeliest = reference(prompt + tokens)[len(prompt) - 1 : -1].argmax(axis=1)
    assert tokens == likeliest.tolist()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_logits_agree_with_the_reference_after_every_token(
    model: Any, reference: Logits, encode: Callable[[str], list[int]], text: str
) -> None:
    token_ids = encode(text)
    token_ids += list(Decoder(model).greedy(token_ids, 20, NEVER))
    decoder = Decoder(model)
    logits = [decoder.step([one]) for one in token_ids]
    np.testing.assert_allclose(logits, reference(token_ids), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("parts", [(37,), (36, 1), (1, 36), (5, 2, 1, 20, 9)])
def test_however_a_sequence_is_cut_the_logits_agree(
    model: Any, reference: Logits, encode: Callable[[str], list[int]], parts: tuple[int, ...]
) -> None:
    token_ids = encode("It was the best of times, it was the worst of times, " * 4)[: sum(parts)]
    assert len(token_ids) == sum(parts)
    decoder = Decoder(model)
    expected, end = reference(token_ids), 0
    for part in parts:
        logits = decoder.step(token_ids[end : end + part])
        end += part
        np.testing.assert_allclose(logits, expected[end - 1], rtol=0, atol=TOLERANCE)
    assert len(decoder) == end


@pytest.mark.parametrize("first", [CHUNK + 45, CHUNK - 6])
def test_a_long_sequence_agrees_with_the_reference(
    model: Any, reference: Logits, encode: Callable[[str], list[int]], first: int
) -> None:
    """At once, in several chunks; and in two steps, where what is kept has to move."""
    token_ids = encode("Count: " + " ".join(map(str, range(300))))[: CHUNK + 45]
    expected = reference(token_ids)
    decoder = Decoder(model)
    for part, last in ((token_ids[:first], first), (token_ids[first:], len(token_ids))):
        if part:
            logits = decoder.step(part)
            np.testing.assert_allclose(logits, expected[last - 1], rtol=0, atol=TOLERANCE)
    assert len(decoder) == CHUNK + 45


def test_sequences_of_one_model_do_not_meet(model: Any) -> None:
    alone, one, other = Decoder(model), Decoder(model), Decoder(model)
    for token in (504, 3575, 282):
        expected = alone.step([token])
        found = one.step([token])
        other.step([token + 1])
        np.testing.assert_array_equal(found, expected)


def test_greedy_ends_at_the_stop_token_and_at_the_limit(model: Any) -> None:
    first, second, *_ = Decoder(model).greedy([504, 3575], 4, NEVER)
    assert first != second
    assert list(Decoder(model).greedy([504, 3575], 4, second)) == [first]
    assert list(Decoder(model).greedy([504, 3575], 2, NEVER)) == [first, second]
    assert list(Decoder(model).greedy([504, 3575], 0, NEVER)) == []


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "at least one token"),
        ([[1, 2]], "at least one token"),
        ([1, -1], r"within 0 and 49151, got \[-1\]"),
        ([49152], r"got \[49152\]"),
        ([1] * 8192, "takes 8192 tokens, this would make 8193"),
    ],
)
def test_tokens_that_cannot_be_are_refused_and_change_nothing(
    model: Any, token_ids: Any, message: str
) -> None:
    decoder, untouched = Decoder(model), Decoder(model)
    decoder.step([504])
    untouched.step([504])
    with pytest.raises(ValueError, match=message):
        decoder.step(token_ids)
    assert len(decoder) == 1
    np.testing.assert_array_equal(decoder.step([3575]), untouched.step([3575]))


def test_the_graph_itself_refuses_what_does_not_fit(model: Any) -> None:
    past = [np.empty((3, *MODEL.row), np.float32)] * MODEL.layers
    with pytest.raises(ValueError, match="a step takes at least one token"):
        model(np.empty(0, np.int64), *past)
    with pytest.raises(ValueError, match="index 49152 is out of bounds"):
        model(np.array([49152], np.int64), *past)
    past[7] = past[7][:2]
    with pytest.raises(ValueError, match="past"):
        model(np.array([504], np.int64), *past)


def test_it_knows_the_capital_of_france(model: Any) -> None:
    answer = "".join(Writer(model).answer("What is the capital of France?"))
    assert answer == "The capital of France is Paris."
