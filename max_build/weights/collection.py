"""The tensors of one model, from one file or many, by name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from max_build.weights.plan import ranges
from max_build.weights.stream import Streamed
from max_build.weights.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from max_build.weights.header import Header
    from max_build.weights.pages import File

__all__ = ["Shard", "Weights"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One open file and what its header says."""

    file: File
    header: Header


class Weights(Mapping[str, Tensor]):
    """Tensor name to `Tensor`, in file order.

    Parameters
    ----------
    shards
        The open files.
    places
        Number of the shard that holds each tensor; None if there is one shard and it holds all.
    problems
        Oddities that no reader has to refuse, one a line.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        places: Mapping[str, int] | None = None,
        problems: Iterable[str] = (),
    ) -> None:
        self.shards = tuple(shards)
        self._places = places
        self.problems: tuple[str, ...] = (
            *problems,
            *(f"`{s.file.path}`: {text}" for s in shards for text in s.header.problems),
        )
        self._names: Mapping[str, object] = (
            self.shards[0].header.entries if places is None else places
        )

    def __getitem__(self, name: str) -> Tensor:
        places = self._places
        shard = self.shards[0 if places is None else places[name]]
        return Tensor(name, shard.header.entries[name], shard.file, shard.header.order)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        files = ", ".join(shard.file.path for shard in self.shards)
        return f"<Weights of {len(self)} tensors in {files}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file.

        Raises
        ------
        WeightsError
            If an array or buffer of one is still in use.
        """
        for shard in self.shards:
            shard.file.close()

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files."""
        return tuple(shard.file.path for shard in self.shards)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The first file's metadata: that of a split set is complete only there."""
        return self.shards[0].header.metadata

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.values())

    def prefetch(
        self,
        names: Iterable[str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Streamed:
        """Make tensors resident, so that first use does not fault page by page.

        Parameters
        ----------
        names
            Which; all of them if None.
        progress
            Called with the bytes done and the bytes in all.

        Raises
        ------
        WeightsError
            If a file can no longer be read or was changed.
        """
        if names is None and self._places is None:
            shard = self.shards[0]
            start = shard.header.data_start
            # A file without tensors may end before the padding that would lead to them.
            wanted = [(shard.file, start, max(0, shard.file.size - start))]
        else:
            tensors = self.values() if names is None else [self[name] for name in names]
            wanted = ranges(tensors)
        total = sum(nbytes for _, _, nbytes in wanted)
        done = 0

        def step(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        begun = time.perf_counter()
        for file, offset, nbytes in wanted:
            file.prefetch(offset, nbytes, step)
        return Streamed(total, time.perf_counter() - begun)
