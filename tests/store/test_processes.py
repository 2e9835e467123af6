"""Many processes at once, and processes that die."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from max_build import store
from max_build.store import CacheSettings, open_cache
from max_build.store.directory import DirectoryStore
from max_build.store.index import Memo
from max_build.store.stats import load_totals
from max_build.store.verify import verify
from max_build.testing.store import example

HERE = Path(__file__).parent


def workers(tmp_path, settings, keys, count=8, **options):
    log = tmp_path / "compiled"
    return [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "stress_worker.py"),
                msgspec.json.encode(settings(number)).decode(),
                str(number),
                str(keys),
                str(log),
            ],
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        for number in range(count)
    ]


def finished(processes):
    for process in processes:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error


def compiles(tmp_path):
    return Counter((tmp_path / "compiled").read_text().split())


@pytest.mark.parametrize("keys", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_eight_processes_compile_each_key_once(tmp_path, keys):
    root = tmp_path / "cache"
    finished(workers(tmp_path, lambda number: CacheSettings(dir=str(root)), keys))
    assert set(compiles(tmp_path).values()) == {1}
    assert len(compiles(tmp_path)) == keys // 2 * 9
    files = [p for p in root.rglob("*") if p.is_file() and p.parent.name != "index"]
    assert len(files) <= 2 * keys // 2 * 9 + 10
    assert verify(DirectoryStore(root)).findings == ()


@pytest.mark.parametrize("keys", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_eight_machines_compile_each_key_once(tmp_path, keys):
    shared = tmp_path / "shared"
    shared.mkdir()

    def settings(number):
        return CacheSettings(dir=str(tmp_path / f"m{number}"), shared=str(shared))

    finished(workers(tmp_path, settings, keys))
    assert set(compiles(tmp_path).values()) == {1}
    assert verify(DirectoryStore(shared, shared=True)).findings == ()


@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_process_killed_at_random_harms_nobody(tmp_path, kind, rounds):
    root = tmp_path / "cache"
    for number in range(rounds):
        root.mkdir(exist_ok=True)

        def settings(process, number=number):
            if kind == "own":
                return CacheSettings(dir=str(root))
            own = tmp_path / f"m{number}-{process}"
            return CacheSettings(dir=str(own), shared=str(root), lease=1)

        processes = workers(tmp_path, settings, 20, count=4)
        time.sleep(random.uniform(0.05, 0.6))
        processes[0].kill()
        processes[0].communicate()
        finished(processes[1:])
        assert verify(DirectoryStore(root, shared=kind == "shared")).findings == ()
        if number % 2:
            shutil.rmtree(root)


@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_publish_may_be_killed_at_any_system_call(tmp_path, kind, step):
    (tmp_path / "c").mkdir(mode=0o700)
    done = subprocess.run(
        [sys.executable, str(HERE / "killed_publish.py"), str(tmp_path / "c"), kind, str(step)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")
def test_two_users_under_umask_077_share_a_directory():
    # Not below tmp_path, whose folders are root's alone.
    base = Path(tempfile.mkdtemp(prefix="max-build-test-"))
    try:
        base.chmod(0o755)
        shared = base / "shared"
        shared.mkdir()
        os.chown(shared, 2001, 3000)
        shared.chmod(0o2775)
        (base / "log").mkdir()
        (base / "log").chmod(0o777)
        for user in (2001, 2002):
            (base / f"home{user}").mkdir(mode=0o700)
            os.chown(base / f"home{user}", user, user)
        for user in (2001, 2002, 2001):
            settings = CacheSettings(dir=str(base / f"home{user}" / "c"), shared=str(shared))
            status = as_user(user, 3000, lambda s=settings, u=user: build(s, base / "log" / str(u)))
            assert status == 0
            shutil.rmtree(base / f"home{user}" / "c")
        assert len((base / "log" / "2001").read_text().split()) == 10
        assert (base / "log" / "2002").read_text() == ""
    finally:
        shutil.rmtree(base)


def build(settings, log):
    sys.path.insert(0, str(HERE))
    import stress_worker

    stress_worker.run(settings, 0, 10, log)


def as_user(user, group, action):
    """Run `action` in a fork that is another user; the exit status. This Python may be root's."""
    for module in pkgutil.iter_modules(store.__path__, "max_build.store."):
        if module.name not in {"max_build.store.http", "max_build.store.objects"}:
            importlib.import_module(module.name)
    importlib.import_module("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    sys.path.insert(0, str(HERE))
    importlib.import_module("stress_worker")
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.setgroups([group])
        os.setgid(user)
        os.setuid(user)
        os.umask(0o077)
        action()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - told, and an exit status
        traceback.print_exc()
    finally:
        os._exit(1)


def test_counters_are_kept_although_another_process_holds_the_index(tmp_path):
    holder = None

    class Release(logging.Handler):
        def emit(self, record):
            holder.close()

    release = Release(logging.DEBUG)
    log = logging.getLogger("max_build.store.index")
    key = example("nothing", b"").key
    for held in (False, True):
        with open_cache(CacheSettings(dir=str(tmp_path))) as cache:
            cache.lookup(key)
            cache.memo.get("an", "opened index")
            if held:
                holder = sqlite3.connect(tmp_path / "index" / "cache.db")
                holder.execute("BEGIN IMMEDIATE")
                log.addHandler(release)
                log.setLevel(logging.DEBUG)
    log.removeHandler(release)
    log.setLevel(logging.NOTSET)
    memo = Memo(tmp_path / "index")
    assert load_totals(memo).misses == {"absent": 2}
    memo.close()
