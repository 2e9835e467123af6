"""An HTTP server in the Bazel layout as a store: `/ac/<key>` and `/cas/<sha256>`.

Over urllib3 rather than obstore: its HTTP client takes no client certificate, and neither it nor
opendal can write to a server that is locked down to these two paths. Any server with GET, HEAD and
PUT will do; bazel-remote's zstd transfer is used once it has shown that it speaks it.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import urllib3

from max_build.errors import ConfigError, StoreError
from max_build.store import actionresult
from max_build.store.base import CHUNK, ENTRY_LIMIT, Item, Kind, Sink, Store
from max_build.store.compress import Inflater, deflate
from max_build.store.settings import CacheSettings

__all__ = ["TOKEN_VARIABLE", "HttpStore"]

TOKEN_VARIABLE = "MAX_BUILD_REMOTE_TOKEN"
"""Environment variable whose value is sent as bearer token."""

_REPEATED = {"GET", "HEAD", "DELETE"}
_MISSING = {404, 410}
_WORDS = {"timeout": "no answer in time", "refused": "cannot connect"}
_KINDS = {401: "permission", 403: "permission", 405: "read-only", 413: "full", 507: "full"}


class HttpStore(Store):
    """A cache server, over connections that are kept.

    Parameters
    ----------
    url
        `http://` or `https://`, with a path prefix or none. Credentials come from it, else from
        `MAX_BUILD_REMOTE_TOKEN`, else from `netrc`; proxies from the usual variables.
    settings
        Timeouts and TLS files.
    label, writable
        See `Store`.

    Raises
    ------
    ConfigError
        If the URL has no host, or a TLS file is of no use.
    """

    def __init__(
        self,
        url: str,
        settings: CacheSettings | None = None,
        label: str = "remote",
        *,
        writable: bool = False,
    ) -> None:
        settings = settings or CacheSettings()
        parts = urlsplit(url)
        if not parts.hostname:
            message = f"Remote cache URL {_shown(url)!r} names no host"
            raise ConfigError(message)
        self.label = label
        self.writable = writable
        self._host = parts.netloc.rpartition("@")[2]
        self._base = f"{parts.scheme}://{self._host}{parts.path.rstrip('/')}"
        self._headers = {"User-Agent": "max-build", **_authorization(url)}
        manager = _manager(parts.scheme, parts.hostname, settings)
        self._close = manager.clear
        # Straight to the one host, where no proxy has to be told the whole URL.
        proxied = isinstance(manager, urllib3.ProxyManager)
        self._pool: Any = manager if proxied else manager.connection_from_url(self._base)
        self._prefix = self._base if proxied else parts.path.rstrip("/")
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
                for chunk in reply.stream(CHUNK, decode_content=False):
                    inflater.feed(chunk)
                inflater.finish()
            elif encoding == "identity":
                for chunk in reply.stream(CHUNK, decode_content=False):
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
        raise StoreError(message, kind="unsupported")

    def delete(self, kind: Kind, name: str) -> None:
        with self._request("DELETE", kind, name):
            pass

    def close(self) -> None:
        self._close()

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
        what = f"{self.label} cache {self._base}: {method} {kind}/{name[:12]}"
        if method in {"PUT", "DELETE"} and not self.writable:
            message = f"{self.label} cache is read-only"
            raise StoreError(message, kind="read-only")
        try:
            reply = self._pool.urlopen(
                method,
                f"{self._prefix}/{kind}/{name}",
                body=body,
                headers={**self._headers, **headers} if headers else self._headers,
                preload_content=False,
                redirect=False,  # credentials go to the host they were given for
            )
            try:
                if reply.status in _MISSING:
                    reply.drain_conn()
                    yield None
                elif reply.status >= 300 and reply.status != 412:
                    message = f"{what} gave status {reply.status}"
                    kind_of_fault = _KINDS.get(reply.status, "server")
                    raise StoreError(message, kind=kind_of_fault)
                else:
                    yield reply
                    reply.drain_conn()
            except BaseException:
                reply.close()  # half-read: not for the next request
                raise
            finally:
                reply.release_conn()
        except urllib3.exceptions.HTTPError as error:
            reason = getattr(error, "reason", None) or error
            fault = _fault_kind(reason)
            # Not the library's own words: they may hold the URL with what is secret in it.
            message = f"{what}: {_WORDS.get(fault, type(reason).__name__)}"
            raise StoreError(message, kind=fault) from error


def _fault_kind(reason: object) -> str:
    if isinstance(reason, urllib3.exceptions.NewConnectionError):  # a TimeoutError, to urllib3
        return "refused"
    if isinstance(reason, (urllib3.exceptions.TimeoutError, TimeoutError)):
        return "timeout"
    return "server"


def _manager(scheme: str, host: str, settings: CacheSettings) -> urllib3.PoolManager:
    from urllib.request import getproxies, proxy_bypass

    options: dict[str, Any] = {
        "timeout": urllib3.Timeout(connect=settings.connect_timeout, read=settings.request_timeout),
        # Once more for a kept connection that the server just closed; never for more.
        "retries": urllib3.Retry(connect=0, read=1, status=0, other=0, allowed_methods=_REPEATED),
        "maxsize": 8,
    }
    if scheme == "https":
        options["ssl_context"] = _tls(settings)
    proxy = getproxies().get(scheme)
    if proxy and not proxy_bypass(host):
        headers = urllib3.make_headers(proxy_basic_auth=_userinfo(proxy))
        return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
    return urllib3.PoolManager(**options)


def _tls(settings: CacheSettings) -> ssl.SSLContext:
    context = ssl.create_default_context()
    try:
        if settings.remote_ca:
            context.load_verify_locations(Path(settings.remote_ca).expanduser())
        if settings.remote_cert:
            key = Path(settings.remote_key).expanduser() if settings.remote_key else None
            context.load_cert_chain(Path(settings.remote_cert).expanduser(), key)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(
            f"`{name}`"
            for name in (settings.remote_ca, settings.remote_cert, settings.remote_key)
            if name
        )
        message = f"TLS files of the remote cache ({files}) cannot be used: {error}"
        raise ConfigError(message, hint="they must be PEM files") from error
    return context


def _authorization(url: str) -> dict[str, str]:
    if userinfo := _userinfo(url):
        return urllib3.make_headers(basic_auth=userinfo)
    if token := os.environ.get(TOKEN_VARIABLE):
        return {"Authorization": f"Bearer {token}"}
    from netrc import NetrcParseError, netrc

    path = Path(os.environ.get("NETRC") or Path("~/.netrc").expanduser())
    with contextlib.suppress(OSError, NetrcParseError):
        found = netrc(str(path)).authenticators(urlsplit(url).hostname or "")
        if found is not None:
            return urllib3.make_headers(basic_auth=f"{found[0]}:{found[2]}")
    return {}


def _userinfo(url: str) -> str | None:
    userinfo, at, _ = urlsplit(url).netloc.rpartition("@")
    return unquote(userinfo) if at else None


def _shown(url: str) -> str:
    """A URL without what may be secret in it."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path.partition('?')[0]}"


def _remaining(source: BinaryIO) -> int:
    start = source.tell()
    end = source.seek(0, os.SEEK_END)
    source.seek(start)
    return end - start
