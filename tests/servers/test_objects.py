"""The cache in a bucket."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import cache_servers
import msgspec
import pytest

from max_build.cli import main
from max_build.key import digest
from max_build.store import CacheSettings, Hit, Miss, open_cache
from max_build.store.objects import ObjectStore
from max_build.testing.store import example

ARTIFACT = b"kernel " * 50_000
STRESS = Path(__file__).parents[1] / "store" / "stress_worker.py"


@pytest.fixture
def url(seaweed, s3_environment):
    s3_environment(seaweed)
    return f"s3://{cache_servers.BUCKET}/{uuid.uuid4().hex}"


def opened(folder, url, **options):
    return open_cache(CacheSettings(dir=str(folder), remote=url, **options))


def publish(folder, url, name="unit", data=ARTIFACT):
    record = example(name, data)
    with opened(folder, url, remote_mode="read-write") as cache:
        cache.publish(record, {digest(data): data})
        assert cache.warnings == []
    return record


def test_a_colleague_hits(url, tmp_path):
    record = publish(tmp_path / "a", url)
    with opened(tmp_path / "b", url) as cache:
        assert cache.lookup(record.key) == Hit(record, "remote")
        assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT
    (blob,) = ObjectStore(url).list("cas")
    assert blob.size < len(ARTIFACT) / 50


@pytest.mark.parametrize("damage", ["cut", "altered", "raw", "gone"])
def test_a_damaged_object_is_a_miss_that_heals(url, tmp_path, damage):
    import obstore

    record = publish(tmp_path / "a", url)
    store = ObjectStore(url, writable=True)
    name = record.blobs[0].digest
    path = f"cas/{name[:2]}/{name}"
    data = bytes(obstore.get(store._store, path).bytes())
    changed = {"cut": data[:-5], "altered": data[:-5] + bytes(5), "raw": ARTIFACT}.get(damage)
    if changed is None:
        store.delete("cas", name)
    else:
        obstore.put(store._store, path, changed)
    with opened(tmp_path / "b", url, remote_mode="read-write") as cache:
        assert isinstance(cache.lookup(record.key), Miss)
        cache.publish(record, {digest(ARTIFACT): ARTIFACT})
    with opened(tmp_path / "c", url) as cache:
        assert isinstance(cache.lookup(record.key), Hit)


def test_wrong_credentials_are_a_fault_and_no_secret_shows(url, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheimgeheim")
    with opened(tmp_path, url, remote_mode="read-write") as cache:
        found = cache.lookup(digest(b"k"))
        assert isinstance(found, Miss)
        record = example("unit", ARTIFACT)
        cache.publish(record, {digest(ARTIFACT): ARTIFACT})
        assert isinstance(cache.lookup(record.key), Hit)
        assert ("remote", "permission") in cache.stats.faults
        assert "geheim" not in "".join(cache.warnings)


def test_credentials_from_a_profile(url, seaweed, tmp_path, monkeypatch):
    for name in (*cache_servers.S3_ENVIRONMENT, "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(
        f"[profile team]\nregion = us-east-1\nendpoint_url = {seaweed}\n"
    )
    (tmp_path / "credentials").write_text(
        "[team]\naws_access_key_id = testkey\naws_secret_access_key = testsecret123\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    record = publish(tmp_path / "a", url)
    with opened(tmp_path / "b", url) as cache:
        assert isinstance(cache.lookup(record.key), Hit)


def test_a_profile_of_nobody_is_as_none(url, tmp_path, monkeypatch):
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "~no-such-user/.aws")
    publish(tmp_path, url)


def test_a_pull_goes_on_without_the_bucket_that_is_dead(
    s3_environment, tmp_path, monkeypatch, capsys
):
    (port,) = cache_servers.free_ports()
    s3_environment(f"http://127.0.0.1:{port}")
    (tmp_path / "shared").mkdir()
    with opened(tmp_path / "a", "", shared=str(tmp_path / "shared")) as cache:
        record = example("unit", ARTIFACT)
        cache.publish(record, {digest(ARTIFACT): ARTIFACT})
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(tmp_path / "b"))
    monkeypatch.setenv("MAX_BUILD_SHARED", str(tmp_path / "shared"))
    monkeypatch.setenv("MAX_BUILD_REMOTE", "s3://team/x")
    assert main(["-C", str(tmp_path), "pull"]) == 0
    out, error = capsys.readouterr()
    assert out.split() == [record.key]
    assert "warning: remote cache" in error


def test_a_bucket_that_is_not_there_is_a_warning(moto, s3_environment, tmp_path):
    s3_environment(moto)
    with opened(tmp_path, "s3://nowhere/at/all", remote_mode="read-write") as cache:
        record = example("unit", ARTIFACT)
        assert isinstance(cache.lookup(record.key), Miss)
        cache.publish(record, {digest(ARTIFACT): ARTIFACT})
        assert isinstance(cache.lookup(record.key), Hit)
        assert cache.warnings


def test_no_server_costs_three_seconds_at_most(s3_environment, tmp_path):
    (port,) = cache_servers.free_ports()
    s3_environment(f"http://127.0.0.1:{port}")
    started = time.monotonic()
    with opened(tmp_path, "s3://team/x", remote_mode="read-write") as cache:
        for name in ("a", "b", "c", "d"):
            record = example(name, ARTIFACT)
            assert isinstance(cache.lookup(record.key), Miss)
            cache.publish(record, {digest(ARTIFACT): ARTIFACT})
            assert isinstance(cache.lookup(record.key), Hit)
    assert time.monotonic() - started < 3 + 12


def test_machines_wait_for_each_other(url, tmp_path):
    record = example("unit", ARTIFACT)
    compiled = []

    def build(number):
        with opened(tmp_path / f"m{number}", url, remote_mode="read-write") as cache:
            if isinstance(cache.lookup(record.key), Hit):
                return
            with cache.single_flight(record.key) as again:
                if again and isinstance(cache.lookup(record.key), Hit):
                    return
                time.sleep(0.5)
                compiled.append(number)
                cache.publish(record, {digest(ARTIFACT): ARTIFACT})

    threads = [threading.Thread(target=build, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


def url_of(server, request, s3_environment) -> str:
    if server == "nginx":
        return request.getfixturevalue("nginx").writer_url
    s3_environment(request.getfixturevalue(server))
    return f"s3://{cache_servers.BUCKET}/{uuid.uuid4().hex}"


def machines(folder: Path, url: str, keys: int, count: int, **settings) -> list[subprocess.Popen]:
    """Processes with a directory each, which build the same keys through one remote."""
    return [
        subprocess.Popen(
            [
                sys.executable,
                str(STRESS),
                msgspec.json.encode(
                    CacheSettings(
                        dir=str(folder / f"m{number}"),
                        remote=url,
                        remote_mode="read-write",
                        # many processes on a small machine: slow is not sick
                        request_timeout=30,
                        connect_timeout=10,
                        budget=120,
                        **settings,
                    )
                ).decode(),
                str(number),
                str(keys),
                str(folder / "log"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ},
        )
        for number in range(count)
    ]


def finished(processes) -> None:
    for process in processes:
        _, error = process.communicate(timeout=500)
        assert process.returncode == 0, error


@pytest.mark.parametrize("server", ["seaweed", "rclone", "nginx"])
@pytest.mark.parametrize("keys", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_eight_machines_build_at_once(server, keys, tmp_path, request, s3_environment):
    finished(machines(tmp_path, url_of(server, request, s3_environment), keys, 8))
    counts = Counter((tmp_path / "log").read_text().split())
    assert len(counts) == keys // 2 * 9
    if server == "seaweed":  # the others cannot tell one machine that another compiles
        assert set(counts.values()) == {1}


@pytest.mark.parametrize("server", ["seaweed", "nginx"])
@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_a_machine_killed_at_random_harms_no_other(
    server, rounds, tmp_path, request, s3_environment
):
    url = url_of(server, request, s3_environment)
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        processes = machines(folder, url, 6, 4, lease=1)
        time.sleep(random.uniform(0.05, 0.8))
        processes[0].kill()
        processes[0].communicate()
        finished(processes[1:])
        if number % 2:  # the next round starts from an empty remote, or from what this one left
            url = url_of(server, request, s3_environment)


def test_a_server_that_never_answers_costs_three_seconds_and_no_exit(s3_environment, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        s3_environment(f"http://127.0.0.1:{silent.getsockname()[1]}")
        program = f"""
import time
from max_build.key import digest
from max_build.store import CacheSettings, Hit, Miss, open_cache
from max_build.testing.store import example
started = time.monotonic()
settings = CacheSettings(dir={str(tmp_path)!r}, remote="s3://team/x", remote_mode="read-write")
with open_cache(settings) as cache:
    for name in "abcd":
        record = example(name, b"x")
        assert isinstance(cache.lookup(record.key), Miss)
        cache.publish(record, {{digest(b"x"): b"x"}})
        assert isinstance(cache.lookup(record.key), Hit)
print(time.monotonic() - started)
"""
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert float(done.stdout) < 3 + 12
        assert time.monotonic() - started < 3 + 20
