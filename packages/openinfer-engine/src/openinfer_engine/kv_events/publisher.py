"""`KvEventPublisher`: a thread that sends KV events to subscribers, and again to those that missed some.

    PUB     [topic, sequence number, batch]                         to all, one message per step with changes
    ROUTER  asked [client, "", first sequence number]
            tells [client, "", topic, sequence number, batch] ...   for each batch that is still there
                  [client, "", "", -1, ""]                          at the end

Sequence numbers are 8 bytes, big-endian, from 0 on. A gap that replay cannot fill means that a subscriber no longer
knows what this engine has.
"""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from threading import Thread
from typing import Any

import msgspec
import zmq

from openinfer_core.errors import Refused
from openinfer_engine.kv_events.recorder import Change, TierChange
from openinfer_engine.kv_events.schema import (
    AllBlocksCleared,
    KvEvent,
    KvEventBatch,
    removed_event,
    stored_event,
    tier_event,
)
from openinfer_engine.kv_events.setting import KvEventsSetting
from openinfer_engine.kv_events.tables import TableEvents
from openinfer_kv_cache import StoredBlocks

logger = logging.getLogger("openinfer.engine.kv_events")

# Steps whose changes wait for the thread; with more, steps are left out, which a subscriber sees as a gap.
_MAX_WAITING = 100_000
# Messages for one slow subscriber; then ZeroMQ leaves some out for it, which is a gap again.
_MAX_UNSENT = 100_000
_LINGER_MS = 500
_JOIN_S = 2.0
_END = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    """Owns the sockets; `publish` and `close` are called from one thread and never wait for a subscriber.

    Args:
        setting: where events go.
        block_size_tokens: of the pool.
        table_windows: how many tokens the layers of each block table see; None: all. Events of several name theirs.

    Raises:
        Refused: an endpoint cannot be had.
    """

    def __init__(
        self, setting: KvEventsSetting, *, block_size_tokens: int, table_windows: Sequence[int | None] = (None,)
    ) -> None:
        self._block_size_tokens = block_size_tokens
        self._tables: TableEvents | None = None
        if tuple(table_windows) != (None,):
            self._tables = TableEvents(table_windows, block_size_tokens=block_size_tokens)
        self._topic = setting.topic.encode()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=setting.buffer_steps)
        self._waiting: deque[tuple[int, float, Sequence[Change]]] = deque()
        self._next_sequence = 0
        self._is_closing = False
        self._wake_fd, self._wakened_fd = _pipe()
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, setting.endpoint, connect=setting.connect)
            self._replay = None
            if setting.replay is not None:
                self._replay = self._open(zmq.ROUTER, setting.replay, connect=False)
        except BaseException:
            self._free()
            raise
        self._thread = Thread(target=self._run, name="openinfer-kv-events", daemon=True)
        self._thread.start()

    def publish(self, changes: Sequence[Change]) -> None:
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        if len(self._waiting) >= _MAX_WAITING:
            logger.warning("KV events of step %d are left out: %d steps wait to be sent", sequence, _MAX_WAITING)
            return
        self._waiting.append((sequence, time.time(), changes))
        self._wake()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._wake()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():  # its sockets are not freed under it
            logger.warning("the thread of KV events does not end; it is left behind")
            return
        self._free()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread wakes up anyway
            os.write(self._wake_fd, b"\0")

    def _open(self, kind: int, endpoint: str, *, connect: bool) -> "zmq.Socket[bytes]":
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.set_hwm(_MAX_UNSENT)
        opened.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            if connect:
                opened.connect(endpoint)
            else:
                opened.bind(endpoint)
        except zmq.ZMQError as error:
            opened.close()
            raise Refused(f"kv_events: {endpoint} cannot be used: {error}") from error
        return opened

    def _free(self) -> None:
        self._context.destroy(linger=_LINGER_MS)
        os.close(self._wake_fd)
        os.close(self._wakened_fd)

    # The thread's side.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakened_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        encoder = msgspec.msgpack.Encoder()
        while not self._is_closing or self._waiting:
            try:
                ready = dict(poller.poll(None if not self._waiting else 0))
                if self._wakened_fd in ready:
                    os.read(self._wakened_fd, 4096)
                while self._waiting:
                    self._send(encoder, *self._waiting.popleft())
                if self._replay in ready:
                    self._answer()
            except Exception:  # the fault boundary: events are advice, and never take the engine down
                logger.exception("KV events: a message could not be sent")

    def _send(
        self, encoder: msgspec.msgpack.Encoder, sequence: int, happened_s: float, changes: Sequence[Change]
    ) -> None:
        batch = KvEventBatch(happened_s, [event for change in changes for event in self._events(change)])
        message = (sequence.to_bytes(8, "big"), encoder.encode(batch))
        self._sent.append(message)
        self._pub.send_multipart((self._topic, *message))

    def _events(self, change: Change) -> Sequence[KvEvent]:
        if isinstance(change, TierChange):
            return [tier_event(change, block_size_tokens=self._block_size_tokens)]
        if self._tables is not None:
            return self._tables.events(change)
        if change is None:
            return [AllBlocksCleared()]
        if isinstance(change, StoredBlocks):
            return [stored_event(change, block_size_tokens=self._block_size_tokens)]
        return [removed_event(change)]

    def _answer(self) -> None:
        """One request at the ROUTER: everything from a sequence number on that is still there."""
        assert self._replay is not None  # noqa: S101 -- it was ready
        frames = self._replay.recv_multipart()
        # The client's address, and those of what passes requests on between it and this engine.
        addresses, asked = frames[:-2], frames[-2:]
        if not addresses or asked[0] or len(asked[1]) != 8:
            logger.warning("KV events: a replay request of %d frames is not [empty, sequence number]", len(frames) - 1)
            return
        for sequence, batch in self._sent:
            if sequence >= asked[1]:  # big-endian bytes of one length are in the order of their numbers
                self._replay.send_multipart((*addresses, b"", self._topic, sequence, batch))
        self._replay.send_multipart((*addresses, b"", b"", _END, b""))


def _pipe() -> tuple[int, int]:
    # The end that is written to never waits: the caller is the step loop.
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    return write_fd, read_fd
