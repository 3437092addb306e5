"""`KvEventsRelay`: a replica's KV events, from its engine on this machine to servers on others, encrypted.

    engine ═ ipc, in a folder that its user alone can enter ═► KvEventsRelay ═ TCP, CURVE ═► servers

Events and replay have a port each. Messages are passed on as they are.
"""

import contextlib
import logging
import os
from pathlib import Path
from threading import Thread
from typing import Any

import zmq

from openinfer_ray.kv_events.curve import MAX_UNSENT, admit_servers, serve_with
from openinfer_ray.kv_events.keys import CurveSecrets
from openinfer_ray.replica_spec import EventPorts

logger = logging.getLogger("openinfer.engine")

_JOIN_S = 5.0


def events_setting(folder: Path) -> str:
    """`--kv-events` of the engine whose events are relayed; the folder belongs to its user alone."""
    return f"ipc://{folder}/events,replay=ipc://{folder}/replay"


class KvEventsRelay:
    """Listens until `close`, in a thread of its own.

    Args:
        folder: see `events_setting`.
        host: where servers reach this replica.
        secrets: of the application.

    Raises:
        zmq.ZMQError: it cannot listen there.
    """

    def __init__(self, folder: Path, *, host: str, secrets: CurveSecrets) -> None:
        self._is_closing = False
        self._wakened_fd, self._wake_fd = os.pipe()
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = admit_servers(self._context, secrets)
        try:
            place = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
            self._events, self._replay = (self._listen(kind, place, secrets) for kind in (zmq.PUB, zmq.ROUTER))
            self._from_engine = self._connect(zmq.SUB, f"ipc://{folder}/events")
            self._from_engine.subscribe(b"")
            self._of_engine = self._connect(zmq.DEALER, f"ipc://{folder}/replay")
        except BaseException:
            self._free()
            raise
        self.ports = EventPorts(events=_port_of(self._events), replay=_port_of(self._replay))
        self._thread = Thread(target=self._run, name="openinfer-kv-events-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        os.write(self._wake_fd, b"\0")
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():  # its sockets are not freed under it
            logger.warning("the relay of KV events does not end; it is left")
            return
        self._free()

    def _listen(self, kind: int, place: str, secrets: CurveSecrets) -> "zmq.Socket[bytes]":
        listening: zmq.Socket[bytes] = self._context.socket(kind)
        serve_with(listening, secrets)
        listening.bind(f"{place}:*")
        return listening

    def _connect(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        connecting: zmq.Socket[bytes] = self._context.socket(kind)
        connecting.set_hwm(MAX_UNSENT)
        connecting.setsockopt(zmq.LINGER, 0)
        connecting.connect(endpoint)
        return connecting

    def _run(self) -> None:
        ways = {
            self._from_engine: self._events,
            self._replay: self._of_engine,
            self._of_engine: self._replay,
        }
        poller = zmq.Poller()
        poller.register(self._wakened_fd, zmq.POLLIN)
        for source in ways:
            poller.register(source, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            for source, target in ways.items():
                if source in ready:
                    _pass_on(source, target)

    def _free(self) -> None:
        self._authenticator.stop()
        self._context.destroy(linger=0)
        os.close(self._wake_fd)
        os.close(self._wakened_fd)


def _pass_on(source: "zmq.Socket[bytes]", target: "zmq.Socket[bytes]") -> None:
    """One message, which is left out if its receiver is slow or gone: to the server that is a gap."""
    frames = source.recv_multipart()
    with contextlib.suppress(zmq.Again, zmq.ZMQError):
        target.send_multipart(frames, zmq.DONTWAIT)


def _port_of(listening: "zmq.Socket[bytes]") -> int:
    endpoint: bytes = listening.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return int(endpoint.decode().rpartition(":")[2])
