"""What a build leaves behind for a later report: one summary for good, the last few in full.

Both are memos in the local index, bounded, and nothing but a report reads them: losing them loses
a picture of the past.
"""

from __future__ import annotations

import threading
import time

import msgspec

from max_build import compilers
from max_build.config import Settings
from max_build.outcomes import Build, Event, Mode, Outcome, Reporter
from max_build.pipeline import build
from max_build.store import Cache

__all__ = ["Noted", "Past", "Span", "build_noted", "last_of", "pasts"]

_SUMMARIES = 256
_IN_FULL = 16
_TEXT = 4000
_MADE = ("compiled", "uncached")


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One unit × target of a build, as it went. Times in seconds since the build began.

    Parameters
    ----------
    where
        The host of a farm that compiled it.
    lane
        Which of the concurrent jobs it ran in; -1 where it was looked up without a worker.
    start, end
        When work on it began and ended.
    compiling
        When its compile began; negative where nothing was compiled.
    always
        Why the project's code has to run for it in every build.
    cost
        What compiling the artifact takes, now or whenever it was made.
    """

    unit: str
    target: str
    compiler: str
    state: str
    key: str = ""
    tier: str = ""
    reason: str = ""
    always: str = ""
    error: str = ""
    where: str = ""
    lane: int = -1
    start: float
    end: float
    compiling: float = -1.0
    cost: float = 0.0


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """A build in short: when it began (seconds since 1970), and what came of it.

    `states` counts outcomes; `saved` and `spent` are seconds of compiling that hits made
    unnecessary and that misses took.
    """

    number: int
    began: float
    project: str
    root: str
    mode: str
    seconds: float
    states: dict[str, int]
    saved: float
    spent: float


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """A build in full."""

    past: Past
    spans: tuple[Span, ...]


def build_noted(
    settings: Settings,
    cache: Cache,
    *,
    mode: Mode = "build",
    report: Reporter = lambda _: None,
) -> Build:
    """`pipeline.build`, and note what came of it for `max-build report`."""
    clock = _Clock(report)
    began = time.time()
    result = build(settings, cache, mode=mode, report=clock)
    if result.outcomes:
        _keep(cache, settings, mode, began, result, clock)
    return result


def pasts(cache: Cache) -> tuple[Past, ...]:
    """The builds that this machine's index knows of, oldest first."""
    return _pasts(cache.memo.get("history", "builds"))


def last_of(cache: Cache, settings: Settings) -> Noted | None:
    """The last build of the project, by its directory, else by its name; None if none is noted."""
    known = pasts(cache)[::-1]
    here = [past for past in known if past.root == _text(settings.root)]
    named = [past for past in known if past.project and past.project == settings.project]
    for past in here or named:
        found = _in_full(cache, past)
        if found is not None:
            return found
    return None


class _Clock:
    """A `Reporter` that notes when things happen, and passes them on."""

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self._zero = time.monotonic()
        self._lanes: dict[int, int] = {}
        self._steps: dict[tuple[str, str], dict[str, float]] = {}
        self._lane_of: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        job = (event.unit, event.target)
        # One job is told by one thread only, and a dict's own steps are atomic.
        self._steps.setdefault(job, {})[event.what] = time.monotonic() - self._zero
        if event.what != "done":
            with self._lock:
                self._lane_of[job] = self._lanes.setdefault(threading.get_ident(), len(self._lanes))
        self._report(event)

    def span(self, outcome: Outcome) -> Span:
        """How an outcome came about."""
        job = (outcome.unit.name, str(outcome.target))
        steps = self._steps.get(job, {})
        end = steps.get("done", 0.0)
        began = min(steps.values(), default=0.0)
        record = outcome.record
        user_code = compilers.get(outcome.unit.compiler).runs_user_code
        return Span(
            unit=outcome.unit.name,
            target=str(outcome.target),
            compiler=outcome.unit.compiler,
            state=outcome.state,
            key=outcome.key,
            tier=outcome.tier,
            reason=_text(outcome.reason),
            always=_text(outcome.always) if user_code else "",
            error=_text(str(outcome.error)) if outcome.error else "",
            where=_text(outcome.where),
            lane=self._lane_of.get(job, -1),
            start=round(max(0.0, min(began, end - outcome.seconds)), 4),
            end=round(end, 4),
            compiling=round(steps.get("compiling", -1.0), 4),
            cost=record.seconds if record else 0.0,
        )


def _keep(
    cache: Cache, settings: Settings, mode: Mode, began: float, result: Build, clock: _Clock
) -> None:
    spans = tuple(clock.span(outcome) for outcome in result.outcomes)
    states: dict[str, int] = {}
    for span in spans:
        states[span.state] = states.get(span.state, 0) + 1
    past = Past(
        number=0,
        began=round(began, 3),
        project=settings.project,
        root=_text(settings.root),
        mode=mode,
        seconds=round(result.seconds, 3),
        states=states,
        saved=round(sum(span.cost for span in spans if span.state == "cached"), 3),
        spent=round(sum(span.cost for span in spans if span.state in _MADE), 3),
    )

    def added(old: bytes | None) -> bytes:
        nonlocal past
        known = _pasts(old)
        past = msgspec.structs.replace(past, number=known[-1].number + 1 if known else 1)
        return msgspec.json.encode((*known, past)[-_SUMMARIES:])

    cache.memo.update("history", "builds", added)
    cache.memo.set("history", _slot(past), msgspec.json.encode(Noted(past=past, spans=spans)))


def _slot(past: Past) -> str:
    return f"build {past.number % _IN_FULL}"


def _in_full(cache: Cache, past: Past) -> Noted | None:
    data = cache.memo.get("history", _slot(past))
    try:
        found = msgspec.json.decode(data or b"null", type=Noted | None)
    except msgspec.DecodeError:
        return None
    return found if found is not None and found.past == past else None


def _pasts(data: bytes | None) -> tuple[Past, ...]:
    try:
        return msgspec.json.decode(data or b"[]", type=tuple[Past, ...])
    except msgspec.DecodeError:
        return ()


def _text(text: str) -> str:
    """Text that JSON can hold, cut to 4,000 characters."""
    cut = text if len(text) <= _TEXT else f"{text[:_TEXT]} …"
    return cut.encode(errors="replace").decode()
