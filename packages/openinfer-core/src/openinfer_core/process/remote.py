"""`RemoteEngine`: an engine in a process of its own, reached over a socket."""

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from openinfer_core.control import ControlCommand, checked_command
from openinfer_core.engine import EngineInfo, EngineStats
from openinfer_core.errors import ContractViolation, EngineClosed, OpenInferError, Refused
from openinfer_core.events import TokenEvent
from openinfer_core.process.child import EngineChild, connect_to
from openinfer_core.process.engine_process import Address, LinkKind, default_link
from openinfer_core.process.kept_prompts import SentPrompts, prompt_parts
from openinfer_core.process.mailbox import Mailbox
from openinfer_core.process.wire import (
    Abort,
    AskStats,
    BriefHello,
    Close,
    Control,
    Controlled,
    Ended,
    Events,
    FrameBuffer,
    Hello,
    StartRefusal,
    Stats,
    ToClient,
    Welcome,
    encode_frame,
    raise_refusal,
    submission,
    to_client_decoder,
)
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.sampling import Grammar

logger = logging.getLogger("openinfer.engine")

DIED = "the engine process died; its last words are in the log"
BROKE_PROTOCOL = "the engine process broke the protocol; the log says how"
CLOSE_DEADLINE_S = 10.0  # for an engine process to end before it is killed


def spawn_engine(
    module: str,
    spec: msgspec.Struct,
    *,
    link: LinkKind | None = None,
    host: str | None = None,
    close_deadline_s: float = CLOSE_DEADLINE_S,
) -> "RemoteEngine":
    """Starts `python -m module`, which calls `run_engine_process`, and waits until its engine is loaded.

    None as `link` takes the platform's best; `close` waits `close_deadline_s` for the process before it kills it. With
    a `host`, an address of this machine, the link is TCP, and other machines that have `access` may join: neither its
    token nor what follows is encrypted, so the network must be private.

    Raises:
        Refused: the child could not build the engine; its message.
        EngineClosed: the child died.
    """
    token = secrets.token_hex(32)
    kind = link or (default_link() if host is None else LinkKind.TCP)
    child = EngineChild(module, spec, token=token, link=kind, host=host or "127.0.0.1")
    try:
        connection = child.connect()
        try:
            try:
                _show_token(connection, token)
                welcome = _welcome(connection)
            except EngineClosed as error:
                raise EngineClosed(f"{error} ({child.how_it_ended()})") from error
            access = EngineAccess(address=child.address, token=token)
            return RemoteEngine(
                connection,
                welcome.info,
                process=child,
                access=access,
                kept_ids=welcome.kept_ids,
                close_deadline_s=close_deadline_s,
            )
        except BaseException:
            connection.close()
            raise
    except BaseException:
        child.end(deadline_s=0.0)
        raise


class EngineAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What another process needs to join an engine. It has the token: hand it over a private pipe."""

    address: Address
    token: str


def join_engine(access: EngineAccess, *, keeps_prompts: bool = True) -> "JoinedEngine":
    """Another process's handle to an engine that is running; request ids need not differ from other handles'.

    Args:
        access: to the engine.
        keeps_prompts: whether long prompts come by it; links that keep none leave others what all may keep.

    Raises:
        EngineClosed: the engine is gone.
        ContractViolation: what is there is no engine of ours.
    """
    return join_connection(open_link(access, keeps_prompts=keeps_prompts))


def open_link(access: EngineAccess, *, keeps_prompts: bool = True) -> socket.socket:
    """A connection to a running engine that has been shown the token: what the engine says first is its `Welcome`.

    It may be handed on, byte for byte, to a process that may use the engine and is not told the token.

    Raises:
        EngineClosed: the engine is gone.
    """
    connection = connect_to(access.address)
    try:
        _show_token(connection, access.token, keeps_prompts=keeps_prompts)
    except EngineClosed:
        connection.close()
        raise
    return connection


def join_connection(connection: socket.socket) -> "JoinedEngine":
    """The handle to the engine at the other end of `open_link`; the connection is closed with it, or if this raises.

    Raises:
        EngineClosed: the engine is gone.
        ContractViolation: what is there is no engine of ours.
    """
    try:
        welcome = _welcome(connection)
        return JoinedEngine(connection, welcome.info, kept_ids=welcome.kept_ids)
    except BaseException:
        connection.close()
        raise


def _show_token(connection: socket.socket, token: str, *, keeps_prompts: bool = True) -> None:
    try:
        connection.sendall(encode_frame(Hello(token) if keeps_prompts else BriefHello(token)))
    except OSError as error:
        raise EngineClosed(f"the engine process is gone: {error}") from error


def _welcome(connection: socket.socket) -> Welcome:
    frames = FrameBuffer()
    try:
        while data := connection.recv(1 << 16):
            for body in frames.feed(data):
                return _welcoming(to_client_decoder.decode(body))
    except OSError as error:
        raise EngineClosed(f"the engine process is gone: {error}") from error
    except msgspec.MsgspecError as error:
        raise ContractViolation(f"the engine process sent a frame that is none: {error}") from error
    raise EngineClosed("the engine process ended while it was loading; its last words are in the log")


def _welcoming(message: ToClient) -> Welcome:
    if isinstance(message, StartRefusal):
        raise Refused(message.message)
    if not isinstance(message, Welcome):
        raise ContractViolation(f"the engine began with {type(message).__name__}")
    return message


class RemoteEngine:
    """The client's end of a link; implements `EngineHandle`.

    It belongs to the event loop in which `events`, `stats` or `close` is first used; what is submitted before is
    sent then. `connection` is a socket whose Hello was answered with `info`; `close` ends `process`, the child at
    its other end. Other processes may join by `access`. Of long prompts the engine keeps `kept_ids` ids.
    """

    def __init__(
        self,
        connection: socket.socket,
        info: EngineInfo,
        *,
        process: EngineChild | None = None,
        access: EngineAccess | None = None,
        kept_ids: int = 0,
        close_deadline_s: float = CLOSE_DEADLINE_S,
    ) -> None:
        self._prompts = SentPrompts(kept_ids)
        self._connection = connection
        self._info = info
        self._process = process
        self._access = access
        self._close_deadline_s = close_deadline_s
        self._mailbox = Mailbox()
        self._attaching = asyncio.Lock()
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early = bytearray()
        self._grammar: Grammar | None = None  # of the last request that had one, as the engine's side has it
        self._stats: deque[asyncio.Future[EngineStats]] = deque()
        self._controls: dict[int, asyncio.Future[str | None]] = {}
        self._control_numbers = itertools.count()
        self._closing = False
        self._reason = DIED
        self._lost = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def access(self) -> EngineAccess | None:
        return self._access

    def submit(self, request: GenerateRequest) -> None:
        prompt = request.prompt_token_ids
        sending = self._prompts.plan(
            prompt, request.retained_prefixes, cache_salt=request.cache_salt, beginnings=request.beginnings
        )
        parts, rest = prompt_parts(request, sending)
        known = [] if sending.known is None else [sending.known]
        frames = bytearray()
        for message in (*known, *parts, submission(rest, last=self._grammar)):
            frames += encode_frame(message)
        self._mailbox.open(request.request_id)
        self._send(frames)
        self._prompts.sent(sending, prompt)
        self._grammar = request.sampling.grammar or self._grammar

    def abort(self, request_id: RequestId) -> None:
        if request_id in self._mailbox:
            self._send(encode_frame(Abort(request_id)))

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        await self._attach()
        async for events in self._mailbox.read():
            yield events

    async def stats(self) -> EngineStats:
        await self._attach()
        self._mailbox.require_open()
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(answer)
        self._send(encode_frame(AskStats()))
        return await answer

    async def control(self, command: ControlCommand) -> None:
        command = checked_command(command)  # else the engine would drop this link, which breaks the protocol
        await self._attach()
        self._mailbox.require_open()
        number = next(self._control_numbers)
        answer = self._controls[number] = asyncio.get_running_loop().create_future()
        self._send(encode_frame(Control(number, command)))
        try:
            raise_refusal(await answer)
        finally:
            self._controls.pop(number, None)

    async def close(self) -> None:
        await self._attach()
        self._closing = True
        if not self._lost.is_set():
            self._take_leave()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), self._close_deadline_s)
        hangs = not self._lost.is_set()
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None:
            await asyncio.to_thread(self._process.end, deadline_s=0.0 if hangs else self._close_deadline_s)
        await self._lost.wait()

    def received(self, message: ToClient) -> None:
        """Takes a message of the engine; `ContractViolation` if it has no place here."""
        if isinstance(message, Events):
            self._mailbox.put(message.events)
        elif isinstance(message, Stats) and self._stats:
            answer = self._stats.popleft()
            if not answer.done():
                answer.set_result(message.stats)
        elif isinstance(message, Controlled):
            call = self._controls.get(message.number)  # its caller may have been cancelled
            if call is not None and not call.done():
                call.set_result(message.refusal)
        elif isinstance(message, Ended):
            self._reason = message.reason
        else:
            raise ContractViolation(f"the engine sent {type(message).__name__} unasked")

    def lost(self, failure: str | None = None) -> None:
        failure = failure or self._reason
        self._lost.set()
        self._mailbox.end(None if self._closing else failure)
        for answer in (*self._stats, *self._controls.values()):
            if not answer.done():
                answer.set_exception(EngineClosed(failure))
        self._stats.clear()

    def _take_leave(self) -> None:
        # The engine closes the link in answer.
        self._send(encode_frame(Close()))

    def _send(self, frame: bytearray) -> None:
        if self._transport is None:
            self._early += frame
        else:
            self._transport.write(frame)

    async def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._attaching:
            if self._loop is None:
                self._loop = loop
                await self._connect(loop)
            elif self._loop is not loop:
                raise ContractViolation("a RemoteEngine belongs to the event loop that used it first")

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        self._connection.setblocking(False)
        unix = self._connection.family == getattr(socket, "AF_UNIX", None)
        connect = loop.create_unix_connection if unix else loop.create_connection
        transport, _ = await connect(lambda: _LinkProtocol(self), sock=self._connection)
        transport.write(bytes(self._early))
        self._early.clear()
        self._transport = transport


class JoinedEngine(RemoteEngine):
    """A handle to another process's engine: `close` ends the link and aborts its requests, not the engine."""

    def _take_leave(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _LinkProtocol(asyncio.Protocol):
    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._frames = FrameBuffer()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._engine.received(to_client_decoder.decode(body))
        except (OpenInferError, msgspec.MsgspecError):
            logger.exception("the engine process broke the protocol")
            self._engine.lost(BROKE_PROTOCOL)
            if self._transport is not None:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # an error and an end of file mean the same: the engine is gone
        self._engine.lost()
