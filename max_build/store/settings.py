"""Where the cache is and what it may do: the value that `open_cache` is made from."""

from __future__ import annotations

import contextlib
import os
from typing import Literal
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

__all__ = ["Access", "CacheSettings", "Trust", "remote_fault", "without_secrets"]

Access = Literal["read", "read-write"]
Trust = Literal["require", "warn", "off"]

_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "https", "http", "file")


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The cache's tiers, from the nearest to the farthest.

    Parameters
    ----------
    dir
        The developer's own directory; empty means `$XDG_CACHE_HOME/max-build` and its fallbacks.
    shared
        The team's directory, on this host or a network file system; empty means none.
    shared_mode
        Whether this machine may write to it.
    remote
        `s3://`, `gs://`, `az://`, `https://`, `http://` or `file://` URL; empty means none.
    remote_mode
        Whether this machine may write to it: writers opt in.
    remote_ca, remote_cert, remote_key
        Files for TLS: the authority to trust besides the system's, and this client's own
        certificate and key.
    shared_trust, remote_trust
        What an unsigned or wrongly signed record from that tier is: a miss (`require`), a
        warning, or nothing.
    public_keys
        Ed25519 public keys whose signatures count, as `name:base64`.
    signing_key
        File of the private key that signs what this machine publishes; empty means unsigned.
    max_size
        Bytes the local directory may hold before the oldest entries go.
    connect_timeout, request_timeout
        Seconds an outer tier gets to connect, and to answer or to move the next bytes. Where an
        upload does not show whether it moves: `budget`, and a second for each 256 KiB under way.
    budget
        Seconds a process waits in vain for an outer tier, all in all, before doing without it.
    lease
        Seconds without a sign of life after which another machine's compile is taken for dead.
    wait
        Seconds to wait for another's compile of the same key before compiling it here as well.
    """

    dir: str = ""
    shared: str = ""
    shared_mode: Access = "read-write"
    remote: str = ""
    remote_mode: Access = "read"
    remote_ca: str = ""
    remote_cert: str = ""
    remote_key: str = ""
    shared_trust: Trust = "off"
    remote_trust: Trust = "off"
    public_keys: tuple[str, ...] = ()
    signing_key: str = ""
    max_size: int = 20 << 30
    connect_timeout: float = 0.5
    request_timeout: float = 2.0
    budget: float = 3.0
    lease: float = 30.0
    wait: float = 1800.0


def remote_fault(url: str) -> str:
    """What is wrong with the form of a remote's URL, to come after its name; empty if nothing is.

    What may be secret in it is left out.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # its text may hold what is secret in the URL
        return "has a host or port that cannot be read, unlike `https://cache.team:8443`"
    host, shown = parts.netloc.rpartition("@")[2], without_secrets(url)
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in _SCHEMES:
        allowed = ", ".join(f"`{one}://`" for one in _SCHEMES)
        path = os.path.expanduser(url)
        meant = f"; did you mean `file://{quote(path)}`?" if os.path.isabs(path) else ""
        got = "" if "@" in shown else f", got {shown!r}"
        return f"must start with one of {allowed}{got}{meant}"
    if scheme == "file":
        if host in ("", "localhost") and parts.path and not (parts.query or parts.fragment):
            return ""
        meant = f"file:///{(host + parts.path).lstrip('/')}"
        return f"must have three slashes, an absolute path, no `?` or `#`: `{meant}`"
    return "" if parts.hostname else f"names no host or bucket, got {shown!r}"


def without_secrets(url: str) -> str:
    """A remote's URL less user, password and query, for others to see."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return ""
