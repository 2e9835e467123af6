"""The report as one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from itertools import groupby

from max_build.report import charts
from max_build.report.gather import Kernel, Report, Tier
from max_build.report.history import Noted, Past, Span
from max_build.report.markup import Child, Markup, element, joined
from max_build.report.tables import Cell, Column, table
from max_build.report.units import moment, plural, seconds
from max_build.store.amounts import show_size

__all__ = ["page"]

_STATES = ("cached", "compiled", "uncached", "missed", "failed")
_WORDS = {"uncached": "not kept"}
_BARS = 60
_KERNELS = 500


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
            [element("p", _prose(note)) for note in report.notes],
            class_="notes",
            aria_label="Notes",
        )
    if build:
        yield _outcomes(build)
        yield from _timeline(build)
    yield from _artifacts(report)
    yield from _kernels(report.kernels)
    yield from _savings(report.history)
    yield _tiers(report)


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


# --- one build


def _outcomes(build: Noted) -> Markup:
    states = {s: build.past.states[s] for s in _STATES if build.past.states.get(s)}
    chips = [
        element(
            "button",
            element("span", class_=f"key fill-{state}", aria_hidden="true"),
            f"{count:,} {_WORDS.get(state, state)}",
            type="button",
            aria_pressed="false",
            data_pick=_WORDS.get(state, state),
        )
        for state, count in states.items()
    ]
    columns = (
        Column("Unit"),
        Column("Target"),
        Column("Outcome"),
        Column("Why"),
        Column("Took", numeric=True),
        Column("Compile cost", numeric=True),
        Column("Key"),
    )
    return _section(
        "what",
        "What happened",
        charts.outcomes(states),
        element("div", chips, class_="chips", role="group", aria_label="Show only"),
        table(
            "outcomes",
            "Outcome of every unit for every target",
            columns,
            [_outcome(span) for span in _ordered(build)],
            filterable=True,
            anchored=True,
        ),
    )


def _ordered(build: Noted) -> list[Span]:
    """What needs a look first."""
    rank = {state: n for n, state in enumerate(reversed(_STATES))}
    return sorted(build.spans, key=lambda span: rank.get(span.state, -1))


def _outcome(span: Span) -> tuple[Cell, ...]:
    took = span.end - span.start
    return (
        Cell(element("b", span.unit)),
        Cell(element("code", span.target)),
        Cell(_badge(span.state), _STATES.index(span.state) if span.state in _STATES else 9),
        Cell(_why(span)),
        Cell(seconds(took), took),
        Cell(seconds(span.cost) if span.cost else "–", span.cost),
        Cell(element("code", span.key[:12] or "–", title=span.key or None)),
    )


def _badge(state: str) -> Markup:
    return element("span", _WORDS.get(state, state), class_=f"badge is-{state}")


def _why(span: Span) -> Child:
    always = element("small", "derived every time: ", _prose(span.always)) if span.always else None
    if span.error:
        first, _, rest = span.error.partition("\n")
        if not rest:
            return element("span", _prose(first), class_="error")
        return element(
            "details",
            element("summary", _prose(first), class_="error"),
            element("pre", rest.strip("\n")),
        )
    if span.state == "cached":
        return joined(f"from the {span.tier} tier", always)
    where = element("small", f"compiled on {span.where}") if span.where else None
    return joined(_prose(span.reason or "–"), where, always)


def _timeline(build: Noted) -> Iterator[Markup]:
    worked = [(row, span) for row, span in enumerate(_ordered(build)) if span.lane >= 0]
    rest = len(build.spans) - len(worked)
    without = f"{plural(rest, 'job')} needed no worker." if rest else ""
    if not worked:
        return
    lanes = len({span.lane for _, span in worked})
    busy = sum(span.end - span.start for _, span in worked)
    share = 100 * busy / max(lanes * build.past.seconds, 1e-9)
    states = [state for state in _STATES if any(s.state == state for _, s in worked)]
    yield _section(
        "workers",
        "Workers",
        element(
            "p",
            f"{plural(len(worked), 'job')} on {plural(lanes, 'worker')}, busy for "
            f"{min(share, 100):.0f} % of {seconds(build.past.seconds)}. {without}",
        ),
        charts.timeline(worked, build.past.seconds),
        charts.legend({state: _WORDS.get(state, state) for state in states}),
    )


# --- artifacts and kernels


def _artifacts(report: Report) -> Iterator[Markup]:
    if not report.artifacts:
        return
    used = any(artifact.used for artifact in report.artifacts)
    largest = max(artifact.size for artifact in report.artifacts)
    columns = [
        Column("Unit"),
        Column("Target"),
        Column("Compiler"),
        Column("Size", numeric=True),
        Column("Host code", numeric=True),
        Column("Device code", numeric=True),
        Column("Compile cost", numeric=True),
        *([Column("Last used")] if used else []),
    ]
    rows = []
    for one in report.artifacts:
        cells = [
            Cell(element("b", one.unit)),
            Cell(element("code", one.target)),
            Cell(one.compiler),
            Cell(joined(show_size(one.size), charts.meter(one.size, largest)), one.size),
            Cell(show_size(one.host_code) if one.host_code else "–", one.host_code),
            Cell(show_size(one.device_code) if one.device_code else "–", one.device_code),
            Cell(seconds(one.cost), one.cost),
        ]
        if used:
            iso, shown = moment(one.used)
            cells.append(Cell(element("time", shown, datetime=iso), one.used))
        rows.append(cells)
    yield _section(
        "artifacts",
        "Artifacts",
        table(
            "artifact-table",
            "Size and cost of every artifact",
            columns,
            rows,
            filterable=len(rows) > 8,
        ),
    )


def _kernels(kernels: Sequence[Kernel]) -> Iterator[Markup]:
    if not kernels:
        return
    by_arch = sorted(kernels, key=lambda kernel: kernel.arch)
    groups = [(arch, list(group)) for arch, group in groupby(by_arch, lambda kernel: kernel.arch)]
    short = len(kernels) <= 60
    parts = [
        _architecture(arch, group, opened=short or n == 0) for n, (arch, group) in enumerate(groups)
    ]
    yield _section(
        "kernels",
        "Kernels",
        element(
            "p", f"{plural(len(kernels), 'kernel')} for {plural(len(groups), 'architecture')}."
        ),
        parts,
    )


def _architecture(arch: str, kernels: list[Kernel], *, opened: bool) -> Markup:
    code = sum(kernel.code for kernel in kernels)
    shown = sorted(kernels, key=lambda kernel: -kernel.code)[:_KERNELS]
    largest = max(kernel.code for kernel in kernels)
    columns = (
        Column("Kernel"),
        Column("Unit"),
        Column("Registers", numeric=True),
        Column("Shared", numeric=True),
        Column("Stack", numeric=True),
        Column("Code", numeric=True),
    )
    rows = [
        (
            Cell(_kernel_name(kernel)),
            Cell(kernel.unit),
            Cell(
                joined(str(kernel.registers), charts.meter(kernel.registers, 255)), kernel.registers
            ),
            Cell(show_size(kernel.shared), kernel.shared),
            Cell("unknown" if kernel.stack is None else show_size(kernel.stack), kernel.stack or 0),
            Cell(joined(show_size(kernel.code), charts.meter(kernel.code, largest)), kernel.code),
        )
        for kernel in shown
    ]
    summary = element(
        "summary",
        element("h3", arch),
        element(
            "span",
            f"{plural(len(kernels), 'kernel')} · {show_size(code)} of code · "
            f"at most {max(kernel.registers for kernel in kernels)} registers",
        ),
    )
    more = len(kernels) - len(shown)
    return element(
        "details",
        summary,
        element("p", f"The {len(shown)} largest; {more:,} more are left out.") if more else None,
        table(f"kernels-{arch}", f"Kernels for {arch}", columns, rows, filterable=len(rows) > 8),
        open=opened,
        class_="architecture",
    )


def _kernel_name(kernel: Kernel) -> Markup:
    if kernel.source:
        return joined(element("code", kernel.source), element("small", kernel.name))
    return element("code", kernel.name)


# --- the past, and the tiers


def _savings(history: Sequence[Past]) -> Iterator[Markup]:
    if len(history) < 2:
        return
    shown = history[-_BARS:]
    saved, spent = sum(one.saved for one in shown), sum(one.spent for one in shown)
    columns = (
        Column("Build"),
        Column("Project"),
        Column("Outcomes"),
        Column("Took", numeric=True),
        Column("Saved", numeric=True),
        Column("Compiled", numeric=True),
    )
    rows = []
    for one in reversed(shown):
        iso, when = moment(one.began)
        states = ", ".join(
            f"{one.states[s]} {_WORDS.get(s, s)}" for s in _STATES if s in one.states
        )
        rows.append(
            (
                Cell(element("time", when, datetime=iso), one.began),
                Cell(one.project or one.root),
                Cell(states),
                Cell(seconds(one.seconds), one.seconds),
                Cell(seconds(one.saved), one.saved),
                Cell(seconds(one.spent), one.spent),
            )
        )
    yield _section(
        "savings",
        "Saved over time",
        element(
            "p",
            f"The last {plural(len(shown), 'build')} compiled for {seconds(spent)} and were spared "
            f"{seconds(saved)} of compiling.",
        ),
        charts.savings(shown),
        element(
            "details",
            element("summary", "The same in numbers"),
            table("history", "Builds, newest first", columns, rows),
        ),
    )


def _tiers(report: Report) -> Markup:
    return _section(
        "tiers",
        "Tiers",
        element(
            "p",
            "What this machine's builds saw of each, since ever. ",
            element("code", "max-build doctor"),
            " tries them now.",
        ),
        element("div", [_tier(tier) for tier in report.tiers], class_="cards"),
    )


def _tier(tier: Tier) -> Markup:
    faults = sum(tier.faults.values())
    if not tier.usable:
        health = element("span", "left out", class_="badge is-failed")
    elif faults:
        health = element("span", plural(faults, "fault"), class_="badge is-uncached")
    else:
        health = element("span", "no faults", class_="badge is-cached")
    facts = [
        ("Hits", f"{tier.hits:,}"),
        ("Received", show_size(tier.received)),
        ("Sent", show_size(tier.sent)),
        ("Access", tier.access),
    ]
    if tier.trust:
        facts.append(("Signatures", {"off": "not asked for"}.get(tier.trust, tier.trust)))
    facts.extend((f"Fault: {kind}", f"{count:,}") for kind, count in sorted(tier.faults.items()))
    return element(
        "article",
        element("h3", tier.name, health),
        element("p", element("code", tier.place)),
        element("dl", [element("div", element("dt", n), element("dd", v)) for n, v in facts]),
    )


def _prose(text: str) -> list[Markup]:
    """Text with its `words in backticks` set as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one backtick has no partner
        return [joined(text)]
    return [element("code", part) if n % 2 else joined(part) for n, part in enumerate(parts)]


def _section(name: str, title: str, *children: Child) -> Markup:
    return element("section", element("h2", title, id=name), list(children), aria_labelledby=name)


def _file(name: str) -> str:
    return resources.files("max_build.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    hashed = hashlib.sha256(text.encode(), usedforsecurity=False).digest()
    return f"sha256-{base64.b64encode(hashed).decode()}"
