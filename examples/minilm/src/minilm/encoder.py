"""From sentences to embeddings: tokenise, pad, run the compiled graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from minilm.files import model_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Encoder", "Model"]

HIDDEN = 384
MAX_POSITIONS = 512
TRAINED_LENGTH = 256


class Model(Protocol):
    """The compiled graph, as `max_build.load` returns it."""

    def __call__(self, token_ids: Any, mask: Any, /) -> Sequence[Any]:
        """Run on int64 ids and mask, both `[batch, seq]`; outputs have `.to_numpy()`."""


class Encoder:
    """Sentences in, unit vectors out.

    Parameters
    ----------
    model
        The compiled graph; the default loads unit `encoder` of this package by
        `max_build.load`, which never compiles.
    tokenizer
        A `tokenizer.json`; the default is that of the installed model package.
    max_length
        Tokens kept of a sentence, `[CLS]` and `[SEP]` included. The model was trained with 256
        and has positions for 512.

    Raises
    ------
    ValueError
        If `max_length` is outside 3 … 512.
    FileNotFoundError
        If the model package is not installed and no tokenizer was given.
    """

    def __init__(
        self,
        model: Model | None = None,
        *,
        tokenizer: Path | None = None,
        max_length: int = TRAINED_LENGTH,
    ) -> None:
        from tokenizers import Tokenizer

        if not 3 <= max_length <= MAX_POSITIONS:  # two of them are [CLS] and [SEP]
            message = f"`max_length` must be within 3 and {MAX_POSITIONS}, got {max_length}"
            raise ValueError(message)
        self._model = model if model is not None else _load()
        self._tokenizer = Tokenizer.from_file(str(tokenizer or model_file("tokenizer.json")))
        # The file asks for exactly 128 tokens; a batch needs no more than its longest sentence.
        self._tokenizer.enable_truncation(max_length)
        self._tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")

    def encode(self, sentences: Sequence[str], *, batch_size: int = 32) -> NDArray[np.float32]:
        """Embed sentences: float32 `[len(sentences), 384]`, in their order.

        Sentences run in batches of similar length, so that little is spent on padding.

        Raises
        ------
        TypeError
            If `sentences` is one string, whose characters would be embedded one by one.
        ValueError
            If `batch_size` is less than 1.
        """
        import numpy as np

        if isinstance(sentences, str):
            message = "`sentences` must be a sequence of strings, got one string"
            raise TypeError(message)
        if batch_size < 1:
            message = f"`batch_size` must be at least 1, got {batch_size}"
            raise ValueError(message)
        embeddings = np.empty((len(sentences), HIDDEN), np.float32)
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            token_ids, mask = self.tokenize([sentences[i] for i in batch])
            embeddings[batch] = self._model(token_ids, mask)[0].to_numpy()
        return embeddings

    def tokenize(self, sentences: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and mask, both int64 `[len(sentences), longest]`, padded on the right."""
        import numpy as np

        encodings = self._tokenizer.encode_batch(list(sentences))
        token_ids = np.array([encoding.ids for encoding in encodings], np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        return token_ids, mask


def _load() -> Model:
    import max_build

    return max_build.load("minilm", "encoder")
