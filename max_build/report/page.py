"""The report as one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import resources

from max_build.report import sections
from max_build.report.gather import Report
from max_build.report.history import Noted
from max_build.report.markup import Markup, element, joined
from max_build.report.units import moment, plural, seconds
from max_build.store.amounts import show_size

__all__ = ["page"]


def page(report: Report) -> str:
    """The whole page.

    Its policy lets the one style and the one script run that are written here, and nothing else:
    not even markup that found a way in could run or load anything.
    """
    style = _file("page.css")
    script = _file("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{report.title} · max-build report"),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the report", href="#main", class_="skip"),
        _header(report),
        element("main", list(_sections(report)), id="main"),
        _footer(report),
        element("script", Markup(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _sections(report: Report) -> Iterator[Markup]:
    build = report.build
    yield _tiles(_build_tiles(report, build) if build else _cache_tiles(report))
    if report.notes:
        yield element(
            "aside",
            [element("p", sections.prose(note)) for note in report.notes],
            class_="notes",
            aria_label="Notes",
        )
    if build:
        yield sections.outcomes(build)
        yield from sections.timeline(build)
    yield from sections.artifacts(report)
    yield from sections.kernels(report.kernels)
    yield from sections.savings(report.history)
    yield sections.tiers(report)


def _header(report: Report) -> Markup:
    if report.build:
        past = report.build.past
        iso, shown = moment(past.began)
        told = joined(
            "Build of ", element("time", shown, datetime=iso), " in ", element("code", past.root)
        )
    else:
        iso, shown = moment(report.made)
        place = report.tiers[0].place
        told = joined("As of ", element("time", shown, datetime=iso), ", ", element("code", place))
    toggle = element(
        "button",
        element("span", "Theme: "),
        element("b", "auto"),
        type="button",
        id="theme",
        class_="theme",
    )
    return element(
        "header",
        element("div", element("span", "max-build", class_="brand"), toggle, class_="bar"),
        element("h1", report.title),
        element("p", told, class_="told"),
    )


def _footer(report: Report) -> Markup:
    iso, shown = moment(report.made)
    written = element("time", shown, datetime=iso)
    return element(
        "footer", f"Written by max-build {report.version}".rstrip(), " at ", written, "."
    )


# --- the summary


def _tiles(tiles: Iterable[tuple[str, str, str]]) -> Markup:
    return element(
        "dl",
        [
            element(
                "div",
                element("dt", name),
                element("dd", value, element("small", more) if more else None),
            )
            for name, value, more in tiles
        ],
        class_="tiles",
        aria_label="Summary",
    )


def _build_tiles(report: Report, build: Noted) -> Iterator[tuple[str, str, str]]:
    past, spans = build.past, build.spans
    states = past.states
    hits = states.get("cached", 0)
    tiers = Counter(span.tier for span in spans if span.state == "cached")
    yield "Cached", f"{hits} of {len(spans)}", ", ".join(f"{n} {t}" for t, n in tiers.items())
    made = states.get("compiled", 0) + states.get("uncached", 0)
    unkept = f", {states['uncached']} not kept" if "uncached" in states else ""
    yield "Compiled", str(made), f"{seconds(past.spent)} of compiling{unkept}" if made else ""
    left = states.get("failed", 0) + states.get("missed", 0)
    yield "Failed or missed", str(left), "left without an artifact" if left else ""
    yield "Took", seconds(past.seconds), plural(len({s.unit for s in spans}), "unit")
    yield "Saved now", seconds(past.saved), "compiling not repeated"
    yield (
        "Saved so far",
        seconds(report.totals.seconds_saved),
        f"in {plural(report.totals.builds, 'run')}",
    )


def _cache_tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    totals = report.totals
    hits, misses = sum(totals.hits.values()), sum(totals.misses.values())
    rate = f"{100 * hits / (hits + misses):.0f} %" if hits + misses else "–"
    yield (
        "Artifacts",
        f"{len(report.artifacts):,}",
        plural(len({a.unit for a in report.artifacts}), "unit"),
    )
    yield (
        "Size",
        show_size(sum(a.size for a in report.artifacts)),
        "with what artifacts share counted twice",
    )
    yield "Worth", seconds(sum(a.cost for a in report.artifacts)), "of compiling held here"
    yield "Hit rate", rate, f"{hits:,} hits, {misses:,} misses"
    yield "Saved so far", seconds(totals.seconds_saved), f"in {plural(totals.builds, 'run')}"


def _file(name: str) -> str:
    return resources.files("max_build.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    hashed = hashlib.sha256(text.encode(), usedforsecurity=False).digest()
    return f"sha256-{base64.b64encode(hashed).decode()}"
