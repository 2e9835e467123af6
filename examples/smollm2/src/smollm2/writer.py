"""From text to what comes after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smollm2.decoder import Decoder, Model
from smollm2.files import model_file
from smollm2.model import MODEL
from smollm2.text import chat_text, make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Writer"]


class Writer:
    """Continues text and answers questions, always with the likeliest token.

    Parameters
    ----------
    model
        The compiled graph; the default loads unit `decoder` of this package by
        `max_build.load`, which never compiles.
    weights
        A GGUF file of SmolLM2-135M, whose vocabulary and template are used as well; the default is
        that of the installed model package.

    Raises
    ------
    ValueError
        If the file is of another model.
    FileNotFoundError
        If the model package is not installed and no file was given.
    """

    def __init__(self, model: Model | None = None, *, weights: Path | None = None) -> None:
        from max_build import open_weights

        weights = weights or model_file()
        self._metadata = open_weights(weights).metadata
        MODEL.check(self._metadata)
        self._stop: int = self._metadata["tokenizer.ggml.eos_token_id"]
        self.tokenizer = make_tokenizer(self._metadata)
        self._model = model if model is not None else _load(weights)

    def complete(self, text: str, *, limit: int = 64) -> Iterator[str]:
        """Go on from `text`, by at most `limit` tokens: a piece of text for each, as it is found.

        A token may end inside a character. Its piece is then empty, and a later one has the whole.

        Raises
        ------
        ValueError
            If `text` has no token, or more than the model takes.
        """
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        decoder = Decoder(self._model)
        for token in decoder.greedy(self.tokenizer.encode(text).ids, limit, self._stop):
            yield stream.step(self.tokenizer, token) or ""

    def answer(self, question: str, *, limit: int = 256) -> Iterator[str]:
        """Answer one message of a user, as `complete` does."""
        message = {"role": "user", "content": question}
        return self.complete(chat_text(self._metadata, [message]), limit=limit)


def _load(weights: Path) -> Model:
    import max_build

    return max_build.load("smollm2", "decoder", weights=weights)
