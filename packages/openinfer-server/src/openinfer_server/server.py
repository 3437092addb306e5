"""Running the application: uvicorn with our protocol, signals, drain and exit codes.

serving ──SIGTERM, SIGINT or `stop`──► draining ──all answered, or drain_deadline_s──► ended, 0
   └────engine ended──► open requests get errors ──► ended, 1
"""

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import math
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec
import uvicorn

from openinfer_core.engine import EngineHandle
from openinfer_core.errors import brought_by
from openinfer_core.events import FailureKind
from openinfer_core.process.early_launch import EarlyLaunch
from openinfer_core.process.remote import RemoteEngine
from openinfer_core.process.resident import settle_memory
from openinfer_core.process.timeline import Timeline
from openinfer_server.app import App, app_of, load_app
from openinfer_server.errors import CannotListen, ServerError
from openinfer_server.http.acceptor import Acceptor, MakeProtocol, defer_silent
from openinfer_server.http.access import Access
from openinfer_server.http.connections import ConnectionTable, Slot
from openinfer_server.http.handover import Arrival, ArrivalAcceptor, HandOver
from openinfer_server.http.origins import LOOPBACK
from openinfer_server.http.protocol import BoundedProtocol, bounded_protocol
from openinfer_server.http.tls import tls_context
from openinfer_server.limits.descriptors import DescriptorBudget
from openinfer_server.limits.worker_table import WorkerTable
from openinfer_server.observability.repeated_warnings import RepeatedWarnings
from openinfer_server.options import EventLoop, ServerOptions
from openinfer_server.text.model_text import ModelText
from openinfer_server.workers.group import WorkerGroup, can_share_ports

logger = logging.getLogger("openinfer.server")
_REPEATED = RepeatedWarnings()  # one for the process: a logger has a filter once

LONG_CONTEXT_TOKENS = 16_384  # of a model whose processes for large requests are started with the server
DRAIN_GRACE_S = 2.0  # what aborted requests get to send their last event
LAST_WORDS_S = 1.0  # how long a server whose engine died answers, before it ends
_STARTED_GRACE_S = 0.2  # what an engine gets to be found started when the frontend cannot go on
_BACKLOG = 2048
# For how long a thread that renders or encodes may keep the interpreter from the event loop; Python's own is 5 ms.
_SWITCH_INTERVAL_S = 0.0005

OnReady = Callable[[str], None]  # called with the server's URL when it takes connections


def run(handle: EngineHandle, model_dir: Path, options: ServerOptions, *, on_ready: OnReady | None = None) -> int:
    """Serves an engine until a signal, then closes it; returns the process's exit code. For a process of its own.

    Args:
        handle: the engine; closed at the end.
        model_dir: where its tokenizer and chat template are.
        options: see there.
        on_ready: told the URL.

    Returns:
        0 after a signal and an orderly end, 1 if the engine ended by itself.

    Raises:
        ServerError: the server cannot start.
    """
    return run_starting(lambda: handle, model_dir, options, on_ready=on_ready)


def run_starting(
    launch: Callable[[], EngineHandle] | EarlyLaunch,
    model_dir: Path,
    options: ServerOptions,
    *,
    on_ready: OnReady | None = None,
    timeline: Timeline | None = None,
) -> int:
    """`run` for an engine that is not there yet: it starts in a thread while tokenizer and template are read here.

    `launch` starts the engine and may take long, or is doing so already; `timeline` gets the phases `text`, `engine`
    (what it took longer than that) and `http`.

    Raises:
        ServerError: the server cannot start. An engine that is still starting then ends with this process.
        OpenInferError: what `launch` raised.
    """
    marks = timeline or Timeline(begin_s=time.time())

    async def start_and_serve() -> int:
        Access.load(options.api_keys_file)  # what is wrong with these is said before an engine is started
        tls_context(options)
        DescriptorBudget.of_this_process(options).connections(options.max_connections)
        with listen(options) as listener:
            engine = launch if isinstance(launch, EarlyLaunch) else EarlyLaunch(launch)
            try:
                text = ModelText.load(model_dir, options)
                marks.mark("text")
                handle = await engine.ready()
            except BaseException:
                await asyncio.to_thread(engine.abandon, wait_s=_STARTED_GRACE_S)
                raise
            marks.mark("engine")
            try:
                app = app_of(handle, text, options)
                group = WorkerGroup(app.service.snapshot)
                settle_memory()  # the tables of a large vocabulary are not looked through again
                large = contextlib.ExitStack()

                def ready(url: str) -> None:
                    marks.mark("http")
                    if on_ready is not None:
                        on_ready(url)

                try:
                    addresses = _addresses_for_large(handle, options, large)
                    if options.workers > 1 or addresses:
                        app.service.peers = group
                        app.service.share(table := WorkerTable.create(options.workers + len(addresses)))
                        port: int = listener.getsockname()[1]
                        listening = msgspec.structs.replace(options, port=port)
                        group.prepare(handle, model_dir, listening, table, large=addresses)
                        await group.start()
                    if addresses and handle.info.max_model_tokens >= LONG_CONTEXT_TOKENS:
                        group.want_large()  # beside what follows: the first large request would wait for its start
                    if options.workers > 1:
                        marks.mark("workers")
                    hand_over = hand_over_of(app, addresses, group.want_large) if addresses else None
                    return await serve_app(app, listener, options, on_ready=ready, group=group, hand_over=hand_over)
                finally:
                    await group.end(options.drain_deadline_s)
                    large.close()
            finally:
                await handle.close()

    with asyncio.Runner(loop_factory=event_loop_factory(options.event_loop)) as runner:
        yield_interpreter()
        return runner.run(start_and_serve())


