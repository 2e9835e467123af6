"""What every test shares: a cache of its own, small model repos, and graphs compiled once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import ROOT, max_build, write_project


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's cache, settings and variables out of every test, and other tests' traces."""
    # A derivation that finds them loaded is taken to have started processes.
    for name in ("popen_forkserver", "popen_spawn_posix"):
        monkeypatch.delitem(sys.modules, f"multiprocessing.{name}", raising=False)
    for name in [name for name in os.environ if name.startswith("MAX_BUILD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The toy repo: one graph, `x * scale + bias`, for the CPU."""
    return write_project(tmp_path / "toy")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory in which the toy graph is compiled for `cpu` and `sm_90a`.

    Use a copy of it (`toy_cache`): this one is shared by the whole session.
    """
    base = tmp_path_factory.mktemp("compiled")
    root = write_project(base / "toy")
    done = max_build(
        "build", "-t", "cpu", "-t", "sm_90a", cwd=root, env={"MAX_BUILD_CACHE_DIR": base / "cache"}
    )
    assert done.returncode == 0, done.stderr
    return base / "cache"


@pytest.fixture
def toy_cache(compiled: Path, tmp_path: Path) -> Path:
    """This test's own cache (`MAX_BUILD_CACHE_DIR`), with the toy graph in it."""
    target = tmp_path / "cache"
    shutil.copytree(compiled, target, dirs_exist_ok=True)
    return target


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of a given size (`64k`) below the test's directory; needs root."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
            pytest.skip("a tmpfs cannot be mounted here (needs root)")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=False)


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory in which `examples/minilm` is compiled for `cpu`."""
    cache = tmp_path_factory.mktemp("minilm") / "cache"
    done = max_build("build", cwd=ROOT / "examples" / "minilm", env={"MAX_BUILD_CACHE_DIR": cache})
    assert done.returncode == 0, done.stderr
    return cache
