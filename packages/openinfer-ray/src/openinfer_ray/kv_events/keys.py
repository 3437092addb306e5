"""Secrets of KV events, all of them made from the token that server and replicas share.

A secret for each purpose is HMAC-SHA256 of the token over the purpose's name, so that none of them tells another.
"""

import hashlib
import hmac
from typing import NamedTuple

_REPLICA = b"openinfer kv events 1 replica"
_SERVER = b"openinfer kv events 1 server"
_DIGESTS = b"openinfer kv digests 1"


class CurveSecrets(NamedTuple):
    """Secret keys of Curve25519, 32 bytes each: that of all replicas, and that of servers."""

    replica: bytes
    server: bytes


def curve_secrets(token: bytes) -> CurveSecrets:
    return CurveSecrets(replica=_derived(token, _REPLICA), server=_derived(token, _SERVER))


def digest_key(token: bytes) -> bytes:
    """What blocks are named with where there is no --kv-key-file."""
    return _derived(token, _DIGESTS)


def _derived(token: bytes, purpose: bytes) -> bytes:
    return hmac.new(token, purpose, hashlib.sha256).digest()