def _addresses_for_large(handle: EngineHandle, options: ServerOptions, stack: contextlib.ExitStack) -> Sequence[str]:
    """Paths of the sockets for large requests, in a private folder that the stack removes; none where none can be."""
    can_be_joined = isinstance(handle, RemoteEngine) and handle.access is not None
    is_possible = can_be_joined and can_share_ports() and not options.tls_cert_file
    if not options.large_request_bytes or not is_possible:
        return ()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="openinfer-"))  # mode 0700
    return [str(Path(folder) / f"large-{number}") for number in range(options.large_request_workers)]


def hand_over_of(app: App, addresses: Sequence[str], want: Callable[[], None]) -> HandOver:
    """What hands the application's large requests over, as far as another process may answer them."""
    posted = [route for route in app.router.routes if route.method == "POST"]
    return HandOver(
        addresses,
        [route.path for route in posted if route.is_stateless],
        returning=[route.path for route in posted if route.may_go_back],
        least_bytes=app.service.options.large_request_bytes,
        want=want,
        tenant_of=app.tenant_of,
    )


def listen_for_large(address: str) -> socket.socket:
    """A socket at a path, in place of one that a process left there."""
    Path(address).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    return listener


def yield_interpreter() -> None:
    # threads that render or encode must give the event loop the interpreter back soon; for a whole process
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


