"""`RemoteEngine`: an engine in a process of its own, behind a socket."""

import asyncio
import contextlib
import secrets
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from openinfer_core.engine import EngineInfo, EngineStats
from openinfer_core.engine_process import Address, Launch
from openinfer_core.errors import ContractViolation, EngineClosed, Refused
from openinfer_core.events import TokenEvent
from openinfer_core.mailbox import Mailbox
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.wire import (
    Abort,
    AskStats,
    Close,
    Events,
    FrameBuffer,
    Hello,
    Refusal,
    Stats,
    Submit,
    ToClient,
    ToEngine,
    Welcome,
    encode_frame,
    to_client_decoder,
)

DIED = "the engine process died; its last words are in the log"
_CLOSE_DEADLINE_S = 10.0


def spawn_engine(module: str, spec: msgspec.Struct) -> "RemoteEngine":
    """Starts `python -m module`, which calls `run_engine_process`, and waits until its engine is loaded.

    Args:
        module: the child's main module.
        spec: what the child builds; sent as JSON.

    Raises:
        Refused: the child could not build the engine; its message.
        EngineClosed: the child died.
    """
    token = secrets.token_hex(32)
    # -P: the working directory is not on the child's import path
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        connection = _connect(process, Launch(token=token, spec=msgspec.Raw(msgspec.json.encode(spec))))
        connection.sendall(encode_frame(Hello(token)))
        return RemoteEngine(connection, _wait_for_welcome(connection), process=process)
    except BaseException:
        process.kill()
        process.communicate()
        raise


def _connect(process: "subprocess.Popen[bytes]", launch: Launch) -> socket.socket:
    if process.stdin is None or process.stdout is None:
        raise ContractViolation("the engine process was started without pipes")
    with contextlib.suppress(BrokenPipeError):  # a dead child says nothing, which is noticed below
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise EngineClosed(f"the engine process ended with code {process.wait()} before it began to serve")
    address = msgspec.json.decode(line, type=Address)
    if address.unix_path is not None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address.unix_path)
        return connection
    connection = socket.create_connection(("127.0.0.1", address.tcp_port or 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _wait_for_welcome(connection: socket.socket) -> EngineInfo:
    frames = FrameBuffer()
    while True:
        data = connection.recv(1 << 16)
        if not data:
            raise EngineClosed("the engine process ended while it was loading; its last words are above")
        for body in frames.feed(data):
            message = to_client_decoder.decode(body)
            if isinstance(message, Refusal):
                raise Refused(message.message)
            if not isinstance(message, Welcome):
                raise ContractViolation(f"the engine began with {type(message).__name__}")
            return message.info


class RemoteEngine:
    """The client's end of a link; implements `EngineHandle`."""

    def __init__(
        self, connection: socket.socket, info: EngineInfo, *, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self._connection = connection
        self._info = info
        self._process = process
        self._mailbox = Mailbox()
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()
        self._stats: deque[asyncio.Future[EngineStats]] = deque()
        self._closing = False
        self._lost = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        """What does not change while the engine lives."""
        return self._info

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request.

        Raises:
            EngineClosed: the engine has ended.
            InvalidRequest: the request's id is in use.
        """
        self._mailbox.open(request.request_id)
        self._send(Submit(request))

    def abort(self, request_id: RequestId) -> None:
        """Ends a request with `Finished(ABORT)`."""
        if not self._mailbox.ended:
            self._send(Abort(request_id))

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        """Yields all events that are there, each time there are any."""
        await self._attach()
        async for events in self._mailbox.read():
            yield events

    async def stats(self) -> EngineStats:
        """A fresh snapshot; `events` must have been started.

        Raises:
            EngineClosed: the engine has ended.
        """
        if self._mailbox.ended:
            raise EngineClosed(DIED)
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(answer)
        self._send(AskStats())
        return await answer

    async def close(self) -> None:
        """Ends the engine process and waits for it."""
        self._closing = True
        await self._attach()
        self._send(Close())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), _CLOSE_DEADLINE_S)
        if self._transport is not None:
            self._transport.close()
        if self._process is not None:
            await asyncio.to_thread(_reap, self._process)

    def received(self, message: ToClient) -> None:
        """Takes a message of the engine."""
        if isinstance(message, Events):
            self._mailbox.put(message.events)
        elif isinstance(message, Stats):
            answer = self._stats.popleft()
            if not answer.done():
                answer.set_result(message.stats)
        else:
            raise ContractViolation(f"the engine sent {type(message).__name__} on a running link")

    def lost(self) -> None:
        """The other side is gone."""
        self._lost.set()
        self._mailbox.end(None if self._closing else DIED)
        for answer in self._stats:
            if not answer.done():
                answer.set_exception(EngineClosed(DIED))
        self._stats.clear()

    def _send(self, message: ToEngine) -> None:
        frame = encode_frame(message)
        if self._transport is None:
            self._early += frame
        else:
            self._transport.write(frame)

    async def _attach(self) -> None:
        if self._transport is not None or self._lost.is_set():
            return
        loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        unix = self._connection.family == getattr(socket, "AF_UNIX", None)
        connect = loop.create_unix_connection if unix else loop.create_connection
        transport, _ = await connect(lambda: _LinkProtocol(self), sock=self._connection)
        transport.write(bytes(self._early))
        self._early.clear()
        self._transport = transport


def _reap(process: "subprocess.Popen[bytes]") -> None:
    """Lets the child end by itself, then kills it; closes its pipes."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(_CLOSE_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


class _LinkProtocol(asyncio.Protocol):
    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._frames = FrameBuffer()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._engine.received(to_client_decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # an error and an end of file mean the same: the engine is gone
        self._engine.lost()
