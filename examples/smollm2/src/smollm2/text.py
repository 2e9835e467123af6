"""Text to tokens and back, by the vocabulary and the chat template in a GGUF file's metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenizers import Tokenizer

__all__ = ["chat_text", "make_tokenizer"]

CONTROL = 3  # among `tokenizer.ggml.token_type`: a token that no text is made of


def make_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Make the byte-level BPE tokenizer that the metadata describe.

    The type `smollm` of pre-tokenizer is llama.cpp's: every digit stands alone, and the rest is
    split as for GPT-2. The vocabulary has no token for 21 of the 256 bytes, which are control
    characters and what UTF-8 uses for rare planes or not at all; such a byte is dropped.

    Raises
    ------
    ValueError
        If they describe another kind of tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    for key, expected in (("model", "gpt2"), ("pre", "smollm")):
        if (found := metadata.get(f"tokenizer.ggml.{key}")) != expected:
            message = f"`tokenizer.ggml.{key}` must be {expected!r}, is {found!r}"
            raise ValueError(message)
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    return tokenizer


def chat_text(metadata: Mapping[str, Any], messages: Sequence[Mapping[str, str]]) -> str:
    """Lay out a conversation by the file's template, up to where the model is to answer.

    Parameters
    ----------
    metadata
        Of the GGUF file.
    messages
        Each with a `role`, which is `system`, `user` or `assistant`, and its `content`.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # A template is a program that came with the weights.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(metadata["tokenizer.chat_template"])
    return template.render(messages=messages, add_generation_prompt=True)
