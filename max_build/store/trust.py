"""Who vouches for an entry: Ed25519 signatures, and what each tier demands of them."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max_build.errors import ConfigError
from max_build.store.entry import Sealed, signed_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["FORM", "Signer", "Verifier", "new_key", "public_key", "read_signer"]

_NEEDS = "`pip install max-build[trust]` brings the `cryptography` package"


FORM = "`name:base64` of 32 bytes"
"""What a public key looks like, for messages."""


def public_key(text: str) -> tuple[str, bytes]:
    """The name and the raw key in `name:base64`; no bytes where it is not of that form."""
    name, _, encoded = text.partition(":")
    raw = _unbase64(encoded)
    return name, raw if name and len(raw) == 32 else b""


class Verifier:
    """Checks entries against the public keys of a project.

    Parameters
    ----------
    public_keys
        `name:base64` of each raw 32-byte Ed25519 public key.

    Raises
    ------
    ConfigError
        If one of them is not of that form; all of them are named.
    """

    def __init__(self, public_keys: tuple[str, ...]) -> None:
        self._keys: dict[str, bytes] = {}
        wrong = []
        for position, text in enumerate(public_keys, 1):
            name, raw = public_key(text)
            if not raw:
                wrong.append(f"public key {position} must be {FORM}, got {text!r}")
            self._keys[name] = raw
        if wrong:
            raise ConfigError("\n".join(wrong), hint="`max-build key new` prints the line to use")

    def objection(self, key: str, sealed: Sealed) -> str:
        """Why the entry under `key` is not trusted: empty if it is, else a reason to count.

        One good signature of a known key is enough; signatures of keys nobody named are no use
        and no harm. `unsigned` means no known key signed, `altered` that one did, something else.
        """
        known = {name: text for name, text in sealed.signatures.items() if name in self._keys}
        if not known:
            return "unsigned"
        text = signed_text(key, sealed.payload)
        if any(self._good(self._keys[name], known[name], text) for name in known):
            return ""
        return "altered"

    def _good(self, public: bytes, signature: str, text: bytes) -> bool:
        try:
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import (
                Ed25519PublicKey,
            )
        except ImportError as error:
            message = "signatures cannot be checked: `cryptography` is not installed"
            raise ConfigError(message, hint=_NEEDS) from error
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(_unbase64(signature), text)
        except InvalidSignature:
            return False
        return True


class Signer:
    """Signs what this machine publishes."""

    def __init__(self, name: str, key: Ed25519PrivateKey) -> None:
        self._name = name
        self._key = key

    @property
    def public(self) -> str:
        """The line of `public-keys` by which it is known."""
        return _line(self._name, self._key.public_key().public_bytes_raw())

    def sign(self, key: str, payload: bytes) -> Mapping[str, str]:
        """The signature of a payload that will stand under `key`: name → base64."""
        signature = self._key.sign(signed_text(key, payload))
        return {self._name: base64.b64encode(signature).decode()}


def new_key(name: str, path: Path) -> str:
    """Make a key pair: the private key into `path` (0600), the public line as the result.

    The file holds `name:base64` of the raw private key, like the public line it belongs to.

    Raises
    ------
    ConfigError
        If the name is not plain, or the file is there already.
    """
    if not name or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        message = f"a key's name is made of letters, digits, `-`, `_` and `.`, got {name!r}"
        raise ConfigError(message)
    key = _ed25519().Ed25519PrivateKey.generate()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"the private key cannot be written to `{path}`: {error.strerror}"
        raise ConfigError(message, hint="give another file; keys are never replaced") from error
    with os.fdopen(fd, "w") as file:
        file.write(f"{name}:{base64.b64encode(key.private_bytes_raw()).decode()}\n")
    return _line(name, key.public_key().public_bytes_raw())


def read_signer(path: Path) -> Signer:
    """Read a private key that `new_key` wrote.

    Raises
    ------
    ConfigError
        If the file cannot be read or holds something else. Its content is not shown.
    """
    try:
        name, _, encoded = path.read_text().strip().partition(":")
    except (OSError, UnicodeDecodeError) as error:
        message = f"signing key `{path}` cannot be read: {getattr(error, 'strerror', error)}"
        raise ConfigError(message) from error
    raw = _unbase64(encoded)
    if not name or len(raw) != 32:
        message = f"signing key `{path}` is not `name:base64` of a private key"
        raise ConfigError(message, hint="`max-build key new` makes one")
    return Signer(name, _ed25519().Ed25519PrivateKey.from_private_bytes(raw))


def _line(name: str, public: bytes) -> str:
    return f"{name}:{base64.b64encode(public).decode()}"


def _ed25519() -> Any:  # a module
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        message = "records cannot be signed: `cryptography` is not installed"
        raise ConfigError(message, hint=_NEEDS) from error
    return ed25519


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
