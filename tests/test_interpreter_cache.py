"""MAX's interpreter cache: packed once, merged into what another machine has."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from max_build.errors import CompileError, ToolchainError
from max_build.interpreter_cache import STAMP, Machine, fetch, install, machine, pack, warm
from max_build.store import CacheSettings, open_cache

# What `max warm-interpreter-cache` does to the disk: models in a few folders, and a stamp.
WARM = """
import os, pathlib, sys
root = pathlib.Path(os.environ["XDG_CACHE_HOME"], "modular")
for name in (".max_cache/mof/mef/26.7.0/one", ".mogg_cache/aa/two", ".mojo_cache/three"):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(name.encode() * 1000)
assert "MODULAR_DERIVED_PATH" not in os.environ
if not pathlib.Path(sys.argv[1]).exists():
    sys.exit(3)
(root / ".max_cache/eager_gc_warm_stamp.json").write_text("{}")
"""


def quiet(what: str, done: int, total: int) -> None:
    assert what in ("packing", "installing")
    assert 0 <= done <= total


def here(folder: Path) -> Machine:
    return Machine({"max": "26.7.0+aa"}, "accelerators=0;version=26.7.0", "bb", str(folder), False)


def test_what_one_machine_warms_another_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODULAR_DERIVED_PATH", str(tmp_path / "derived"))
    go = tmp_path / "go"
    command = (sys.executable, "-c", WARM, str(go))
    cache = open_cache(CacheSettings(dir=str(tmp_path / "cache")))
    first, second = here(tmp_path / "first"), here(tmp_path / "second")
    assert fetch(cache, first, quiet) == ""
    with pytest.raises(CompileError, match="ended with status 3"):
        warm(cache, first, quiet, command=command)
    assert not (tmp_path / "first").exists()
    go.touch()
    warm(cache, first, quiet, command=command)
    own = tmp_path / "second" / ".max_cache" / "mof" / "mef" / "26.7.0" / "own"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    assert fetch(cache, second, quiet) == "local"
    assert own.read_text() == "mine"
    names = {str(one.relative_to(tmp_path / "first")) for one in files(tmp_path / "first")}
    assert f".max_cache/{STAMP}" in names
    assert names | {".max_cache/mof/mef/26.7.0/own"} == {
        str(one.relative_to(tmp_path / "second")) for one in files(tmp_path / "second")
    }
    another = Machine({"max": "26.8.0+aa"}, first.context, "bb", first.folder, False)
    assert fetch(cache, another, quiet) == ""
    assert not (tmp_path / "cache" / "interpreter").exists() or not files(
        tmp_path / "cache" / "interpreter"
    )
    cache.close()


# What takes a while, and fails where another removed what it works on.
SLOW = """
import os, pathlib, sys, time
root = pathlib.Path(os.environ["XDG_CACHE_HOME"], "modular")
root.mkdir(exist_ok=True)
with open(sys.argv[1], "a") as told:
    told.write("x")
for n in range(10):
    (root / f"part{n}").write_text("x")
    time.sleep(0.05)
(root / "eager_gc_warm_stamp.json").write_text("{}")
"""


def test_of_two_that_warm_at_once_one_does(tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = (sys.executable, "-c", SLOW, str(told))

    def one(name: str) -> str:
        with open_cache(CacheSettings(dir=str(tmp_path / "cache"))) as cache:
            return warm(cache, here(tmp_path / name), quiet, command=command).key

    with ThreadPoolExecutor(3) as pool:
        keys = set(pool.map(one, ("one", "two", "three")))
    assert len(keys) == 1
    assert told.read_text() == "x"
    for name in ("one", "two", "three"):
        assert len(files(tmp_path / name)) == 11


def test_without_a_directory_to_work_in_scratch_space_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / f"max-build-{os.getuid()}").touch()  # where a cache would fall back to
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    command = (sys.executable, "-c", SLOW, str(tmp_path / "told"))
    (tmp_path / "file").touch()
    with open_cache(CacheSettings(dir=str(tmp_path / "file" / "cache"))) as cache:
        warm(cache, here(tmp_path / "one"), quiet, command=command)
    assert len(files(tmp_path / "one")) == 11
    assert len(list((tmp_path / "scratch").iterdir())) == 1


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "interpreter").touch()
    with (
        open_cache(CacheSettings(dir=str(tmp_path / "cache"))) as cache,
        pytest.raises(CompileError, match=r"cannot be made: `.*/interpreter`: File exists"),
    ):
        warm(cache, here(tmp_path / "one"), quiet, command=("true",))


def files(folder: Path) -> list[Path]:
    return [one for one in folder.rglob("*") if one.is_file()]


def test_an_archive_is_reproducible_and_its_stamp_comes_last(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / ".max_cache").mkdir(parents=True)
        for file in ("b", ".max_cache/a", f".max_cache/{STAMP}"):
            (folder / file).write_text(file)
        pack(folder, tmp_path / f"{name}.tar.zst", quiet)
        os.utime(folder / "b", (1, 1))
    assert (tmp_path / "one.tar.zst").read_bytes() == (tmp_path / "two.tar.zst").read_bytes()
    assert install(tmp_path / "one.tar.zst", tmp_path / "target", quiet) == 3
    assert install(tmp_path / "one.tar.zst", tmp_path / "target", quiet) == 1  # the stamp alone


def test_an_incomplete_cache_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "modular").mkdir()
    with pytest.raises(CompileError, match="is not complete"):
        pack(tmp_path / "modular", tmp_path / "a.tar.zst", quiet)


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
def test_a_member_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    from max_build.store.compress import open_packed

    with (
        open_packed(tmp_path / "a.tar.zst", "wb") as stream,
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(CompileError, match="not one that belongs"):
        install(tmp_path / "a.tar.zst", tmp_path / "target", quiet)


def test_a_cut_archive_is_told_and_leaves_no_stamp(tmp_path: Path) -> None:
    folder = tmp_path / "modular"
    (folder / ".max_cache").mkdir(parents=True)
    (folder / "big").write_bytes(os.urandom(1 << 20))
    (folder / ".max_cache" / STAMP).write_text("{}")
    pack(folder, tmp_path / "a.tar.zst", quiet)
    data = (tmp_path / "a.tar.zst").read_bytes()
    (tmp_path / "a.tar.zst").write_bytes(data[: len(data) // 2])
    with pytest.raises(CompileError, match="cannot be installed"):
        install(tmp_path / "a.tar.zst", tmp_path / "target", quiet)
    assert not files(tmp_path / "target")


def test_this_machine_as_max_sees_it() -> None:
    found = machine()
    assert "version=26" in found.context
    assert found.compiler["max"].startswith("26.")
    assert os.path.isabs(found.folder)


def test_a_machine_whose_cpu_cannot_be_told_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"compiler": {}, "context": "", "processor": "", "folder": "/f", "warmed": False}
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ToolchainError, match="what CPU this machine has cannot be told"):
        machine()


def test_a_max_in_front_of_the_one_that_is_installed_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import max.dtype

    own = Path(max.dtype.__file__).parent
    shutil.copytree(own, tmp_path / "max" / "dtype")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(ToolchainError, match=r"this MAX is not what is installed: `max\.dtype"):
        machine()
