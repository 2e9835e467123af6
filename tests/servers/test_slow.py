"""A link that is slow is none that is dead: real transfers through sockets that dawdle."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
import time
import uuid

import cache_servers
import pytest

from max_build.key import digest
from max_build.record import encode
from max_build.store import CacheSettings, Hit, actionresult, open_cache
from max_build.store.entry import seal
from max_build.store.http import HttpStore
from max_build.testing.store import example

TIMEOUTS = {"connect_timeout": 0.5, "request_timeout": 1.0, "budget": 1.5}
BLOB = os.urandom(1 << 20)
RECORD = example("unit", BLOB)
CONTENT = {digest(BLOB): BLOB}


def opened(folder, url, **options):
    return open_cache(CacheSettings(dir=str(folder), remote=url, **(TIMEOUTS | options)))


@contextlib.contextmanager
def accepting(serve):
    """`serve(connection)` on a thread for each connection; yields the port."""

    def handle(connection):
        with connection, contextlib.suppress(OSError):
            serve(connection)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    with socket.socket() as listener:
        # What a connection has on its way is little, so that a dawdling reader is felt.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def slowed(endpoint, *, up=0.0, down=0.0):
    """A way to a server that moves so many bytes a second, on all connections together."""
    gate = threading.Lock()

    def pump(source, target, rate):
        with contextlib.suppress(OSError):
            while data := source.recv(16 << 10):
                if rate:
                    with gate:
                        time.sleep(len(data) / rate)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve(connection):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            server.connect(("127.0.0.1", int(endpoint.rpartition(":")[2])))
            back = threading.Thread(target=pump, args=(server, connection, down), daemon=True)
            back.start()
            pump(connection, server, up)
            back.join()

    with accepting(serve) as port:
        yield f"http://127.0.0.1:{port}"


def request(connection):
    """A request line, the headers, and what of the body came with them."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            raise ConnectionError
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    return head, body


def taking(stall=0.0, rate=0.0):
    """Takes whatever is put: after a stall once it has half, or at so many bytes a second."""

    def serve(connection):
        while True:
            head, body = request(connection)
            if not head.startswith(b"PUT"):
                connection.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
                continue
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            got, left = len(body), stall
            while got < size:
                more = connection.recv(32 << 10)
                if not more:
                    return
                got += len(more)
                time.sleep(len(more) / rate if rate else 0)
                if got > size // 2 and left:
                    time.sleep(left)
                    left = 0.0
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    return serve


def test_a_slow_download_by_http_arrives(tmp_path):
    entry = actionresult.encode(seal(encode(RECORD)))

    def serve(connection):
        head, _ = request(connection)
        body = entry if b"/ac/" in head else BLOB
        answer = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(answer.encode())
        for start in range(0, len(body), 16 << 10):
            connection.sendall(body[start : start + (16 << 10)])
            time.sleep(0.05 if body is BLOB else 0)

    with accepting(serve) as port, opened(tmp_path, f"http://127.0.0.1:{port}") as cache:
        assert cache.lookup(RECORD.key) == Hit(RECORD, "remote")
        assert cache.warnings == []


def test_a_slow_download_from_a_bucket_arrives(moto, s3_environment, tmp_path):
    url = f"s3://{cache_servers.BUCKET}/{uuid.uuid4().hex}"
    s3_environment(moto)
    patient = {"request_timeout": 30.0, "budget": 30.0}
    with opened(tmp_path / "a", url, remote_mode="read-write", **patient) as cache:
        cache.publish(RECORD, CONTENT)
        assert cache.warnings == []
    with slowed(moto, down=300e3) as endpoint:
        s3_environment(endpoint)
        with opened(tmp_path / "b", url) as cache:
            assert cache.lookup(RECORD.key) == Hit(RECORD, "remote")
            assert cache.warnings == []


def test_a_slow_upload_to_a_bucket_arrives(moto, s3_environment, tmp_path):
    url = f"s3://{cache_servers.BUCKET}/{uuid.uuid4().hex}"
    with slowed(moto, up=350e3) as endpoint:
        s3_environment(endpoint)
        with opened(tmp_path, url, remote_mode="read-write", budget=1.0) as cache:
            cache.publish(RECORD, CONTENT)
            assert cache.warnings == []
            assert cache.stats.sent == {"remote": len(BLOB)}


@pytest.mark.parametrize("zstd", [False, True])
def test_a_slow_upload_by_http_arrives(tmp_path, zstd):
    data = os.urandom(6 << 20)
    record = example("unit", data)
    with (
        accepting(taking(rate=2e6)) as port,
        opened(tmp_path, f"http://127.0.0.1:{port}", remote_mode="read-write") as cache,
    ):
        cache.outer[0].store._zstd = zstd  # as if it had sent a blob so
        cache.publish(record, {digest(data): data})
        assert cache.warnings == []
        assert cache.stats.sent == {"remote": len(data)}


def test_an_upload_may_pause_for_longer_than_connecting_may_take():
    data = os.urandom(12 << 20)  # more than the buffers of both ends
    settings = CacheSettings(connect_timeout=0.2, request_timeout=10)
    with accepting(taking(stall=1.0)) as port:
        store = HttpStore(f"http://127.0.0.1:{port}", settings, writable=True)
        store.put_blob(digest(data), io.BytesIO(data))
        store.close()


def test_an_upload_that_nobody_takes_is_a_timeout():
    from max_build.errors import StoreError

    data = os.urandom(12 << 20)
    settings = CacheSettings(connect_timeout=5, request_timeout=0.2)
    with accepting(lambda connection: time.sleep(20)) as port:
        store = HttpStore(f"http://127.0.0.1:{port}", settings, writable=True)
        with pytest.raises(StoreError, match="took nothing more in time") as caught:
            store.put_blob(digest(data), io.BytesIO(data))
        assert caught.value.kind == "timeout"
        store.close()
