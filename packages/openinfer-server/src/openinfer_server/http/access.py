"""Who may ask: API keys, each with its tenant and its level.

    no key file     every client is a user without a tenant; routes of operators are closed
    a key file      public routes are open, all others need a key; routes of operators need one of level admin

The file is TOML, one table per key. A tenant may have several keys, so that one can be replaced while the other works:

    [[keys]]
    tenant = "acme"
    sha256 = "9f86d0…"      # or key = "…"
    level = "user"          # or "admin"
"""

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from openinfer_core.request import MAX_NAME_LENGTH
from openinfer_server.errors import UnusableKeys
from openinfer_server.http.api_errors import ApiError


class Level(StrEnum):
    """Who may use a route."""

    PUBLIC = "public"  # every client that reaches the port: probes and the document
    USER = "user"  # clients that may use the model
    ADMIN = "admin"  # operators of the server


logger = logging.getLogger("openinfer.server")

LEAST_KEY_CHARACTERS = 16
_KEY = re.compile(r"[\x21-\x7e]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key: itself or its digest.

    Raises:
        ValueError: there are both or neither, or a value is out of range. The message never has the key.
    """

    tenant: str  # whose requests it makes: what is shared fairly, and who sees whose responses and cached prefixes
    key: str | None = None  # at least 16 visible ASCII characters
    # SHA-256 of the key in lower-case hexadecimal digits, so that the file need not have the key.
    sha256: str | None = None
    level: Level = Level.USER

    def __post_init__(self) -> None:
        if not 1 <= len(self.tenant) <= MAX_NAME_LENGTH:
            raise ValueError(f"tenant must have 1 to {MAX_NAME_LENGTH} characters")
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        if self.key is not None and (len(self.key) < LEAST_KEY_CHARACTERS or not _KEY.fullmatch(self.key)):
            raise ValueError(f"key must have at least {LEAST_KEY_CHARACTERS} visible ASCII characters")
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ValueError("sha256 must have 64 lower-case hexadecimal digits")
        if self.level is Level.PUBLIC:
            raise ValueError("level must be user or admin; public routes need no key")

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 is not None else _digest((self.key or "").encode())


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[ApiKey]


class Access:
    """Decides about each request before anything of its body is read; with `keys` None, none is asked for.

    Raises:
        UnusableKeys: two entries have one key.
    """

    def __init__(self, keys: Sequence[ApiKey] | None) -> None:
        self._keys = None if keys is None else [(key.digest, key) for key in keys]
        if keys is not None and len({digest for digest, _ in self._keys or ()}) < len(keys):
            raise UnusableKeys("two entries of the key file have the same key")

    @classmethod
    def load(cls, path: str) -> "Access":
        """Reads a key file; an empty path asks for no keys.

        Raises:
            UnusableKeys: the file cannot be read, has no keys, or one of them is malformed.
        """
        if not path:
            return cls(None)
        try:
            data = Path(path).read_bytes()
            keys = msgspec.toml.decode(data, type=_KeyFile).keys
        except OSError as error:
            raise UnusableKeys(f"the key file {path} cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise UnusableKeys(f"the key file {path} is malformed: {error}") from error
        if not keys:
            raise UnusableKeys(f"the key file {path} has no keys; no client could use the server")
        if os.name == "posix" and Path(path).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            logger.warning("others on this machine can read the key file %s; chmod 600 keeps it to yourself", path)
        return cls(keys)

    @property
    def asks_for_keys(self) -> bool:
        return self._keys is not None

    def admit(self, level: Level, authorization: bytes | None, api_key: bytes | None) -> str:
        """The tenant of a request; empty for public routes and where no keys are asked for.

        OpenAI's clients send `authorization`, Anthropic's send `x-api-key`.

        Raises:
            ApiError: 401 or 403.
        """
        if level is Level.PUBLIC:
            return ""
        if self._keys is None:
            if level is Level.ADMIN:
                raise _forbidden("this route is for operators, and the server was started without --api-keys-file")
            return ""
        key = self._find(_presented(authorization, api_key))
        if level is Level.ADMIN and key.level is not Level.ADMIN:
            raise _forbidden("this route needs a key of level admin")
        return key.tenant

    def is_operator(self, authorization: bytes | None, api_key: bytes | None) -> bool:
        """Whether a request shows a key of level admin, on a route that asks for none."""
        try:
            self.admit(Level.ADMIN, authorization, api_key)
        except ApiError:
            return False
        return True

    def _find(self, presented: bytes) -> ApiKey:
        # Every key is compared, each in constant time: none can be guessed by parts.
        digest = _digest(presented)
        found: ApiKey | None = None
        for known, key in self._keys or ():
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise _unauthorized("the API key is not one of this server's")
        return found


def _digest(key: bytes) -> bytes:
    # keys are long random texts: a slow hash would protect nothing and cost every request
    return hashlib.sha256(key).digest()


def _presented(authorization: bytes | None, api_key: bytes | None) -> bytes:
    """The key that a client shows."""
    scheme, _, token = (authorization or b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    given = {key for key in (bearer, api_key or b"") if key}
    if len(given) == 1:
        return given.pop()
    if given:
        raise _unauthorized("the headers authorization and x-api-key have different keys; send one")
    raise _unauthorized("an API key is needed: send it as authorization: Bearer KEY, or as x-api-key: KEY")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, code="forbidden")
