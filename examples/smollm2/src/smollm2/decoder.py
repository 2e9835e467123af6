"""The compiled graph, and what it has to be told of the tokens so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from smollm2.model import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Decoder", "Model"]

# Tokens that run at once: enough to use the processor well, few enough that the scores of a long
# prompt, heads × tokens × all tokens, stay small.
CHUNK = 256


class Model(Protocol):
    """The compiled graph, as `max_build.load` returns it."""

    def __call__(self, token_ids: Any, /, *past: Any) -> Sequence[Any]:
        """Run on int64 ids and the past of each layer; see `smollm2.graph.build`."""


class Decoder:
    """One sequence of tokens, of which keys and values are kept.

    Parameters
    ----------
    model
        The compiled graph, which may serve several decoders.
    """

    def __init__(self, model: Model) -> None:
        import numpy as np

        self._model = model
        self._length = 0
        self._past = np.empty((MODEL.layers, 0, *MODEL.row), np.float32)

    def __len__(self) -> int:
        """Tokens so far."""
        return self._length

    def step(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens; logits for the one after them, `[vocabulary]`.

        Raises
        ------
        ValueError
            If there are none, one is not in the vocabulary, or the sequence outgrows the context
            of the model. The sequence is then what it was.
        """
        import numpy as np

        new = np.array(token_ids, np.int64)
        self._check(new)
        self._reserve(self._length + len(new))
        length = self._length
        for start in range(0, len(new), CHUNK):
            chunk = new[start : start + CHUNK]
            logits, *rows = self._model(chunk, *(past[:length] for past in self._past))
            for past, row in zip(self._past, rows, strict=True):
                past[length : length + len(chunk)] = row.to_numpy()
            length += len(chunk)
        self._length = length
        found: NDArray[np.float32] = logits.to_numpy()
        return found

    def greedy(self, prompt: Sequence[int], limit: int, stop: int) -> Iterator[int]:
        """Append the prompt, then the likeliest token again and again.

        Ends before the token `stop`, after `limit` tokens, or when the context is full.
        """
        new = prompt
        for _ in range(limit):
            token = int(self.step(new).argmax())
            if token == stop:
                return
            yield token
            if self._length == MODEL.context:
                return
            new = [token]

    def _reserve(self, length: int) -> None:
        """Make room for `length` tokens of 46 KB; by doubling, so that little is copied."""
        import numpy as np

        room = self._past.shape[1]
        if length > room:
            room = min(max(length, 2 * room, CHUNK), MODEL.context)
            past = np.empty((MODEL.layers, room, *MODEL.row), np.float32)
            past[:, : self._length] = self._past[:, : self._length]
            self._past = past

    def _check(self, new: NDArray[np.int64]) -> None:
        if new.ndim != 1 or not new.size:
            message = f"a step takes at least one token, got ids of shape {new.shape}"
            raise ValueError(message)
        # A negative id would count from the vocabulary's end.
        if new.min() < 0 or new.max() >= MODEL.vocabulary:
            wrong = [int(one) for one in new if not 0 <= one < MODEL.vocabulary]
            message = f"token ids must be within 0 and {MODEL.vocabulary - 1}, got {wrong[:5]}"
            raise ValueError(message)
        if (total := self._length + len(new)) > MODEL.context:
            message = f"the model takes {MODEL.context} tokens, this would make {total}"
            raise ValueError(message)
