"""When a file's status may stand for its bytes."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from max_build.stamp import read_digest, settled, stamp_of

SECOND = 10**9


def status(path: Path, **changed: int) -> os.stat_result:
    """The status of a file, with other times."""
    found = os.stat(path)
    names = {"st_mtime_ns": found.st_mtime_ns, "st_ctime_ns": found.st_ctime_ns, **changed}
    fields = {name: getattr(found, name) for name in ("st_atime_ns", *names)}
    return os.stat_result(tuple(found), {**fields, **names})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("text")
    return path


@pytest.mark.parametrize(
    ("times", "since", "expected"),
    [
        pytest.param((1, 1), 4 * SECOND, True, id="old"),
        pytest.param((1, 3 * SECOND + 1), 4 * SECOND, False, id="renamed-or-touched-just-before"),
        pytest.param((3 * SECOND, 1), 4 * SECOND, False, id="written-just-before"),
        pytest.param((5 * SECOND, 1), 4 * SECOND, False, id="from-the-future"),
    ],
)
def test_a_file_is_settled_if_another_change_must_show(
    file: Path, times: tuple[int, int], since: int, expected: bool
) -> None:
    found = status(file, st_mtime_ns=times[0], st_ctime_ns=times[1])
    assert settled(found, since) is expected


def test_a_file_that_has_just_been_written_is_not_settled(file: Path) -> None:
    assert not settled(os.stat(file), time.time_ns())
    assert stamp_of(os.stat(file)) == stamp_of(os.stat(file))


def test_a_digest_comes_with_the_stamp_that_it_holds_under(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = hashlib.sha256(b"text").hexdigest()
    assert read_digest(file) == (wanted, None)  # it may be written again unseen
    time.sleep(2.1)
    assert read_digest(file) == (wanted, stamp_of(os.stat(file)))

    original = hashlib.file_digest

    def meanwhile(opened: Any, algorithm: Any) -> Any:
        found = original(opened, algorithm)
        file.write_text("other")
        return found

    monkeypatch.setattr(hashlib, "file_digest", meanwhile)
    assert read_digest(file) == (wanted, None)


def test_a_digest_of_what_cannot_be_read_is_an_os_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(OSError, match=path.name):
            read_digest(path)
