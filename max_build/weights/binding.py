"""Fit a file's tensors to the weights a graph declares.

The graph names every weight; the file must have each under that name, type and shape, unless
the project says how they differ. Nothing is guessed, and all mismatches are told at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from max_build.errors import WeightsError
from max_build.weights.dtypes import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from max_build.weights.tensor import Tensor

__all__ = ["Bound", "Declared", "bind"]


class Declared(Protocol):
    """A weight as a graph declares it."""

    @property
    def name(self) -> str:
        """The graph's name for it."""

    @property
    def dtype(self) -> str:
        """Element type by MAX's name, `float32`."""

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Dimensions, outermost first."""


class Bound(dict[str, "Tensor"]):
    """Graph name to tensor, in the signature's order.

    Attributes
    ----------
    unused
        Tensors of the file that no weight of the graph took, sorted.
    """

    unused: tuple[str, ...] = ()


def bind(
    signature: Sequence[Declared],
    weights: Mapping[str, Tensor],
    *,
    rename: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
    transpose: Sequence[str] = (),
    cast: Mapping[str, str] | None = None,
    quantised: Mapping[str, str] | None = None,
) -> Bound:
    r"""Return the tensor for each weight of `signature`.

    Parameters
    ----------
    signature
        What the graph declares.
    weights
        What the file has.
    rename
        Rules from the file's names to the graph's, tried in order; the first that applies
        wins. A key that starts with `^` is a regular expression, its value a replacement with
        `\1` for captures; any other key is a prefix: `{"model." = ""}`.
    tied
        Graph name to the graph name whose tensor it shares: `{"lm_head.weight" =
        "embed.weight"}`. Used only where the file has no tensor of that name of its own.
    transpose
        Patterns (`*`, `?`) of graph names whose last two dimensions the file swaps.
    cast
        Pattern of graph names to the type they are converted to, on the host, when read:
        `float32`, `float16`, … and from quantised types too. The first match wins.
    quantised
        Pattern of graph names to the type of the blocks whose bytes the graph computes with:
        `q4_k`. Needed for each quantised tensor that is taken as `uint8`, since types of
        different meaning have blocks of one size. The first match wins.

    Raises
    ------
    WeightsError
        That lists every weight that is missing (with the closest names), of another type or
        of another shape, and every rule that is wrong or leads two tensors to one name.
    """
    problems: list[str] = []
    names = _renamed(weights, rename or {}, problems)
    tied, cast, quantised = tied or {}, cast or {}, quantised or {}
    declared = {item.name for item in signature}
    problems += _unknown_rules(declared, tied, transpose, cast, quantised)
    transposed, casts = _matcher(dict.fromkeys(transpose, "")), _matcher(cast)
    blocks = _matcher(quantised)
    bound = Bound()
    used: set[str] = set()
    for item in signature:
        source = names.get(item.name)
        if source is None and item.name in tied:
            source = names.get(tied[item.name])
        if source is None:
            problems.append(_missing(item, names, tied.get(item.name)))
            continue
        used.add(source)
        tensor = weights[source]
        try:
            tensor = _converted(tensor, casts(item.name), swap=transposed(item.name) is not None)
        except ValueError as error:
            problems.append(f"{item.name!r}: {error}")
            continue
        if problem := _mismatch(item, tensor, blocks(item.name)):
            problems.append(problem)
        else:
            bound[item.name] = tensor
    if problems:
        files = ", ".join(f"`{path}`" for path in _files(weights))
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        listed = "\n".join(f"  {problem}" for problem in problems)
        message = f"weights {files} do not fit the graph, {count}:\n{listed}"
        hint = "state renames, ties, casts and quantised types in the project's settings"
        raise WeightsError(message, hint=hint)
    bound.unused = tuple(sorted(weights.keys() - used))
    return bound


def _files(weights: Mapping[str, Tensor]) -> Iterable[str]:
    return getattr(weights, "files", None) or dict.fromkeys(t.path for t in weights.values())


def _renamed(
    weights: Mapping[str, Tensor], rules: Mapping[str, str], problems: list[str]
) -> dict[str, str]:
    """Return the graph's name for each of the file's, mapped to the file's."""
    if not rules:
        return {name: name for name in weights}
    compiled: list[Callable[[str], str | None]] = []
    for key, value in rules.items():
        if key.startswith("^"):
            try:
                pattern = re.compile(key)
                pattern.sub(value, "")
            except (re.error, IndexError) as error:
                problems.append(f"rename rule {key!r} = {value!r} is wrong: {error}")
                continue
            compiled.append(
                lambda name, p=pattern, v=value: p.sub(v, name, count=1) if p.search(name) else None  # type: ignore[misc]
            )
        else:
            compiled.append(
                lambda name, k=key, v=value: v + name[len(k) :] if name.startswith(k) else None  # type: ignore[misc]
            )
    found: dict[str, str] = {}
    for name in weights:
        new = next((new for rule in compiled if (new := rule(name)) is not None), name)
        if (other := found.setdefault(new, name)) != name:
            problems.append(f"rename rules lead both {other!r} and {name!r} to {new!r}")
    return found


