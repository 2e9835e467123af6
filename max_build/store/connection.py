"""How the HTTP store reaches its server: TLS, proxies, credentials, and words for what fails."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import ssl
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import exceptions

from max_build.errors import ConfigError, StoreError
from max_build.store.base import SLOWEST
from max_build.store.settings import CacheSettings

__all__ = ["CLIENT_CERTIFICATE", "Connection", "authorization", "fault"]

CLIENT_CERTIFICATE = "failed: the server wants a client certificate it trusts (`remote-cert`)"

_REPEATED = {"GET", "HEAD", "PUT", "DELETE"}  # twice is as good as once; a body is rewound
_UNSEEN = 8 << 20  # bytes that may be in buffers of the network when the last one is sent
_TUNNEL = re.compile(r"Tunnel connection failed: (401|403|407)\b")
_REJECTED = ("CERTIFICATE_REQUIRED", "ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE")


class Connection:
    """Kept connections to one server, straight or through a proxy. Made at the first request.

    Parameters
    ----------
    base
        URL without credentials and without a slash at its end; requests are for paths below it.
    settings
        Timeouts and TLS files.
    """

    def __init__(self, base: str, settings: CacheSettings) -> None:
        self.shown = base
        """The server in messages."""
        self._base = base
        self._settings = settings
        self._lock = threading.Lock()
        self._pool: Any = None
        self._prefix = ""
        self._close: Callable[[], object] = lambda: None

    def request(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
        """The reply, with its body still to be read.

        Raises
        ------
        StoreError
            If a TLS file is of no use, or the address of the proxy.
        urllib3.exceptions.HTTPError
            If there is no reply; see `fault`.
        """
        with self._lock:
            if self._pool is None:
                self._open()
        unseen = min(int(headers.get("Content-Length", 0)), _UNSEEN)
        return self._pool.urlopen(
            method,
            self._prefix + path,
            body=body,
            headers=headers,
            preload_content=False,
            redirect=False,  # credentials go to the host they were given for
            timeout=urllib3.Timeout(
                connect=self._settings.connect_timeout,
                read=self._settings.request_timeout + unseen / SLOWEST,
            ),
        )

    def close(self) -> None:
        """Let go of the connections."""
        with self._lock:
            self._close()

    def _open(self) -> None:
        parts = urlsplit(self._base)
        settings = self._settings
        options: dict[str, Any] = {
            # Once more for a kept connection that the server, or a proxy (which is `other`),
            # just closed; never for more.
            "retries": urllib3.Retry(
                connect=0,
                read=1,
                status=0,
                other=1,
                allowed_methods=_REPEATED,
                respect_retry_after_header=False,
            ),
            "maxsize": 8,
        }
        if parts.scheme == "https":
            options["ssl_context"] = _tls(settings)
        proxy = getproxies().get(parts.scheme)
        if proxy and not proxy_bypass(parts.netloc):
            if "://" not in proxy:
                proxy = f"http://{proxy}"
            try:
                userinfo = _userinfo(proxy)
                _ = urlsplit(proxy).port
            except ValueError:  # its text may hold what is secret in the URL
                message = f"the URL in `{parts.scheme}_proxy` cannot be read"
                raise StoreError(message, hint="e.g. `http://proxy:3128`") from None
            headers = {"Proxy-Authorization": _basic(userinfo)} if userinfo else {}
            # It is told the whole URL.
            manager = urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
            self._pool, self._prefix, self._close = manager, self._base, manager.clear
            self.shown += " (through a proxy)"
            pool = manager.connection_from_url(self._base)
        else:
            pool = urllib3.connection_from_url(self._base, **options)
            self._pool, self._prefix, self._close = pool, parts.path, pool.close
        _send_within(settings.request_timeout, pool)


def authorization(url: str) -> dict[str, str]:
    """The header with the credentials for a URL: its own, else a token, else those of `netrc`.

    Raises
    ------
    ConfigError
        If the token is none that a header can hold.
    """
    if userinfo := _userinfo(url):
        return {"Authorization": _basic(userinfo)}
    if token := os.environ.get("MAX_BUILD_REMOTE_TOKEN", "").strip():
        if not (token.isascii() and token.isprintable()):
            message = "`MAX_BUILD_REMOTE_TOKEN` holds a character that is not printable ASCII"
            raise ConfigError(message, hint="set it to the token alone, as the server gave it")
        return {"Authorization": f"Bearer {token}"}
    from netrc import NetrcParseError, netrc

    # Not by `Path`, which raises for a user without a home directory.
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    with contextlib.suppress(OSError, NetrcParseError, UnicodeDecodeError):
        found = netrc(path).authenticators(urlsplit(url).hostname or "")
        if found is not None:
            return {"Authorization": _basic(f"{found[0]}:{found[2]}".encode())}
    return {}


def fault(error: Exception) -> tuple[str, str]:
    """The counted kind of a request that failed, and words that hold nothing of any URL."""
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, exceptions.ProxyError):
        status = _TUNNEL.match(str(reason.original_error))
        if status:
            return "permission", f"failed: the proxy gave status {status[1]}"
        return fault(reason.original_error)
    if isinstance(reason, exceptions.NewConnectionError):  # a TimeoutError, to urllib3
        return "refused", "failed: no connection"
    if isinstance(reason, (exceptions.TimeoutError, TimeoutError)):
        return "timeout", "got no answer in time"
    if isinstance(reason, exceptions.ProtocolError) and isinstance(reason.args[-1], TimeoutError):
        return "timeout", "took nothing more in time"
    cause = reason.args[0] if isinstance(reason, exceptions.SSLError) and reason.args else reason
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            "server",
            f"failed: SSL, {cause.verify_message} (`remote-ca` names an authority to trust)",
        )
    if isinstance(cause, ssl.SSLError):
        why = cause.reason or "failed"
        if any(sign in why for sign in _REJECTED):
            return "permission", CLIENT_CERTIFICATE
        return "server", f"failed: SSL, {why}"
    return "server", f"failed: {type(reason).__name__}"


def _send_within(seconds: float, pool: Any) -> None:
    """Have `pool` wait so long for each piece of a body to be taken.

    urllib3 itself sends a body within the time that there is for connecting.
    """
    connection: Any = pool.ConnectionCls

    class Sending(connection):  # type: ignore[misc]
        def endheaders(self, *arguments: Any, **options: Any) -> None:
            super().endheaders(*arguments, **options)
            self.sock.settimeout(seconds)  # connected by now; the body is next

    pool.ConnectionCls = Sending


def _tls(settings: CacheSettings) -> ssl.SSLContext:
    context = ssl.create_default_context()
    try:
        if settings.remote_ca:
            context.load_verify_locations(os.path.expanduser(settings.remote_ca))
        if settings.remote_cert:
            key = os.path.expanduser(settings.remote_key) if settings.remote_key else None
            # A passphrase, or else it would be asked for at the terminal.
            context.load_cert_chain(os.path.expanduser(settings.remote_cert), key, password="")
    except (OSError, ssl.SSLError) as error:
        names = (settings.remote_ca, settings.remote_cert, settings.remote_key)
        files = ", ".join(f"`{name}`" for name in names if name)
        message = f"TLS files of the remote cache ({files}) cannot be used: {error}"
        hint = "they must be PEM files, and the key without a passphrase"
        raise StoreError(message, hint=hint) from error
    return context


def _userinfo(url: str) -> bytes:
    """User and password of a URL as bytes: UTF-8 unless it says other ones by `%`."""
    return unquote_to_bytes(urlsplit(url).netloc.rpartition("@")[0])


def _basic(userinfo: bytes) -> str:
    return "Basic " + base64.b64encode(userinfo).decode()
