"""A cache server that answers anything at all."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import threading
from collections.abc import Mapping

import msgspec
from backports import zstd
from forms import HTTP, raw_answers
from fuzz_records import ARTIFACT, LOOKUP, RECORD_OF_ALL, entry_of
from fuzz_store import CONTENT, whole
from harness import Target, scratch

from max_build.key import digest
from max_build.record import Blob
from max_build.store import CacheSettings, Hit, actionresult, open_cache

__all__ = ["TARGETS"]

_SEPARATOR = b"\n--- the answer for blobs ---\n"


class _Server(threading.Thread):
    """Gives each request the bytes that stand for its path, and closes the line."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.entry = self.blob = b""
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.port = self._socket.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            line = self._socket.accept()[0]
            with line:
                line.settimeout(5)
                try:
                    self._answer(line)
                except OSError:
                    continue

    def _answer(self, line: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head and (more := line.recv(1 << 16)):
            head += more
        line.sendall(self.blob if b"/cas/" in head.partition(b"\r\n")[0] else self.entry)
        line.shutdown(socket.SHUT_WR)
        while line.recv(1 << 16):
            pass


@functools.cache
def _server(process: int) -> _Server:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    os.environ["NETRC"] = os.devnull
    return _Server()


def _http(data: bytes) -> bool:
    server = _server(os.getpid())
    server.entry, server.blob = raw_answers(data)
    root = scratch("http") / "local"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(0o700)
    settings = CacheSettings(
        dir=str(root),
        remote=f"http://127.0.0.1:{server.port}",
        remote_mode="read-write",
        connect_timeout=5,
        request_timeout=5,
        budget=60,
    )
    record = RECORD_OF_ALL
    with open_cache(settings) as cache:
        cache.recipes(LOOKUP)
        found = cache.lookup(record.key)
        if isinstance(found, Hit):
            assert found.record.key == record.key
            whole(cache, found.record)
        elif found.reason == "fault":
            assert cache.stats.faults
        cache.publish(record, CONTENT)
        again = cache.lookup(record.key)
        assert isinstance(again, Hit)
        assert again.record == record
        whole(cache, record)
    return isinstance(found, Hit)


def _answer(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _seeds() -> Mapping[str, bytes]:
    # One blob: the server has the same answer for each.
    only = Blob(role="mef", digest=digest(ARTIFACT), size=len(ARTIFACT))
    entry = actionresult.encode(entry_of(msgspec.structs.replace(RECORD_OF_ALL, blobs=(only,))))
    packed = zstd.compress(ARTIFACT)
    plain, coded = _answer(entry), _answer(packed, Content_Encoding="zstd")
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = b"".join(
        b"%x\r\n%s\r\n" % (len(piece), piece)
        for piece in (packed[:50], packed[50:], b"")
    )  # fmt: skip
    return {
        "good-zstd": plain + _SEPARATOR + coded,
        "good-endless": plain + _SEPARATOR + b"HTTP/1.0 200 OK\r\n\r\n" + ARTIFACT[:0] + ARTIFACT,
        "good-chunked": plain
        + _SEPARATOR
        + chunked.replace(b"\r\n\r\n", b"\r\nContent-Encoding: zstd\r\n\r\n")
        + pieces,
        "bad-missing": _answer(b"", "404 Not Found") + _SEPARATOR + _answer(b"", "410 Gone"),
        "bad-redirect": _answer(b"", "302 Found", Location="http://127.0.0.1:1/") + _SEPARATOR,
        "bad-length": plain.replace(b"Length: ", b"Length: 9") + _SEPARATOR + coded,
        "good-negative": plain.replace(b"Length: ", b"Length: -") + _SEPARATOR + coded,
        "bad-gzip": _answer(entry, Content_Encoding="gzip") + _SEPARATOR + coded,
        "bad-bomb": plain
        + _SEPARATOR
        + _answer(zstd.compress(bytes(1 << 18)), Content_Encoding="zstd"),
        "bad-silence": _SEPARATOR,
        "bad-continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 50 + _SEPARATOR + coded,
        "bad-chunks": chunked + b"-1\r\n" + _SEPARATOR + chunked + b"ffffffffffffffff\r\nx",
    }  # fmt: skip


_TOKENS = (
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 404 Not Found\r\n", b"HTTP/1.1 500 X\r\n", b"\r\n\r\n",
    b"Content-Length: 0\r\n", b"Content-Encoding: gzip\r\n", b"Content-Encoding: zstd\r\n",
    b"Content-Encoding: deflate\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
    b"Location: /\r\n", b"Set-Cookie: a\r\n", _SEPARATOR, b"\0", b"\r", b": ",
)  # fmt: skip

TARGETS = (Target("http", _http, _seeds, (HTTP,), _TOKENS, weight=25),)
