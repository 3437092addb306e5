"""CURVE (ZeroMQ RFC 26) between a replica and its servers: encrypted, and each end knows the other's key."""

import logging
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from openinfer_ray.kv_events.keys import CurveSecrets

MAX_UNSENT = 100_000  # messages for one slow peer; then ZeroMQ leaves some out, which is a gap
MAX_MESSAGE_BYTES = 64 << 20
HEARTBEAT_MS = 5_000


def serve_with(listening: "zmq.Socket[bytes]", secrets: CurveSecrets) -> None:
    """Has a socket take clients that know the replicas' public key alone; `admit_servers` says which of those."""
    _limit(listening)
    listening.curve_secretkey = z85.encode(secrets.replica)
    listening.curve_publickey = _public(secrets.replica)
    listening.curve_server = True


def connect_with(connecting: "zmq.Socket[bytes]", secrets: CurveSecrets) -> None:
    """Has a socket talk to replicas alone."""
    _limit(connecting)
    connecting.curve_secretkey = z85.encode(secrets.server)
    connecting.curve_publickey = _public(secrets.server)
    connecting.curve_serverkey = _public(secrets.replica)


def tcp_endpoint(host: str, port: int | str) -> str:
    """What ZeroMQ calls a port of a host, which may be an address of IPv6."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def admit_servers(context: "zmq.Context[Any]", secrets: CurveSecrets) -> ThreadAuthenticator:
    """Starts a thread that refuses clients of other keys; without it a context takes all. The caller stops it."""
    log = logging.getLogger("openinfer.engine.kv_events.curve")
    authenticator = ThreadAuthenticator(context, log=log)
    authenticator.start()
    authenticator.configure_curve_callback("*", credentials_provider=_Servers(_public(secrets.server)))
    return authenticator


class _Servers:
    """What pyzmq asks about each client that connects."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return key == self._key


def _public(secret: bytes) -> bytes:
    return zmq.curve_public(z85.encode(secret))


def _limit(limited: "zmq.Socket[bytes]") -> None:
    limited.set_hwm(MAX_UNSENT)
    limited.setsockopt(zmq.LINGER, 0)
    limited.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    limited.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    limited.setsockopt(zmq.IPV6, 1)
