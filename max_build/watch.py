"""Build, and build again when a source changes; a compile that is out of date is given up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from max_build.key import digest
from max_build.recipes.inotify import CHANGED, Overflow, Watch

__all__ = ["watch"]

_QUIET = 0.1
"""Seconds without a change after which an editor is taken to be done."""

_GRACE = 5.0
# Not read by any build: a change of it does not give a running one up.
_DOCUMENTS = (".md", ".rst", ".orig", ".log")
_EDITORS = ("~", ".swp", ".swx", ".tmp", ".pyc")


def watch(
    roots: Sequence[str],
    command: Sequence[str],
    *,
    ignored: Sequence[str] = (),
    told: Callable[[str], None] = print,
    rounds: int | None = None,
) -> None:
    """Run `command` now and after each change below `roots`, until interrupted.

    The command runs in a process of its own, which is interrupted (SIGINT) when a source changes
    under it. What changed back, or was only touched, is no change.

    Parameters
    ----------
    ignored
        Directories whose changes do not count: caches, outputs.
    told
        Takes a line for each change.
    rounds
        How often to run it at most.
    """
    with Watch(roots, CHANGED) as changes:
        seen = _Contents()
        process: subprocess.Popen[bytes] | None = None
        try:
            while rounds is None or rounds > 0:
                rounds = None if rounds is None else rounds - 1
                process = subprocess.Popen(list(command), start_new_session=True)
                changed: list[str] = []
                while not changed or process.poll() is None:
                    # While it runs its end is as interesting as a change is.
                    changes.wait(0.2 if process.poll() is None else None)
                    changed += seen.changed(_settled(changes), ignored)
                    if process.poll() is None and any(_is_source(one) for one in changed):
                        _interrupt(process)
                names = ", ".join(sorted({f"`{_shown(one, roots)}`" for one in changed})[:3])
                told(f"{names} changed")
        finally:
            if process is not None and process.poll() is None:
                _interrupt(process)


class _Contents:
    """What changed files held when they were last looked at."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def changed(self, paths: set[str], ignored: Sequence[str]) -> list[str]:
        """Those that hold something new, or are gone."""
        found = []
        for path in sorted(paths):
            if path.endswith(_EDITORS) or any(path.startswith(one + os.sep) for one in ignored):
                continue
            content = ""
            with contextlib.suppress(OSError):
                content = digest(Path(path).read_bytes())
            if self._digests.get(path) != content:
                self._digests[path] = content
                found.append(path)
        return found


def _settled(changes: Watch) -> set[str]:
    """The files that changed, once no more do for a moment."""
    found: set[str] = set()
    while True:
        try:
            now = changes.read()
        except Overflow:
            continue
        found |= now
        if not now or not changes.wait(_QUIET):
            return found


def _is_source(path: str) -> bool:
    return not path.endswith(_DOCUMENTS)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Let a build clean up after itself, and its workers with it."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _shown(path: str, roots: Sequence[str]) -> str:
    return os.path.relpath(path, roots[0])
