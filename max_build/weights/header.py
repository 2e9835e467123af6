"""What a parsed file header says, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from max_build.weights.dtypes import DType

__all__ = ["Entry", "Header"]


class Entry(NamedTuple):
    """Where one tensor lies: `nbytes` bytes at `offset` from the start of the file."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header: every entry lies inside the file, and no two overlap.

    Parameters
    ----------
    format
        The file's format.
    entries
        Tensor name to place, in the header's order.
    metadata
        The file's own remarks: text to text in safetensors, typed values in GGUF.
    data_start
        Where the header ends and the tensors' bytes begin, from the start of the file.
    order
        Byte order of header and data; `>` occurs in GGUF only.
    problems
        Oddities that no reader has to refuse.
    """

    format: Literal["safetensors", "gguf"]
    entries: Mapping[str, Entry]
    metadata: Mapping[str, Any]
    data_start: int
    order: Literal["<", ">"] = "<"
    problems: tuple[str, ...] = field(default=())

    @staticmethod
    def frozen(values: dict[str, Any]) -> Mapping[str, Any]:
        """Return a read-only view of `values`."""
        return MappingProxyType(values)
