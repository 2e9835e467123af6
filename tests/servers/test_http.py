"""The cache over HTTP: the server of `cache/`, and servers that misbehave."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import threading
import time

import pytest

from max_build import manifest
from max_build.cli import main
from max_build.errors import ConfigError, StoreError
from max_build.key import digest
from max_build.manifest import ManifestUnit
from max_build.record import encode
from max_build.store import CacheSettings, Hit, Miss, actionresult, open_cache
from max_build.store.entry import seal
from max_build.store.http import HttpStore
from max_build.testing.store import example, poured

ARTIFACT = os.urandom(300_000)
RECORD = example("unit", ARTIFACT)
CONTENT = {digest(ARTIFACT): ARTIFACT}


def opened(folder, url, **options):
    return open_cache(CacheSettings(dir=str(folder), remote=url, **options))


# --- the server of `cache/`


def test_ci_publishes_and_everybody_hits(nginx, tmp_path):
    with opened(tmp_path / "ci", nginx.writer_url, remote_mode="read-write") as cache:
        assert cache.lookup(RECORD.key) == Miss("absent")
        cache.publish(RECORD, CONTENT)
        assert cache.warnings == []
    assert nginx.blob(digest(ARTIFACT)).read_bytes() == ARTIFACT
    with opened(tmp_path / "bob", nginx.url) as cache:
        assert cache.lookup(RECORD.key) == Hit(RECORD, "remote")
        assert cache.path(RECORD.blobs[0]).read_bytes() == ARTIFACT


def test_who_may_not_write_is_told_once(nginx, tmp_path):
    with opened(tmp_path, nginx.url, remote_mode="read-write") as cache:
        cache.publish(RECORD, CONTENT)
        cache.publish(example("other", ARTIFACT), CONTENT)
        assert isinstance(cache.lookup(RECORD.key), Hit)
        assert set(cache.stats.faults) == {("remote", "permission")}
        (warning,) = cache.warnings
        assert "401" in warning
    assert not nginx.blob(digest(ARTIFACT)).exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "gone"])
def test_a_damaged_blob_on_the_server_is_a_miss_that_heals(nginx, tmp_path, damage):
    with opened(tmp_path / "ci", nginx.writer_url, remote_mode="read-write") as cache:
        cache.publish(RECORD, CONTENT)
    path = nginx.blob(digest(ARTIFACT))
    changed = {
        "flip": b"x" + ARTIFACT[1:],
        "cut": ARTIFACT[:-1],
        "grow": ARTIFACT + b"x",
        "empty": b"",
        "gone": None,
    }[damage]
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    with opened(tmp_path / "two", nginx.writer_url, remote_mode="read-write") as cache:
        assert isinstance(cache.lookup(RECORD.key), Miss)
        cache.publish(RECORD, CONTENT)
    with opened(tmp_path / "bob", nginx.url) as cache:
        assert cache.lookup(RECORD.key) == Hit(RECORD, "remote")


def test_over_tls_with_a_private_authority(nginx, tmp_path):
    url = nginx.tls_url.replace("://", f"://{nginx.user}:{nginx.password}@")
    options = {"remote_ca": str(nginx.certificate), "remote_mode": "read-write"}
    with opened(tmp_path / "a", url, **options) as cache:
        cache.publish(RECORD, CONTENT)
        assert cache.warnings == []
    with opened(tmp_path / "b", nginx.tls_url, remote_ca=str(nginx.certificate)) as cache:
        assert isinstance(cache.lookup(RECORD.key), Hit)
    with opened(tmp_path / "c", nginx.tls_url) as cache:
        found = cache.lookup(RECORD.key)
        assert isinstance(found, Miss)
        assert found.reason == "fault"
        assert "self-signed certificate" in cache.warnings[0]


def test_a_lock_is_pulled_from_a_server_that_lists_nothing(nginx, tmp_path, monkeypatch, capsys):
    with opened(tmp_path / "ci", nginx.writer_url, remote_mode="read-write") as cache:
        cache.publish(RECORD, CONTENT)
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(tmp_path / "bob"))
    monkeypatch.setenv("MAX_BUILD_REMOTE", nginx.url)
    here = ["-C", str(tmp_path), "pull"]
    assert main([*here, "--unit", "unit"]) == 1
    assert "does not list" in capsys.readouterr().err
    unit = ManifestUnit(kind="graph", targets={"cpu": RECORD})
    lock = tmp_path / "lock"
    lock.write_bytes(manifest.encode(manifest.make("demo", [("unit", unit)], embedded=False)))
    assert main([*here, "--lock", str(lock)]) == 0
    assert capsys.readouterr().out.split() == [RECORD.key]
    with open_cache(CacheSettings(dir=str(tmp_path / "bob"))) as cache:
        assert cache.lookup(RECORD.key) == Hit(RECORD, "local")


def test_a_pull_goes_on_without_the_tier_that_lists_nothing(nginx, tmp_path, monkeypatch, capsys):
    (tmp_path / "shared").mkdir()
    with opened(tmp_path / "ci", nginx.url, shared=str(tmp_path / "shared")) as cache:
        cache.publish(RECORD, CONTENT)
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(tmp_path / "bob"))
    monkeypatch.setenv("MAX_BUILD_REMOTE", nginx.url)
    monkeypatch.setenv("MAX_BUILD_SHARED", str(tmp_path / "shared"))
    assert main(["-C", str(tmp_path), "pull", "--unit", "unit"]) == 0
    out, error = capsys.readouterr()
    assert out.split() == [RECORD.key]
    assert "does not list" in error


def test_a_server_that_keeps_no_blobs_at_that_address_has_not_taken_them(nginx, tmp_path):
    with opened(tmp_path, f"{nginx.writer_url}/wrong", remote_mode="read-write") as cache:
        cache.publish(RECORD, CONTENT)
        assert cache.offer(RECORD.key)  # says why not
        assert cache.stats.sent == {}
        assert "PUT" in cache.warnings[0]
        assert "gave status 404" in cache.warnings[0]


def test_no_password_shows_in_a_message(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with opened(
        tmp_path, f"http://ci:geheim@127.0.0.1:{port}/x", remote_mode="read-write"
    ) as cache:
        cache.lookup(RECORD.key)
        cache.publish(RECORD, CONTENT)
        assert cache.warnings
        assert "geheim" not in "".join(cache.warnings)
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, "http://ci:geheim@/x")
    assert "geheim" not in str(caught.value)


def test_another_client_reads_and_writes_the_same_server(nginx, tmp_path):
    """ccache knows the Bazel layout; it is an independent witness that the server serves it."""
    ccache, compiler = shutil.which("ccache"), shutil.which("gcc")
    if not (ccache and compiler):
        pytest.skip("`ccache` or `gcc` is not installed (Debian: ccache gcc)")
    source = tmp_path / "a.c"
    source.write_text("int f(void) { return 1; }\n")
    hits = []
    for number in range(2):
        environment = {
            **os.environ,
            "CCACHE_DIR": str(tmp_path / f"cc{number}"),
            "CCACHE_REMOTE_STORAGE": f"{nginx.writer_url}/|layout=bazel",
        }
        command = [ccache, compiler, "-c", str(source), "-o", str(tmp_path / "a.o")]
        subprocess.run(command, check=True, env=environment, timeout=60, cwd=tmp_path)
        shown = subprocess.run(
            [ccache, "--print-stats"],
            check=True, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        found = re.search(r"remote_storage_hit\s+(\d+)", shown.stdout)
        hits.append(int(found[1]) if found else 0)
    assert hits[0] == 0
    assert hits[1] > 0


# --- servers that misbehave: each answers every connection with the same bytes

ENTRY = actionresult.encode(seal(encode(RECORD)))


def reply(body, status="200 OK", length=None):
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body


def answer(script):
    """Serve connections: read a request, send what `script(path)` says, None for nothing at all."""

    def serve(connection):
        with connection, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                more = connection.recv(65536)
                if not more:
                    return
                data += more
            answer_bytes = script(data.split(b" ")[1].decode())
            if answer_bytes is None:
                time.sleep(20)
                return
            connection.sendall(answer_bytes)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    return listener


def both(entry, blob):
    return lambda path: entry if path.startswith("/ac/") else blob


MISDEEDS = {
    "never answers": lambda path: None,
    "hangs up": lambda path: b"",
    "speaks something else": lambda path: b"SSH-2.0-OpenSSH_9.2\r\n",
    "500": lambda path: reply(b"oops", "500 Internal Server Error"),
    "403": lambda path: reply(b"no", "403 Forbidden"),
    "an entry that is no action result": both(reply(b"<html>hello</html>"), reply(ARTIFACT)),
    "an entry that is cut": both(reply(ENTRY[:-9]), reply(ARTIFACT)),
    "an entry of another key": both(
        reply(actionresult.encode(seal(encode(example("evil", ARTIFACT))))), reply(ARTIFACT)
    ),
    "a blob that is cut": both(reply(ENTRY), reply(ARTIFACT[:1000], length=len(ARTIFACT))),
    "a blob that is short": both(reply(ENTRY), reply(ARTIFACT[:1000])),
    "a blob that is altered": both(reply(ENTRY), reply(b"x" + ARTIFACT[1:])),
    "a blob that is too long": both(reply(ENTRY), reply(ARTIFACT * 3)),
    "a blob that never ends": both(reply(ENTRY), reply(b"", length=1 << 40)),
    "a blob in an odd encoding": both(
        reply(ENTRY), b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 3\r\n\r\nabc"
    ),
    "a redirect in a circle": lambda path: (
        f"HTTP/1.1 302 Found\r\nLocation: {path}\r\nContent-Length: 0\r\n\r\n".encode()
    ),
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_sick_remote_changes_nothing_and_costs_three_seconds_at_most(tmp_path, misdeed):
    listener = answer(MISDEEDS[misdeed])
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    started = time.monotonic()
    with opened(tmp_path, url, remote_mode="read-write") as cache:
        for name in ("unit", "second", "third", "fourth"):
            record = example(name, ARTIFACT)
            with cache.single_flight(record.key):
                assert isinstance(cache.lookup(record.key), Miss)
                cache.publish(record, CONTENT)
            assert isinstance(cache.lookup(record.key), Hit)
            assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT
        cache.recipes(digest(b"l"))
        cache.add_recipe(digest(b"l"), b"{}")
        assert cache.stats.faults
        assert 1 <= len(cache.warnings) <= 4
    # The bound is the promise of the budget; the rest is for a busy machine.
    assert time.monotonic() - started < 3 + 12
    listener.close()


@pytest.mark.parametrize(
    ("status", "kind"), [("503 Service Unavailable", "server"), ("413 Too Large", "full")]
)
def test_a_status_is_told_though_it_says_when_to_come_again(status, kind):
    listener = answer(lambda path: reply(b"", f"{status}\r\nRetry-After: 3"))
    store = HttpStore(f"http://127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(StoreError, match=f"gave status {status[:3]}") as caught:
        store.get_entry(RECORD.key)
    assert caught.value.kind == kind
    listener.close()


def test_zstd_is_used_where_the_server_speaks_it():
    import io

    from max_build.store.compress import deflate

    packed = io.BytesIO()
    deflate(io.BytesIO(ARTIFACT), packed)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: zstd\r\nContent-Length: {packed.tell()}\r\n\r\n"
    listener = answer(lambda path: head.encode() + packed.getvalue())
    store = HttpStore(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert poured(store, ARTIFACT) == ARTIFACT
    listener.close()


def test_many_requests_use_one_connection(nginx):
    store = HttpStore(nginx.url)
    for number in range(20):
        assert store.get_entry(digest(b"%d" % number)) is None
    assert store._connection._pool.num_connections == 1


def test_a_server_that_dies_in_between_is_a_miss(tmp_path):
    import cache_servers

    if cache_servers.program("nginx") is None:
        pytest.skip("`nginx` is not installed (Debian: nginx-light)")
    with (
        cache_servers.nginx(tmp_path) as server,
        opened(tmp_path / "c", server.writer_url, remote_mode="read-write") as cache,
    ):
        cache.publish(RECORD, CONTENT)
        server.process.terminate()
        server.process.wait()
        assert isinstance(cache.lookup(digest(b"k")), Miss)
        cache.publish(example("other", ARTIFACT), CONTENT)
        assert isinstance(cache.lookup(RECORD.key), Hit)
        assert cache.warnings


def test_a_store_says_what_it_cannot():
    with pytest.raises(StoreError) as caught:
        list(HttpStore("http://127.0.0.1:1").list("ac"))
    assert caught.value.kind == "unsupported"
