"""An HTTP server in the Bazel layout as a store: `/ac/<key>` and `/cas/<sha256>`.

Over urllib3 rather than obstore: its HTTP client takes no client certificate, and neither it nor
opendal can write to a server that is locked down to these two paths. Any server with GET, HEAD and
PUT will do; bazel-remote's zstd transfer is used once it has shown that it speaks it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import urllib3

from max_build.errors import ConfigError, StoreError
from max_build.store import actionresult
from max_build.store.base import ENTRY_LIMIT, PIECE, Item, Kind, Sink, Store
from max_build.store.compress import Inflater, deflate
from max_build.store.connection import CLIENT_CERTIFICATE, Connection, authorization, fault
from max_build.store.settings import CacheSettings, remote_fault

__all__ = ["HttpStore"]

_MISSING = {404, 410}
_KINDS = {
    401: "permission",
    403: "permission",
    405: "read-only",
    407: "permission",
    413: "full",
    507: "full",
}


class HttpStore(Store):
    """A cache server, over connections that are kept.

    Whether an upload gets on is for its socket to see: what is packed was all read before.

    Parameters
    ----------
    url
        `http://` or `https://`, with a path prefix or none. Credentials come from it, else from
        `MAX_BUILD_REMOTE_TOKEN`, else from `netrc`; proxies from the usual variables.
    settings
        Timeouts and TLS files.
    writable
        See `Store`.

    Raises
    ------
    ConfigError
        If the URL has no host, or the token is none that a header can hold.
    """

    label = "remote"

    def __init__(
        self,
        url: str,
        settings: CacheSettings | None = None,
        *,
        writable: bool = False,
    ) -> None:
        settings = settings or CacheSettings()
        parts = urlsplit(url)
        if fault := remote_fault(url):
            message = f"remote cache URL {fault}"
            raise ConfigError(message)
        self.writable = writable
        host = parts.netloc.rpartition("@")[2]
        base = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
        self._headers = {"User-Agent": "max-build", **authorization(url)}
        self._connection = Connection(base, settings)
        self._zstd = False

    def get_entry(self, key: str) -> bytes | None:
        with self._request("GET", "ac", key) as reply:
            if reply is None:
                return None
            data = reply.read(ENTRY_LIMIT + 1)
            # A reply without a length is read to its end, which may be early.
            if len(data) > ENTRY_LIMIT:
                message = f"{self.label} cache holds an entry that is too large, key {key[:12]}"
                raise StoreError(message, kind="corrupt")
        try:
            return actionresult.decode(data)
        except ValueError as error:
            message = f"{self.label} cache, key {key[:12]}: {error}"
            raise StoreError(message, kind="corrupt") from error

    def put_entry(self, key: str, data: bytes, *, replace: bool = False) -> bool:
        body = actionresult.encode(data)
        headers = {"Content-Length": str(len(body))}
        if not replace:
            with self._request("HEAD", "ac", key) as reply:
                if reply is not None:
                    return False
            headers["If-None-Match"] = "*"  # where the server knows it
        with self._request("PUT", "ac", key, body=body, headers=headers) as reply:
            return reply is not None and reply.status != 412

    def get_blob(self, digest: str, sink: Sink) -> bool:
        headers = {"Accept-Encoding": "zstd, identity"}
        with self._request("GET", "cas", digest, headers=headers) as reply:
            if reply is None:
                return False
            encoding = reply.headers.get("Content-Encoding", "identity")
            if encoding == "zstd":
                self._zstd = True
                inflater = Inflater(sink)
                for chunk in reply.stream(PIECE, decode_content=False):
                    inflater.feed(chunk)
                inflater.finish()
            elif encoding == "identity":
                for chunk in reply.stream(PIECE, decode_content=False):
                    sink.write(chunk)
            else:
                message = f"{self.label} cache sends blobs as {encoding!r}, which nobody asked for"
                raise StoreError(message, kind="server")
        return True

    def put_blob(self, digest: str, source: BinaryIO) -> None:
        size = _remaining(source)
        headers = {"Content-Type": "application/octet-stream"}
        with contextlib.ExitStack() as stack:
            body = source
            if self._zstd:
                body = stack.enter_context(SpooledTemporaryFile(max_size=8 << 20))  # type: ignore[assignment]
                deflate(source, body)
                body.seek(0)
                headers |= {"Content-Encoding": "zstd", "X-Digest-SizeBytes": str(size)}
                size = _remaining(body)
            headers["Content-Length"] = str(size)
            stack.enter_context(self._request("PUT", "cas", digest, body=body, headers=headers))

    def has_blob(self, digest: str) -> bool:
        with self._request("HEAD", "cas", digest) as reply:
            return reply is not None

    def list(self, kind: Kind) -> Iterator[Item]:
        message = f"{self.label} cache is an HTTP server, which does not list {kind}"
        hint = "name whole keys, or a lock (`--lock`)"
        raise StoreError(message, kind="unsupported", hint=hint)

    def delete(self, kind: Kind, name: str) -> None:
        with self._request("DELETE", kind, name):
            pass

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        kind: Kind,
        name: str,
        *,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Iterator[Any]:
        """The reply to a request; None for a name that is not there. The rest is StoreError."""
        if method in {"PUT", "DELETE"} and not self.writable:
            message = f"{self.label} cache is read-only"
            raise StoreError(message, kind="read-only")

        def failed(words: str, kind_of_fault: str) -> StoreError:
            place = f"{self.label} cache {self._connection.shown}"
            return StoreError(f"{place}: {method} {kind}/{name[:12]} {words}", kind=kind_of_fault)

        try:
            reply = self._connection.request(
                method,
                f"/{kind}/{name}",
                body,
                {**self._headers, **headers} if headers else self._headers,
            )
            try:
                if reply.status in _MISSING and method != "PUT":
                    reply.drain_conn()
                    yield None
                elif reply.status >= 300 and reply.status != 412:
                    # So nginx says it, to whom a plain 400 is due otherwise.
                    if reply.status == 400 and b"SSL certificate" in reply.read(1024):
                        raise failed(CLIENT_CERTIFICATE, "permission")
                    words = f"gave status {reply.status}"
                    raise failed(words, _KINDS.get(reply.status, "server"))
                else:
                    yield reply
                    reply.drain_conn()
            except BaseException:
                reply.close()  # half-read: not for the next request
                raise
            finally:
                reply.release_conn()
        except urllib3.exceptions.HTTPError as error:
            # Not the library's own words: they may hold the URL with what is secret in it.
            kind_of_fault, words = fault(error)
            raise failed(words, kind_of_fault) from error


def _remaining(source: BinaryIO) -> int:
    start = source.tell()
    end = source.seek(0, os.SEEK_END)
    source.seek(start)
    return end - start
