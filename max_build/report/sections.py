"""The parts of the page, one function each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from max_build.outcomes import STATES
from max_build.report import charts
from max_build.report.gather import Kernel, Report, Tier
from max_build.report.history import Noted, Past, Span
from max_build.report.markup import Child, Markup, element, joined
from max_build.report.tables import Cell, Column, table
from max_build.report.units import moment, plural, seconds
from max_build.store.amounts import show_size

__all__ = ["artifacts", "kernels", "outcomes", "prose", "savings", "tiers", "timeline"]

_WORDS = {"uncached": "not kept"}
_BARS = 60
_KERNELS = 500


def outcomes(build: Noted) -> Markup:
    """What became of every unit for every target, what needs a look first."""
    states: dict[str, int] = {s: build.past.states[s] for s in STATES if build.past.states.get(s)}
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
    rank: dict[str, int] = {state: n for n, state in enumerate(reversed(STATES))}
    return sorted(build.spans, key=lambda span: rank.get(span.state, -1))


def _outcome(span: Span) -> tuple[Cell, ...]:
    took = span.end - span.start
    return (
        Cell(element("b", span.unit)),
        Cell(element("code", span.target)),
        Cell(_badge(span.state), STATES.index(span.state) if span.state in STATES else 9),
        Cell(_why(span)),
        Cell(seconds(took), took),
        Cell(seconds(span.cost) if span.cost else "–", span.cost),
        Cell(element("code", span.key[:12] or "–", title=span.key or None)),
    )


def _badge(state: str) -> Markup:
    return element("span", _WORDS.get(state, state), class_=f"badge is-{state}")


def _why(span: Span) -> Child:
    always = element("small", "derived every time: ", prose(span.always)) if span.always else None
    if span.error:
        first, _, rest = span.error.partition("\n")
        if not rest:
            return element("span", prose(first), class_="error")
        return element(
            "details",
            element("summary", prose(first), class_="error"),
            element("pre", rest.strip("\n")),
        )
    if span.state == "cached":
        return joined(f"from the {span.tier} tier", always)
    where = element("small", f"compiled on {span.where}") if span.where else None
    return joined(prose(span.reason or "–"), where, always)


def timeline(build: Noted) -> Iterator[Markup]:
    """Who worked when; nothing where nobody had to."""
    worked = [(row, span) for row, span in enumerate(_ordered(build)) if span.lane >= 0]
    rest = len(build.spans) - len(worked)
    without = f"{plural(rest, 'job')} needed no worker." if rest else ""
    if not worked:
        return
    lanes = len({span.lane for _, span in worked})
    busy = sum(span.end - span.start for _, span in worked)
    share = 100 * busy / max(lanes * build.past.seconds, 1e-9)
    states = [state for state in STATES if any(s.state == state for _, s in worked)]
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


def artifacts(report: Report) -> Iterator[Markup]:
    """Sizes and costs."""
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


def kernels(found: Sequence[Kernel]) -> Iterator[Markup]:
    """The kernels, by architecture."""
    if not found:
        return
    by_arch = sorted(found, key=lambda kernel: kernel.arch)
    groups = [(arch, list(group)) for arch, group in groupby(by_arch, lambda kernel: kernel.arch)]
    short = len(found) <= 60
    parts = [
        _architecture(arch, group, opened=short or n == 0) for n, (arch, group) in enumerate(groups)
    ]
    yield _section(
        "kernels",
        "Kernels",
        element("p", f"{plural(len(found), 'kernel')} for {plural(len(groups), 'architecture')}."),
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


def savings(history: Sequence[Past]) -> Iterator[Markup]:
    """Seconds saved and spent, build by build; nothing for a single one."""
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
        states = ", ".join(f"{one.states[s]} {_WORDS.get(s, s)}" for s in STATES if s in one.states)
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


def tiers(report: Report) -> Markup:
    """The places of the cache."""
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


def prose(text: str) -> list[Markup]:
    """Text with its `words in backticks` set as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one backtick has no partner
        return [joined(text)]
    return [element("code", part) if n % 2 else joined(part) for n, part in enumerate(parts)]


def _section(name: str, title: str, *children: Child) -> Markup:
    return element("section", element("h2", title, id=name), list(children), aria_labelledby=name)
