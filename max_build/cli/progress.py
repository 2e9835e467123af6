"""Progress of a build: a live line per compiling unit on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Self, TextIO

from max_build.outcomes import Event, Outcome

__all__ = ["Progress", "colours", "told"]

_INTERVAL = 0.2
_COLOURS = {"cached": "32", "compiled": "36", "uncached": "33", "missed": "33", "failed": "31"}


def colours(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to colour: `NO_COLOR` says no, `FORCE_COLOR` yes, else a terminal that can."""
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or _is_terminal(stream, environ)


def _is_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and environ.get("TERM") != "dumb"


def told(outcome: Outcome) -> str:
    """One finished job in one line, without colour."""
    name = f"`{outcome.unit.name}` × `{outcome.target}`"
    seconds = (
        f"{outcome.seconds:.1f} s" if outcome.seconds >= 1 else f"{1e3 * outcome.seconds:.0f} ms"
    )
    if outcome.state == "cached":
        return f"{name} cached ({outcome.tier}) in {seconds}"
    if outcome.state == "failed":
        return f"{name} failed after {seconds}: {outcome.error}"
    if outcome.state == "missed":
        return f"{name} missed: {outcome.reason}"
    kept = f", not kept: {outcome.reason}" if outcome.state == "uncached" else f": {outcome.reason}"
    return f"{name} compiled in {seconds}{kept}"


class Progress:
    """A `Reporter` that shows a build to a person, on stderr.

    Use as a context manager; on a terminal a thread keeps the live lines' clocks going.
    """

    def __init__(self, stream: TextIO | None = None, *, verbose: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._live = _is_terminal(self._stream, os.environ)
        self._colour = colours(self._stream)
        self._verbose = verbose
        self._running: dict[str, tuple[float, Event]] = {}
        self._drawn = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        if self._live:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._live:
            self._thread.join()
        with self._lock:
            self._erase()

    def __call__(self, event: Event) -> None:
        """Take one event of the pipeline."""
        name = f"`{event.unit}` × `{event.target}`"
        with self._lock:
            self._erase()
            if event.what == "done":
                self._running.pop(name, None)
                assert event.outcome is not None
                self._line(event.outcome)
            else:
                self._running[name] = (time.monotonic(), event)
                if event.what == "compiling" and not self._live:
                    last = f", last time {event.expected:.1f} s" if event.expected else ""
                    self._print(f"{name} compiling ({event.reason}{last})")
            self._draw()

    def _line(self, outcome: Outcome) -> None:
        text = told(outcome)
        if self._colour:
            text = f"\x1b[{_COLOURS[outcome.state]}m{text}\x1b[0m"
        self._print(text)
        log = outcome.record.log if outcome.record else ""
        notes = getattr(outcome.error, "__notes__", ())
        for more in (*notes, *([log] if self._verbose and log else [])):
            self._print("  " + more.replace("\n", "\n  "))

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _tick(self) -> None:
        while not self._stop.wait(_INTERVAL):
            with self._lock:
                self._erase()
                self._draw()

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _draw(self) -> None:
        if not self._live:
            return
        now = time.monotonic()
        for name, (since, event) in self._running.items():
            last = f" of about {event.expected:.0f} s" if event.expected else ""
            self._stream.write(f"{name} {event.what} {now - since:.0f} s{last}\n")
            self._drawn += 1
        self._stream.flush()
