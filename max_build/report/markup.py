"""HTML and SVG made of values: text is escaped unless it already is markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

__all__ = ["Child", "Markup", "element", "joined"]

_VOID = frozenset({"br", "col", "input", "link", "meta"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]
"""What an element may hold: markup as it is, text escaped, None as nothing, and rows of them."""


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """One element.

    Parameters
    ----------
    attributes
        `data_key` is written `data-key`, `class_` without its underscore. None and False leave
        the attribute out, True writes it without a value.
    """
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        written = name.rstrip("_").replace("_", "-")
        parts.append(f" {written}" if value is True else f' {written}="{html.escape(str(value))}"')
    parts.append(">")
    if tag in _VOID:
        return Markup("".join(parts))
    return Markup("".join([*parts, joined(*children), f"</{tag}>"]))


def joined(*children: Child) -> Markup:
    """Children one after the other."""
    return Markup("".join(map(_text, children)))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(child)
    if isinstance(child, int | float):
        return str(child)
    return joined(*child)
