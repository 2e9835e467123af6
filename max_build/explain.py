"""Why a unit missed: what changed against the nearest record of it that is known here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from max_build.errors import StoreError
from max_build.key import Components, changes
from max_build.record import Record
from max_build.store import Cache, Miss

__all__ = [
    "Explanation",
    "compare",
    "explain_miss",
    "first_change",
    "graph_diff",
    "ir_of",
    "nearest",
    "told",
]

_SHOWN = 4
_LINES = 24
_WIDTH = 160
_OPERATION = re.compile(r"(?:%[\w#:, %]+ = )?\"?([A-Za-z_]\w*(?:\.\w+)+)")
_NUMBER = re.compile(r"%\d+")
_FAULTS = {
    "altered": "its entry in the cache was altered after it was signed",
    "damaged": "its entry in the cache was damaged",
    "dangling": "its entry in the cache names a blob that is gone",
    "fault": "the cache failed",
    "unsigned": "no key of `public-keys` signed its entry in the cache",
}
_HEADERS = (".h", ".hpp", ".hxx", ".hh", ".cuh", ".inl", ".inc")


@dataclass(frozen=True, slots=True)
class Explanation:
    """The difference between two sets of components.

    Parameters
    ----------
    against
        The earlier record.
    changes
        (component, before, after), as `max_build.key.changes` lists them.
    words
        The same for a reader, one string a change.
    graph
        Lines of the IR that went (`- …`) and came (`+ …`), shortened.
    """

    against: Record
    changes: tuple[tuple[str, str, str], ...]
    words: tuple[str, ...]
    graph: tuple[str, ...] = ()


def explain_miss(
    cache: Cache, unit: str, components: Components, ir: Path | None, miss: Miss, stale: str
) -> tuple[str, Explanation | None]:
    """One line for a miss, and what stands behind it where an earlier record is known.

    Parameters
    ----------
    ir
        File of the IR that was derived just now.
    miss
        What the cache said; a fault of it is the reason, told in full.
    stale
        Why the unit's last recipe does not hold any more, which is what set the change off.
    """
    if miss.reason != "absent":
        return f"{_FAULTS.get(miss.reason, miss.reason)} ({miss.detail})", None
    earlier = nearest(cache.records_of(unit), components)
    if earlier is None:
        return "never compiled before", None
    if earlier.components.target != components.target:
        return f"never compiled for target `{components.target}` before", None
    found = compare(cache, earlier, components, _read(ir))
    more = " …" if len(found.words) > _SHOWN else ""
    words = ", ".join(found.words[:_SHOWN]) + more
    return f"{words} ({stale})" if stale and stale not in words else words, found


def nearest(records: Sequence[Record], components: Components) -> Record | None:
    """The record with the fewest changed components: of the same target if there is one."""
    return min(
        records,
        key=lambda one: (
            one.components.target != components.target,
            len(changes(one.components, components)),
        ),
        default=None,
    )


def compare(cache: Cache, record: Record, components: Components, after: str = "") -> Explanation:
    """What changed from a record to `components`, whose IR is `after` where it has one."""
    found = changes(record.components, components)
    before = ir_of(cache, record)
    graph = ""
    lines: tuple[str, ...] = ()
    if before and after and before != after:
        graph = first_change(before, after)
        lines = tuple(graph_diff(before, after))
    words = dict.fromkeys(told(*one, graph=graph) for one in _grouped(found))
    return Explanation(record, found, tuple(words), lines)


def told(name: str, before: str, after: str, *, graph: str = "") -> str:
    """One changed component, in words."""
    group, _, leaf = name.partition(".")
    if group == "sources":
        if leaf == "ir":
            return f"graph changed: {graph}" if graph else "graph changed"
        return f"`{leaf}` changed"
    if group == "compiler":
        return f"`{leaf}` {_versions(before, after)}"
    if group == "environment":
        return f"environment `{leaf}` {'set' if not before else 'changed' if after else 'unset'}"
    if group == "dependencies":
        from max_build.compilers.includes import SOURCE_ROOT

        what = "header " if leaf.endswith(_HEADERS) else ""
        path = leaf.removeprefix(f"{SOURCE_ROOT}/")
        return f"{what}`{path}` {'added' if not before else 'changed' if after else 'removed'}"
    values = (one.replace("\n", ", ") or "unset" for one in (before, after))
    return f"{name.replace('.', ' ', 1)} {' → '.join(values)}"


def _grouped(found: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """The changes less those that say the same again: parts of one compiler move together."""
    seen: set[str] = set()
    kept = []
    for name, before, after in found:
        if name.startswith("compiler."):
            same = _versions(before, after)
            if same in seen:
                continue
            seen.add(same)
        kept.append((name, before, after))
    return kept


def _versions(before: str, after: str) -> str:
    short = [re.sub(r"\+[0-9a-f]{16}$", "", one) or "absent" for one in (before, after)]
    if short[0] == short[1]:
        return f"{short[0]}: another build of it"
    return f"{short[0]} → {short[1]}"


def first_change(before: str, after: str) -> str:
    """The first operation of `after` that differs, such as "`mo.constant` at op 41"."""
    old, new = before.splitlines(), after.splitlines()
    count = 0
    for position, line in enumerate(new):
        name = _operation(line)
        count += bool(name)
        if position >= len(old) or old[position] != line:
            return f"`{name or line.strip()[:40]}` at op {count}"
    gone = old[len(new)] if len(old) > len(new) else ""
    return f"`{_operation(gone) or gone.strip()[:40]}` is gone from the end"


def graph_diff(before: str, after: str) -> list[str]:
    """The changed lines, the first 24 of them, each cut to 160 characters.

    Values are numbered from the start of a graph, so that one operation more renumbers all that
    follow: the numbers are left out of the comparison.
    """
    old, new = before.splitlines(), after.splitlines()
    plain_old = [_NUMBER.sub("%", line) for line in old]
    plain_new = [_NUMBER.sub("%", line) for line in new]
    matcher = difflib.SequenceMatcher(None, plain_old, plain_new, autojunk=True)
    lines: list[str] = []
    for tag, start, end, other, last in matcher.get_opcodes():
        if tag != "equal":
            lines += [f"- {line.strip()}" for line in old[start:end]]
            lines += [f"+ {line.strip()}" for line in new[other:last]]
    cut = [_cut(line) for line in lines[:_LINES]]
    if len(lines) > _LINES:
        cut.append(f"… {len(lines) - _LINES} lines more")
    return cut


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"


def _operation(line: str) -> str:
    found = _OPERATION.match(line.strip())
    return found[1] if found else ""


def ir_of(cache: Cache, record: Record) -> str:
    """The IR text that a record keeps; empty where it keeps none, or it is gone."""
    blob = record.blob("ir")
    if blob is None:
        return ""
    try:
        return _read(cache.path(blob))
    except StoreError:
        return ""


def _read(path: Path | None) -> str:
    try:
        return path.read_text(errors="replace") if path else ""
    except OSError:
        return ""
