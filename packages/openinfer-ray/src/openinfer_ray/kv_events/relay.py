"""`KvEventsRelay`: a replica's KV events, from its engine on this machine to servers on others, encrypted.

    engine ═ ipc, in a folder that its user alone can enter ═► KvEventsRelay ═ TCP, CURVE ═► servers

Events and replay have a port each. Messages are passed on as they are, but for a server that asks for all: it is
answered with what the replica holds at that moment, because an engine keeps its last messages alone.
"""

import contextlib
import logging
import os
from pathlib import Path
from threading import Thread
from typing import Any

import zmq

from openinfer_ray.kv_events.curve import MAX_UNSENT, admit_servers, serve_with, tcp_endpoint
from openinfer_ray.kv_events.keys import CurveSecrets
from openinfer_ray.kv_events.messages import END, SEQUENCE_BYTES, read_message, snapshot
from openinfer_ray.kv_events.stream import KvEventStream
from openinfer_ray.kv_events.told_prefixes import ToldPrefixes
from openinfer_ray.replica_spec import EventPorts

logger = logging.getLogger("openinfer.engine")

_JOIN_S = 5.0
_ENGINE_MS = 5_000  # that the engine may take for a replay
_FROM_THE_BEGINNING = bytes(SEQUENCE_BYTES)


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
        self._replay_of_engine = f"ipc://{folder}/replay"
        self._held = ToldPrefixes(num_blocks=0)  # nothing is sent to a replica by itself
        self._stream = KvEventStream(self._held)
        self._wakened_fd, self._wake_fd = os.pipe()
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = admit_servers(self._context, secrets)
        try:
            anywhere = tcp_endpoint(host, "*")
            self._events, self._replay = (self._listen(kind, anywhere, secrets) for kind in (zmq.PUB, zmq.ROUTER))
            self._from_engine = self._connect(zmq.SUB, f"ipc://{folder}/events")
            self._from_engine.subscribe(b"")
            self._of_engine = self._connect(zmq.DEALER, self._replay_of_engine)
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

    def _listen(self, kind: int, endpoint: str, secrets: CurveSecrets) -> "zmq.Socket[bytes]":
        listening: zmq.Socket[bytes] = self._context.socket(kind)
        serve_with(listening, secrets)
        listening.bind(endpoint)
        return listening

    def _connect(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        connecting: zmq.Socket[bytes] = self._context.socket(kind)
        connecting.set_hwm(MAX_UNSENT)
        connecting.setsockopt(zmq.LINGER, 0)
        connecting.connect(endpoint)
        return connecting

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakened_fd, zmq.POLLIN)
        for source in (self._from_engine, self._replay, self._of_engine):
            poller.register(source, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            try:
                self._pass_on(ready)
            except Exception:  # the fault boundary: events are advice, and the replica serves without them
                logger.exception("KV events: a message could not be passed on")

    def _pass_on(self, ready: dict[Any, int]) -> None:
        if self._from_engine in ready:
            frames = self._from_engine.recv_multipart()
            self._note(frames)
            _send(self._events, frames)
        if self._replay in ready:
            frames = self._replay.recv_multipart()
            if frames[-1] == _FROM_THE_BEGINNING:
                self._tell_all(frames[:-1])
            else:
                _send(self._of_engine, frames)
        if self._of_engine in ready:
            _send(self._replay, self._of_engine.recv_multipart())

    def _note(self, frames: list[bytes]) -> None:
        sequence, batch = read_message(frames)
        if not self._stream.hear(sequence, batch):
            self._catch_up()
            self._stream.hear_after_gap(sequence, batch)

    def _tell_all(self, address: list[bytes]) -> None:
        """`address` ends with the empty frame. Without an answer of the engine there is none; the server asks again."""
        if not self._catch_up():
            return
        if (last := self._stream.next_sequence - 1) >= 0:
            number = last.to_bytes(SEQUENCE_BYTES, "big")
            _send(self._replay, [*address, b"", number, snapshot(self._held)])
        _send(self._replay, [*address, b"", END, b""])

    def _catch_up(self) -> bool:
        """Takes what the engine has told and this relay not heard; False if the engine does not answer."""
        asking = self._connect(zmq.DEALER, self._replay_of_engine)
        try:
            asking.setsockopt(zmq.RCVTIMEO, _ENGINE_MS)
            asking.send_multipart((b"", self._stream.next_sequence.to_bytes(SEQUENCE_BYTES, "big")))
            while (frames := asking.recv_multipart())[2:3] != [END]:
                self._stream.replayed([read_message(frames[1:])])
        except zmq.Again:
            logger.warning("the engine does not say again what its cache holds")
            return False
        finally:
            asking.close(linger=0)
        return True

    def _free(self) -> None:
        self._authenticator.stop()
        self._context.destroy(linger=0)
        os.close(self._wake_fd)
        os.close(self._wakened_fd)


def _send(target: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
    """One message, which is left out if its receiver is slow or gone: to the server that is a gap."""
    with contextlib.suppress(zmq.Again, zmq.ZMQError):
        target.send_multipart(frames, zmq.DONTWAIT)


def _port_of(listening: "zmq.Socket[bytes]") -> int:
    endpoint: bytes = listening.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return int(endpoint.decode().rpartition(":")[2])
