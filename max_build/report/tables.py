"""A table that sorts, filters, and folds into cards on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from max_build.report.markup import Child, Markup, element

__all__ = ["Cell", "Column", "table"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and whether it holds numbers."""

    label: str
    numeric: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a cell, and what it sorts by where that is not its text."""

    content: Child
    sort: float | str | None = None


def table(
    name: str,
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    filterable: bool = False,
    anchored: bool = False,
) -> Markup:
    """The table; with `anchored`, row 3 can be linked to as `#row-3`.

    Roles are spelt out because a phone's layout takes the meaning of `table` away.
    """
    head = element(
        "thead",
        element("tr", [_heading(column) for column in columns], role="row"),
        role="rowgroup",
    )
    body = element(
        "tbody",
        [
            element(
                "tr",
                [
                    _cell(column, cell, n)
                    for n, (column, cell) in enumerate(zip(columns, row, strict=True))
                ],
                role="row",
                id=f"row-{position}" if anchored else None,
                tabindex=-1 if anchored else None,
            )
            for position, row in enumerate(rows)
        ],
        role="rowgroup",
    )
    made = element(
        "table",
        element("caption", caption, class_="hidden"),
        head,
        body,
        id=name,
        class_="data",
        role="table",
    )
    return element("div", _search(name, len(rows)) if filterable else None, made, class_="sheet")


def _heading(column: Column) -> Markup:
    button = element("button", column.label, element("i", aria_hidden="true"), type="button")
    return element(
        "th",
        button,
        scope="col",
        role="columnheader",
        aria_sort="none",
        class_="number" if column.numeric else None,
        data_numeric=column.numeric,
    )


def _cell(column: Column, cell: Cell, position: int) -> Markup:
    return element(
        "th" if position == 0 else "td",
        element("span", cell.content),
        role="rowheader" if position == 0 else "cell",
        scope="row" if position == 0 else None,
        class_="number" if column.numeric else None,
        data_label=column.label,
        data_sort=cell.sort,
    )


def _search(name: str, count: int) -> Markup:
    field = element(
        "input",
        type="search",
        placeholder="Filter rows",
        aria_label="Filter rows",
        data_filter=name,
    )
    return element(
        "div",
        field,
        element("output", f"{count:,} rows", data_count=name, aria_live="polite"),
        class_="search",
    )
