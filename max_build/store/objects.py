"""An object store as a store: S3 and what speaks it, Google Cloud Storage, Azure; through obstore.

Blobs are zstd frames. The names are those of a directory, below the URL's own path.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import obstore
from obstore import exceptions
from obstore.store import from_url

from max_build.errors import ConfigError, StoreError
from max_build.store.base import ENTRY_LIMIT, PIECE, Item, Kind, Sink, Store
from max_build.store.compress import Inflater, deflated
from max_build.store.settings import CacheSettings

__all__ = ["ObjectStore"]

_NAME = re.compile(r"[0-9a-f]{64}\Z")
_SECRET = re.compile(r"(?<=\?)[^\s\"')]+|(?<=//)[^\s/@]+(?=@)")  # of a URL: query, userinfo
_NO_BUCKET = re.compile("<Code>(NoSuchBucket|ContainerNotFound)<")
_PART = 5 << 20  # the least that S3 takes as a part
_AT_ONCE = 2  # parts under way, and one more is in the making


class ObjectStore(Store):
    """A prefix in a bucket.

    The library tells nothing of an upload but which parts it has taken.

    Parameters
    ----------
    url
        `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`. Endpoint, region
        and credentials come from the variables of each: `AWS_*` (or the profile in `~/.aws`),
        `GOOGLE_*`, `AZURE_*`.
    settings
        Timeouts, and the authority to trust. The library takes no client certificate.
    writable
        See `Store`.

    Raises
    ------
    ConfigError
        If the URL or its variables cannot be understood.
    """

    label = "remote"
    unseen = (_AT_ONCE + 1) * _PART

    def __init__(
        self,
        url: str,
        settings: CacheSettings | None = None,
        *,
        writable: bool = False,
    ) -> None:
        settings = settings or CacheSettings()
        self.writable = writable
        client: dict[str, Any] = {
            # Of the whole request, a day; that bytes keep coming is for `Tier` to see.
            "timeout": "86400s",
            "connect_timeout": timedelta(seconds=settings.connect_timeout),
            "allow_http": True,
        }
        self._unusable: StoreError | None = None
        if settings.remote_ca:
            try:
                authority = Path(os.path.expanduser(settings.remote_ca))
                client["root_certificate"] = authority.read_text()
            except (OSError, UnicodeDecodeError) as error:
                message = f"`{settings.remote_ca}` (`remote-ca`) cannot be read: {error}"
                self._unusable = StoreError(message)
        retries: Any = {
            "max_retries": 3,
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(milliseconds=500),
                "base": 2,
            },
            "retry_timeout": timedelta(seconds=60),
        }
        options = _s3_profile() if url.startswith("s3") else {}
        try:
            self._store: Any = from_url(url, client_options=client, retry_config=retries, **options)
        except (exceptions.BaseError, ValueError, TypeError) as error:
            message = f"it cannot be opened: {_plain(error)}"
            raise ConfigError(message) from error

    # --- entries

    def get_entry(self, key: str) -> bytes | None:
        with self._guarded("read", "ac", key):
            try:
                reply = obstore.get(self._store, _path("ac", key))
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    message = f"{self.label} cache: there is no such bucket or container"
                    hint = "check its name, and that these credentials may see it"
                    raise StoreError(message, kind="server", hint=hint) from error
                return None
            if reply.meta["size"] > ENTRY_LIMIT:
                message = f"{self.label} cache holds an entry that is too large, key {key[:12]}"
                raise StoreError(message, kind="corrupt")
            return bytes(reply.bytes())

    def put_entry(self, key: str, data: bytes, *, replace: bool = False) -> bool:
        with self._guarded("write", "ac", key):
            if not replace:
                return self._create(_path("ac", key), data)
            obstore.put(self._store, _path("ac", key), data, use_multipart=False)
        return True

    # --- blobs

    def get_blob(self, digest: str, sink: Sink) -> bool:
        with self._guarded("read", "cas", digest):
            try:
                reply = obstore.get(self._store, _path("cas", digest))
            except FileNotFoundError:
                return False
            inflater = Inflater(sink)
            for chunk in reply.stream(min_chunk_size=PIECE):
                inflater.feed(memoryview(chunk))
            inflater.finish()
        return True

    def put_blob(self, digest: str, source: BinaryIO) -> None:
        parts = deflated(source, _PART)
        first = next(parts)
        second = next(parts, None)
        with self._guarded("write", "cas", digest):
            path = _path("cas", digest)
            if second is None:
                obstore.put(self._store, path, first, use_multipart=False)
            else:
                whole = chain((first, second), parts)
                obstore.put(self._store, path, whole, chunk_size=_PART, max_concurrency=_AT_ONCE)

    def has_blob(self, digest: str) -> bool:
        with self._guarded("look up", "cas", digest):
            return self._head(_path("cas", digest)) is not None

    # --- upkeep

    def list(self, kind: Kind) -> Iterator[Item]:
        with self._guarded("list", kind, ""):
            for batch in obstore.list(self._store, prefix=f"{kind}/"):
                for found in batch:
                    name = found["path"].rpartition("/")[2]
                    if _NAME.match(name):
                        when = found["last_modified"].timestamp()
                        yield Item(kind, name, found["size"], when)

    def delete(self, kind: Kind, name: str) -> None:
        with self._guarded("write", kind, name), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, _path(kind, name))

    # --- leases: an object each, whose e_tag changes as long as its owner lives

    def take_lease(self, key: str, owner: bytes) -> bool:
        with self._guarded("write", "lease", key):
            return self._create(f"lease/{key}", owner)

    def lease_mark(self, key: str) -> str | None:
        with self._guarded("look up", "lease", key):
            meta = self._head(f"lease/{key}")
        return f"{meta['e_tag']} {meta['last_modified']}" if meta else None

    def renew_lease(self, key: str, owner: bytes) -> None:
        with self._guarded("write", "lease", key):
            if self._lease_owner(key) == owner:
                beat = owner + b"\n" + os.urandom(8).hex().encode()  # other bytes, other e_tag
                obstore.put(self._store, f"lease/{key}", beat, use_multipart=False)

    def drop_lease(self, key: str, owner: bytes | None) -> None:
        with self._guarded("write", "lease", key), contextlib.suppress(FileNotFoundError):
            if owner is None or self._lease_owner(key) == owner:
                obstore.delete(self._store, f"lease/{key}")

    def _lease_owner(self, key: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, f"lease/{key}").bytes()).split(b"\n")[0]
        except FileNotFoundError:
            return None

    def _head(self, path: str) -> Any:
        try:
            return obstore.head(self._store, path)
        except FileNotFoundError:
            return None

    def _create(self, path: str, data: bytes) -> bool:
        """Put an object that is not there; False if it is."""
        if self._head(path) is not None:  # some servers ignore the condition
            return False
        try:
            obstore.put(self._store, path, data, mode="create", use_multipart=False)
        except exceptions.AlreadyExistsError:
            return False
        return True

    @contextlib.contextmanager
    def _guarded(self, what: str, kind: str, name: str) -> Iterator[None]:
        if what == "write" and not self.writable:
            message = f"{self.label} cache is read-only"
            raise StoreError(message, kind="read-only")
        if self._unusable is not None:
            raise self._unusable
        try:
            yield
        except exceptions.BaseError as error:
            text = _plain(error)
            message = f"{self.label} cache cannot {what} {kind}/{name[:12]}: {text}"
            raise StoreError(message, kind=_fault_kind(error, text)) from error


def _path(kind: str, name: str) -> str:
    return f"{kind}/{name[:2]}/{name}"


def _plain(error: Exception) -> str:
    """The first line of what the library says, without anything of a URL that may be secret."""
    return _SECRET.sub("…", str(error).partition("\n")[0])[:300]


def _fault_kind(error: Exception, text: str) -> str:
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return "permission"
    low = text.lower()
    for sign, kind in (("timed out", "timeout"), ("timeout", "timeout"), ("connect", "refused")):
        if sign in low:
            return kind
    return "server"


def _s3_profile() -> dict[str, Any]:
    """What the profile in `~/.aws` says and no variable does.

    obstore reads the variables itself. Where neither says who we are, it asks the instance; with
    `AWS_EC2_METADATA_DISABLED=true` the bucket is read without credentials instead.
    """
    environ = os.environ
    config = configparser.RawConfigParser()
    profile = environ.get("AWS_PROFILE", "default")
    files = (
        environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
        environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    )
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        # Not by `Path`, which raises for a user without a home directory.
        config.read([os.path.expanduser(name) for name in files])
    found: dict[str, str] = {}
    for section in (f"profile {profile}", profile):
        if config.has_section(section):
            found.update(config.items(section))
    options: dict[str, Any] = {}
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or found.get("region")
    if region:
        options["region"] = region
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if endpoint := endpoint or found.get("endpoint_url"):
        options["endpoint"] = endpoint
    if "AWS_ACCESS_KEY_ID" in environ:
        return options
    if "aws_access_key_id" in found:
        options["access_key_id"] = found["aws_access_key_id"]
        options["secret_access_key"] = found.get("aws_secret_access_key", "")
        if token := found.get("aws_session_token"):
            options["session_token"] = token
    elif environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        options["skip_signature"] = True
    return options
