from __future__ import annotations

import io
import os
import pty
import re

import pytest

from max_build.cli.progress import Progress, colours, told
from max_build.config import Unit
from max_build.errors import CompileError
from max_build.outcomes import Build, Event, Outcome, summary
from max_build.target import Target

UNIT = Unit(name="encoder", kind="graph", compiler="max", targets=("cpu",), host="", declared={})
COMPILED = Outcome(UNIT, Target("cpu"), "compiled", reason="graph changed", seconds=61.23)
FAILED = Outcome(UNIT, Target("cpu"), "failed", error=CompileError("no", hint="try"), seconds=0.5)
EVENTS = (
    Event("deriving", "encoder", "cpu"),
    Event("compiling", "encoder", "cpu", "graph changed", 64.0),
    Event("done", "encoder", "cpu", outcome=COMPILED),
)


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        for event in EVENTS:
            progress(event)
    assert stream.getvalue().splitlines() == [
        "`encoder` × `cpu` compiling (graph changed, last time 64.0 s)",
        "`encoder` × `cpu` compiled in 61.2 s: graph changed",
    ]


def test_a_live_line_with_its_clock_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        with Progress(stream) as progress:
            progress(EVENTS[1])
            text = ""
            while text.count("compiling") < 4:  # its clock goes on without any event
                text += os.read(ours, 1 << 16).decode()
            progress(EVENTS[2])
        stream.write("end")
        stream.flush()
        while not text.endswith("end"):
            text += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert re.search("`encoder` × `cpu` compiling [0-9]+ s of about 64 s", text)
    assert "\x1b[1A\x1b[J" in text, "the live line is drawn over"
    assert "\x1b[36m`encoder` × `cpu` compiled in 61.2 s: graph changed\x1b[0m" in text
    after = text.rpartition("\x1b[0m")[2]
    assert "compiling" not in after, "nothing of the live line is left"


def test_colour_follows_the_conventions() -> None:
    stream = io.StringIO()
    assert not colours(stream, {})
    assert colours(stream, {"FORCE_COLOR": "1"})
    assert not colours(stream, {"FORCE_COLOR": "1", "NO_COLOR": "1"})
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert colours(terminal, {"TERM": "xterm"})
        assert not colours(terminal, {"TERM": "dumb"})
        assert colours(terminal, {"TERM": "dumb", "FORCE_COLOR": "1"})
    os.close(ours)


def test_every_state_is_told_in_one_line() -> None:
    assert told(FAILED) == "`encoder` × `cpu` failed after 500 ms: no\n\nhint: try"
    missed = Outcome(UNIT, Target("cpu"), "missed", reason="graph changed")
    assert told(missed) == "`encoder` × `cpu` missed: graph changed"
    cached = Outcome(UNIT, Target("cpu"), "cached", tier="local", seconds=0.004)
    assert told(cached) == "`encoder` × `cpu` cached (local) in 4 ms"
    held = Outcome(UNIT, Target("cpu"), "uncached", reason="a computed include", seconds=1.0)
    assert told(held) == "`encoder` × `cpu` compiled in 1.0 s, not kept: a computed include"


def test_a_summary_counts_artifacts_where_units_have_different_targets() -> None:
    def outcome(name: str, target: str) -> Outcome:
        unit = Unit(
            name=name, kind="graph", compiler="max", targets=(target,), host="", declared={}
        )
        return Outcome(unit, Target(target), "cached")

    same = Build((outcome("a", "cpu"), outcome("b", "cpu")), 2.0)
    assert summary(same) == "2 units × 1 target: 2 cached in 2.0 s"
    other = Build((outcome("a", "cpu"), outcome("b", "sm_80")), 2.0)
    assert summary(other) == "2 artifacts of 2 units: 2 cached in 2.0 s"


def test_a_failed_compilers_log_is_shown() -> None:
    stream = io.StringIO()
    error = CompileError("no")
    error.add_note("kernel.cu(3): error\nmore")
    with Progress(stream) as progress:
        progress(
            Event(
                "done",
                "encoder",
                "cpu",
                outcome=Outcome(UNIT, Target("cpu"), "failed", error=error),
            )
        )
    assert "  kernel.cu(3): error\n  more" in stream.getvalue()