async def serve(
    handle: EngineHandle,
    model_dir: Path,
    options: ServerOptions,
    *,
    on_ready: OnReady | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Serves an engine until a signal (in the main thread) or `stop`; does not close it.

    Returns:
        0 after an orderly end, 1 if the engine ended by itself.

    Raises:
        ServerError: the server cannot start.
    """
    with listen(options) as listener:
        app = load_app(handle, model_dir, options)
        return await serve_app(app, listener, options, on_ready=on_ready, stop=stop)


async def serve_app(
    app: App,
    listener: socket.socket,
    options: ServerOptions,
    *,
    on_ready: OnReady | None = None,
    stop: asyncio.Event | None = None,
    protocol: type[asyncio.Protocol] | None = None,
    group: WorkerGroup | None = None,
    hand_over: HandOver | None = None,
) -> int:
    """Serves an application on a bound socket; see `serve`.

    A Unix socket takes the connections that `hand_over` of another process gives.
    """
    stopping = stop or asyncio.Event()
    url = _url(listener, options)
    takes_large = listener.family == socket.AF_UNIX
    budget = DescriptorBudget.of_this_process(options, takes_large=takes_large)
    # The first worker has refused what it has no room for; one for large requests has less, and takes what it can.
    possible = budget.connections_at_most if takes_large else budget.connections
    num_connections = possible(options.max_connections)
    budgets = app.service.budgets
    budgets.bound_connections(num_connections)
    config = _config(app, options, protocol or bounded_protocol(options, hand_over))

    def started() -> None:
        if options.host not in LOOPBACK and not app.service.access.asks_for_keys:
            logger.warning("every client that reaches %s may use the model: no --api-keys-file is given", options.host)
        logger.info(
            "serving %s on %s, %d connections at a time (%d open files)",
            ", ".join(app.service.model_names),
            url,
            num_connections,
            budget.limit,
        )
        if on_ready is not None:
            on_ready(url)

    server = _Server(config, budgets.connections, started, handshake_timeout_s=options.head_timeout_s)
    with _signals(stopping):
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="openinfer-http")
        await _until_end(app, serving, stopping, group)
        if app.service.link.died:
            # A probe that comes now is told why, by /health.
            await asyncio.sleep(LAST_WORDS_S)
        if group is not None:
            group.drain()
        await _drain(app, server, serving, options)
    return 1 if app.service.link.died or app.service.peers.lost is not None else 0


async def _until_end(
    app: App, serving: "asyncio.Task[None]", stopping: asyncio.Event, group: WorkerGroup | None
) -> None:
    """Returns when the end was asked for, or the engine or another worker ended, or the server failed."""
    events = [stopping, app.link_ended, *(() if group is None else (group.ended,))]
    ends = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait((serving, *ends), return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()


async def _drain(app: App, server: "_Server", serving: "asyncio.Task[None]", options: ServerOptions) -> None:
    """Takes no more requests, lets running ones end, aborts those that take too long."""
    link = app.service.link
    app.service.draining = True
    patience_s = 0.0 if link.dead else options.drain_deadline_s
    logger.info("draining %d requests for at most %g s", link.num_open, patience_s)
    server.drain(patience_s + DRAIN_GRACE_S)
    abort = asyncio.get_running_loop().call_later(
        patience_s, link.fail_all, FailureKind.SHUTDOWN, "the server is shutting down"
    )
    try:
        await serving
    finally:
        abort.cancel()
    logger.info("ended")


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling, which ends the process by the signal itself, and accepting."""

    def __init__(
        self,
        config: uvicorn.Config,
        connections: ConnectionTable,
        on_started: Callable[[], None],
        *,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._on_started = on_started
        self._handshake_timeout_s = handshake_timeout_s

    def drain(self, timeout_s: float) -> None:
        """Stops listening and ends within so many seconds."""
        self.config.timeout_graceful_shutdown = math.ceil(timeout_s)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        acceptors = [self._acceptor(listener) for listener in sockets or ()]
        self.servers = cast("list[asyncio.Server]", acceptors)  # closed, and waited for, as asyncio's own
        for acceptor in acceptors:
            acceptor.start()
        self._on_started()

    def _acceptor(self, listener: socket.socket) -> Acceptor:
        if listener.family == socket.AF_UNIX:
            return ArrivalAcceptor(listener, self._connections, self._protocol_of)
        return Acceptor(
            listener,
            self._connections,
            self._protocol_of(),
            context=self.config.ssl,
            handshake_timeout_s=self._handshake_timeout_s,
        )

    def _protocol_of(self, arrival: Arrival | None = None) -> MakeProtocol:
        make: Any = self.config.http_protocol_class

        def protocol_of(slot: Slot) -> asyncio.Protocol:
            protocol = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            if isinstance(protocol, BoundedProtocol):
                protocol.slot, protocol.arrival = slot, arrival
            return protocol

        return protocol_of

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _config(app: App, options: ServerOptions, protocol: type[asyncio.Protocol]) -> uvicorn.Config:
    context = tls_context(options)
    logging.getLogger("uvicorn.error").addFilter(_REPEATED)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        interface="asgi3",
        lifespan="on",
        log_config=None,
        log_level=max(logging.WARNING, logging.getLogger().getEffectiveLevel()),
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=options.keep_alive_s,
        ssl_context_factory=None if context is None else lambda config, default: context,
    )


@contextlib.contextmanager
def _signals(stopping: asyncio.Event) -> Generator[None]:
    """SIGTERM and SIGINT set the event, once: a second one has its usual effect. Only the main thread has signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, originals[number])
        loop.call_soon_threadsafe(stopping.set)

    originals = {int(number): signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, original in originals.items():
            signal.signal(number, original)


def listen(options: ServerOptions) -> socket.socket:
    """A socket bound to the options' address.

    Raises:
        CannotListen: the address is in use or not ours, or several workers cannot share it on this system.
    """
    shared = options.workers > 1
    if shared and not can_share_ports():
        raise CannotListen("several workers can share a port on Linux alone; use workers=1 here")
    try:
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG, reuse_port=shared)  # pyright: ignore[reportArgumentType]
    except OSError as error:
        raise CannotListen(f"cannot listen on {options.host} port {options.port}: {error.strerror}") from error
    defer_silent(listener, options.head_timeout_s)
    return listener


def _url(listener: socket.socket, options: ServerOptions) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.tls_cert_file else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def event_loop_factory(choice: EventLoop) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop; None for asyncio's own.

    Raises:
        ServerError: uvloop was asked for and is not installed.
    """
    if choice == EventLoop.ASYNCIO or (choice == EventLoop.AUTO and importlib.util.find_spec("uvloop") is None):
        return None
    if importlib.util.find_spec("uvloop") is None:
        raise ServerError(f"event_loop is uvloop, which is not installed: {brought_by('--uvloop')}")
    return importlib.import_module("uvloop").new_event_loop
