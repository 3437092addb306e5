"""`KvEventSubscription`: a server's end of its replicas' KV events; belongs to the server's event loop."""

import asyncio
import logging
from typing import Any

import zmq
import zmq.asyncio

from openinfer_ray.kv_events.curve import connect_with, tcp_endpoint
from openinfer_ray.kv_events.keys import CurveSecrets
from openinfer_ray.kv_events.messages import END, SEQUENCE_BYTES, read_message
from openinfer_ray.kv_events.stream import KvEventStream
from openinfer_ray.kv_events.told_prefixes import ToldPrefixes
from openinfer_ray.replica_spec import EventPorts

logger = logging.getLogger("openinfer.engine")

_PAUSE_S = 1.0  # after a replay that was not answered


class KvEventSubscription:
    """One for all replicas of an application.

    Args:
        secrets: of the application.
        patience_s: what a replay may take.
    """

    def __init__(self, secrets: CurveSecrets, *, patience_s: float) -> None:
        self._secrets = secrets
        self._patience_s = patience_s
        self._context: zmq.asyncio.Context | None = None

    async def follow(self, name: str, host: str, ports: EventPorts, held: ToldPrefixes) -> None:
        """Keeps `held` as a replica says, until it is cancelled."""
        replay = tcp_endpoint(host, ports.replay)
        stream = KvEventStream(held)
        subscribed = self._open(zmq.SUB)
        try:
            subscribed.subscribe(b"")
            subscribed.connect(tcp_endpoint(host, ports.events))
            await self._replay(name, stream, replay)
            while True:
                sequence, batch = read_message(await subscribed.recv_multipart())
                if not stream.hear(sequence, batch):
                    await self._replay(name, stream, replay)
                    stream.hear_after_gap(sequence, batch)
        finally:
            subscribed.close(linger=0)

    def close(self) -> None:
        """After all that follow have ended."""
        if self._context is not None:
            self._context.destroy(linger=0)

    def _open(self, kind: int) -> "zmq.asyncio.Socket":
        if self._context is None:
            self._context = zmq.asyncio.Context()
        opened: Any = self._context.socket(kind)
        connect_with(opened, self._secrets)
        return opened

    async def _replay(self, name: str, stream: KvEventStream, endpoint: str) -> None:
        """Asks for what is missing until the replica answers."""
        is_told = False
        while True:
            try:
                async with asyncio.timeout(self._patience_s):
                    stream.replayed(await self._ask(stream.next_sequence, endpoint))
                return
            except TimeoutError:
                if not is_told:
                    logger.warning("replica %s does not say what it holds; requests reach it by what was sent", name)
                is_told = True
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, first: int, endpoint: str) -> list[tuple[int, bytes]]:
        asking: Any = self._open(zmq.DEALER)  # pyzmq types what it sends in part only
        try:
            asking.connect(endpoint)
            await asking.send_multipart((b"", first.to_bytes(SEQUENCE_BYTES, "big")))
            batches: list[tuple[int, bytes]] = []
            while True:
                frames = await asking.recv_multipart()
                if frames[2:3] == [END]:
                    return batches
                batches.append(read_message(frames[1:]))
        finally:
            asking.close(linger=0)