def _unknown_rules(
    declared: set[str],
    tied: Mapping[str, str],
    transpose: Sequence[str],
    cast: Mapping[str, str],
    quantised: Mapping[str, str],
) -> list[str]:
    problems = [
        f"`tied` names {name!r}, which the graph does not declare{_closest(name, declared)}"
        for name in tied
        if name not in declared
    ]
    problems += [
        f"`quantised` rule {key!r} = {value!r} names no type{_closest(value.lower(), BY_NAME)}"
        for key, value in quantised.items()
        if value not in BY_NAME
    ]
    for option, patterns in (("transpose", transpose), ("cast", cast), ("quantised", quantised)):
        for pattern in patterns:
            match = _matcher({pattern: ""})
            if not any(match(name) is not None for name in declared):
                problems.append(f"`{option}` pattern {pattern!r} matches no weight of the graph")
    return problems


def _matcher(patterns: Mapping[str, str]) -> Callable[[str], str | None]:
    """Return a function from a name to the value of the first pattern it matches, or None."""
    if not patterns:
        return lambda _: None
    from fnmatch import translate

    compiled = [(re.compile(translate(key)).match, value) for key, value in patterns.items()]
    return lambda name: next((value for match, value in compiled if match(name)), None)


def _missing(item: Declared, names: Mapping[str, str], tie: str | None) -> str:
    shared = f", nor is {tie!r}, to which it is tied" if tie else ""
    return f"{item.name!r} is not in the file{shared}{_closest(item.name, names)}"


def _converted(tensor: Tensor, dtype: str | None, *, swap: bool) -> Tensor:
    """Return `tensor` as the project wants it; itself where it is so already.

    Raises
    ------
    ValueError
        If it cannot be.
    """
    if dtype == tensor.dtype and tensor.is_native:
        dtype = None
    if dtype is None and not swap:
        return tensor
    from max_build.weights.convert import Converted, decodes

    if swap and len(tensor.shape) < 2:
        message = f"nothing to transpose in {_of(tensor)}"
        raise ValueError(message)
    if dtype is None and tensor.type.packed:
        message = f"cannot transpose the blocks of {_of(tensor)} without a cast"
        raise ValueError(message)
    if dtype is not None and not (dtype in BY_NAME and BY_NAME[dtype].native):
        message = f"cannot cast to {dtype!r}, which NumPy does not have"
        raise ValueError(message)
    if dtype is not None and tensor.type.is_complex and not BY_NAME[dtype].is_complex:
        message = f"cannot cast to {dtype!r} without the imaginary part of {_of(tensor)}"
        raise ValueError(message)
    if dtype is not None and not decodes(tensor):
        message = f"cannot cast from {_of(tensor)}: there is no decoder"
        raise ValueError(message)
    return Converted(tensor, dtype=dtype, transpose=swap)


def _closest(name: str, names: Iterable[str]) -> str:
    """Return `; closest are …`, or nothing if nothing is near."""
    from difflib import get_close_matches

    candidates = list(names)
    # Quadratic work per pair: of very many names only those that end alike are compared.
    if len(candidates) > 2000:
        tail = name.rsplit(".", 2)[-2:]
        candidates = [other for other in candidates if other.endswith(".".join(tail))][:2000]
    found = get_close_matches(name, candidates, n=3, cutoff=0.6)
    return f"; closest are {', '.join(map(repr, found))}" if found else ""


def _mismatch(item: Declared, tensor: Tensor, blocks: str | None) -> str:
    """Return what keeps `tensor` from being the declared weight, or nothing.

    `blocks` is the type that a rule says the declared bytes have.
    """
    shape = tuple(item.shape)
    # Quantised weights are declared as the bytes of their blocks.
    raw = tensor.type.packed and (item.dtype, shape) == ("uint8", tensor.raw_shape)
    if not raw and (item.dtype, shape) != (tensor.dtype, tensor.shape):
        expected = f"the graph declares {item.dtype} {list(shape)}"
        return f"{item.name!r}: {expected}, the file has {_of(tensor)}"
    # Bytes of q4_0 fit wherever those of q4_k do: only the project knows what the graph decodes.
    if raw and blocks is None:
        rule = f'quantised = {{ "{item.name}" = "{tensor.dtype}" }}'
        return (
            f"{item.name!r}: the graph declares bytes, the file has {_of(tensor)}; "
            f"if it computes with {tensor.dtype} blocks, say so: `{rule}`"
        )
    if item.dtype == "uint8" and blocks is not None and blocks != tensor.dtype:
        expected = f"the graph computes with bytes of {blocks} by rule of `quantised`"
        return f"{item.name!r}: {expected}, the file has {_of(tensor)}"
    if not tensor.is_native:
        return f"{item.name!r}: the file's byte order is not this machine's"
    return ""


def _of(tensor: Tensor) -> str:
    stored = f" (bytes {list(tensor.raw_shape)})" if tensor.type.packed else ""
    return f"{tensor.dtype} {list(tensor.shape)}{stored} as {tensor.name!r}"
