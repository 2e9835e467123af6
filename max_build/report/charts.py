"""The pictures, as inline SVG in percent of the width, so that they fit any screen unscaled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from max_build.report.history import Past, Span
from max_build.report.markup import Markup, element, joined
from max_build.report.units import clock, seconds

__all__ = ["legend", "meter", "outcomes", "savings", "timeline"]

_LANE = 38
_NAME = 14
_BAR = 14
_AXIS = 22
_PLOT = 150


def outcomes(states: Mapping[str, int]) -> Markup:
    """One bar, shared out among the outcomes. Decoration: the numbers stand beside it."""
    total = sum(states.values())
    left = 0.0
    parts = []
    for state, count in states.items():
        width = 100 * count / total
        parts.append(_rect(left, width, 0, 12, class_=f"fill-{state}"))
        left += width
    return element("svg", parts, class_="share", height=12, aria_hidden="true")


def meter(value: float, full: float) -> Markup:
    """A short bar behind a number. Decoration."""
    share = 100 * value / full if full else 0
    return element(
        "svg",
        _rect(0, max(share, 0.5) if value else 0, 0, 4, class_="fill-meter"),
        class_="meter",
        height=4,
        aria_hidden="true",
    )


def timeline(spans: Sequence[tuple[int, Span]], total: float) -> Markup:
    """Who worked when: one row per concurrent job, one bar per unit × target.

    Parameters
    ----------
    spans
        (row in the table of outcomes, span) of those that a worker had.
    total
        Seconds the build took.
    """
    total = max(total, max((span.end for _, span in spans), default=0.0), 1e-3)
    lanes = 1 + max((span.lane for _, span in spans), default=0)
    height = lanes * _LANE + _AXIS
    parts: list[Markup] = []
    ticks = _ticks(total, 4)
    for value in ticks:
        at = f"{100 * value / total:.3f}%"
        anchor = "start" if value == 0 else "end" if value > 0.95 * total else "middle"
        parts.append(
            element("line", x1=at, x2=at, y1=0, y2=lanes * _LANE, class_="grid", aria_hidden="true")
        )
        parts.append(
            element(
                "text",
                clock(value),
                x=at,
                y=height - 6,
                text_anchor=anchor,
                class_="axis",
                aria_hidden="true",
            )
        )
    following: dict[int, float] = {}
    bars = []
    for row, span in sorted(spans, key=lambda one: one[1].start, reverse=True):
        bars.append(_bar(row, span, total, following.get(span.lane, total)))
        following[span.lane] = span.start
    parts.extend(reversed(bars))
    return element(
        "svg",
        element("title", f"{len(spans)} jobs on {lanes} workers in {seconds(total)}"),
        parts,
        class_="timeline",
        height=height,
        role="group",
    )


def _bar(row: int, span: Span, total: float, following: float) -> Markup:
    """A link to the span's row: pale while it is derived or waits, solid while it compiles."""
    left, width = _place(span.start, span.end, total)
    _, room = _place(span.start, max(span.end, following), total)
    name = f"{span.unit} × {span.target}"
    told = f"{name}: {span.state}, from {clock(span.start)} to {clock(span.end)}"
    parts = [
        # A nested svg clips the name where the next bar begins.
        element(
            "svg",
            element("text", name, x=0, y=_NAME - 3, class_="bar-name"),
            x=f"{left:.3f}%",
            y=0,
            width=f"{max(room - 0.5, 0):.3f}%",
            height=_NAME,
        )
    ]
    began = span.compiling if span.compiling >= 0 else span.end
    before = width * min(max((began - span.start) / max(span.end - span.start, 1e-9), 0.0), 1.0)
    if before:
        parts.append(_rect(left, before, _NAME, _BAR, class_=f"fill-{span.state} before"))
    if width > before:
        parts.append(_rect(left + before, width - before, _NAME, _BAR, class_=f"fill-{span.state}"))
    lane = element("svg", parts, y=span.lane * _LANE + 4, height=_NAME + _BAR)
    return element("a", element("title", told), lane, href=f"#row-{row}", aria_label=told)


def savings(history: Sequence[Past]) -> Markup:
    """Per build: seconds saved upwards, seconds compiled downwards, on one scale."""
    above = max(one.saved for one in history)
    below = max(one.spent for one in history)
    scale = _PLOT / ((above + below) or 1.0)
    step = 100 / max(len(history), 12)
    zero = 16 + round(above * scale)
    parts = [
        element("line", x1="0", x2="100%", y1=zero, y2=zero, class_="zero", aria_hidden="true")
    ]
    for position, one in enumerate(history):
        left, width = position * step + 0.1 * step, 0.8 * step
        up, down = one.saved * scale, one.spent * scale
        parts.append(
            element(
                "g",
                element("title", f"{seconds(one.saved)} saved, {seconds(one.spent)} compiled"),
                _rect(left, width, zero - up, up, class_="fill-cached") if up else None,
                _rect(left, width, zero, down, class_="fill-compiled") if down else None,
            )
        )
    return element(
        "svg",
        element("title", "Seconds saved and seconds compiled, build by build"),
        parts,
        element("text", f"↑ saved, at most {seconds(above)}", x=0, y=11, class_="axis"),
        element("text", f"↓ compiled, at most {seconds(below)}", x=0, y=_PLOT + 32, class_="axis"),
        class_="savings",
        height=_PLOT + 38,
        role="img",
    )


def _place(start: float, end: float, total: float) -> tuple[float, float]:
    left = min(100 * start / total, 99.5)
    return left, max(min(100 * (end - start) / total, 100 - left), 0.4)


def _rect(left: float, width: float, y: float, height: float, *, class_: str) -> Markup:
    return element(
        "rect",
        x=f"{left:.3f}%",
        y=f"{y:.1f}",
        width=f"{width:.3f}%",
        height=f"{height:.1f}",
        class_=class_,
    )


def _ticks(total: float, count: int) -> list[float]:
    """Round values from 0 to `total`, about `count` of them."""
    raw = total / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    return list(itertools.takewhile(lambda v: v <= total, (step * i for i in range(20))))


def legend(states: Mapping[str, str]) -> Markup:
    """What the colours of the timeline mean: state → word."""
    keys = [
        element("li", element("span", class_=f"key fill-{state}"), word)
        for state, word in states.items()
    ]
    pale = element("li", element("span", class_="key fill-neutral before"), "deriving or waiting")
    return element("ul", joined(keys), pale, class_="legend")
