"""The engine's side of its links: each client gets its own events, and one that misbehaves loses only its link."""

import asyncio
import contextlib
import os
import resource
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec
import pytest

from openinfer_core import (
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    RequestId,
    TokenEvent,
    Tokens,
)
from openinfer_core.process.accepting import ACCEPT_PAUSE_S
from openinfer_core.process.engine_process import LinkKind, listening
from openinfer_core.process.host import LoopRunner
from openinfer_core.process.kept_prompts import ALL_KEPT_IDS, KEPT_IDS, prompt_parts
from openinfer_core.process.links import HELLO_DEADLINE_S, MAX_HELLO_BYTES, LinkServer
from openinfer_core.process.remote import EngineAccess, join_engine
from openinfer_core.process.wire import (
    MAX_FRAME_BYTES,
    PART_IDS,
    Abort,
    AskStats,
    BriefHello,
    Close,
    Events,
    FrameBuffer,
    Hello,
    Stats,
    Submit,
    SubmitAlike,
    ToClient,
    ToEngine,
    Welcome,
    encode_frame,
    to_client_decoder,
)
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions, simulated_token

TOKEN = "the right token"
FOREVER = 10**6
CLIENT_READ_BYTES = 1 << 16
MakeRequest = Callable[..., GenerateRequest]


class Client:
    """A raw client of a link server."""

    def __init__(self, listener: socket.socket) -> None:
        self.socket = socket.socket(listener.family, socket.SOCK_STREAM)
        self.socket.settimeout(30)
        self.socket.connect(listener.getsockname())
        self._frames = FrameBuffer()
        self._messages: list[ToClient] = []
        self.events: list[TokenEvent] = []

    def send(self, *messages: ToEngine) -> None:
        self.socket.sendall(b"".join(encode_frame(message) for message in messages))

    def receive(self) -> ToClient | None:
        """The next message; None at the end of file."""
        while not self._messages:
            try:
                data = self.socket.recv(CLIENT_READ_BYTES)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._messages += [to_client_decoder.decode(body) for body in self._frames.feed(data)]
        return self._messages.pop(0)

    def greet(self, token: str = TOKEN) -> Self:
        self.send(Hello(token))
        assert isinstance(self.receive(), Welcome)
        return self

    def read_until(self, done: Callable[[list[TokenEvent]], bool]) -> list[TokenEvent]:
        while not done(self.events):
            message = self.receive()
            assert isinstance(message, Events), message
            self.events += message.events
        return self.events

    def stats(self) -> EngineStats:
        self.send(AskStats())
        while not isinstance(message := self.receive(), Stats):
            assert isinstance(message, Events), message
            self.events += message.events
        return message.stats

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()


class Server:
    """A simulated engine behind a link server."""

    def __init__(
        self, listener: socket.socket, options: SimulatedOptions, *, loop: SimulatedLoop | None = None
    ) -> None:
        self.options = options
        self.now_s = 0.0
        self.listener = listener
        self.host = LoopRunner(loop or SimulatedLoop(options))
        self.links = LinkServer(
            listener,
            token=TOKEN,
            host=self.host,
            welcome=Welcome(SimulatedLoop(options).info),
            max_buffered_bytes=1 << 16,
            clock=lambda: self.now_s,
        )
        self._thread = threading.Thread(target=self.host.run, args=(self.links.deliver,))

    def __enter__(self) -> Self:
        self.links.start()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.host.post(Close())
        self._thread.join()
        self.links.close()
        self.links.close()

    def client(self) -> Client:
        return Client(self.listener)


@pytest.fixture(params=list(LinkKind))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with listening(request.param) as (listener, _), Server(listener, SimulatedOptions(tpot_s=0.001)) as server:
        yield server


@pytest.fixture
def idle_server() -> Iterator[Server]:
    """One whose requests never begin, until they are aborted."""
    with listening(LinkKind.UNIX) as (listener, _), Server(listener, SimulatedOptions(ttft_s=3000)) as server:
        yield server


def ends(events: list[TokenEvent]) -> int:
    return sum(isinstance(event, (Finished, Failed)) for event in events)


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls for what another thread does; the bound is there for a test that fails."""
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.002)


def token_ids(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


def test_client_with_the_token_is_served(server: Server, make_request: MakeRequest) -> None:
    request = make_request(1, max_tokens=3)
    with server.client().greet() as client:
        client.send(Submit(request))
        events = client.read_until(lambda events: ends(events) == 1)
    assert token_ids(events) == [simulated_token(request, i, server.options) for i in range(3)]
    assert events[-1] == Finished(RequestId(1), FinishReason.LENGTH, 3, 3, 0)


def test_link_without_long_prompts_leaves_others_what_all_may_keep(idle_server: Server) -> None:
    def allowed(*, keeps_prompts: bool) -> int:
        client = stack.enter_context(idle_server.client())
        client.send(Hello(TOKEN) if keeps_prompts else BriefHello(TOKEN))
        welcome = client.receive()
        assert isinstance(welcome, Welcome)
        return welcome.kept_ids

    with contextlib.ExitStack() as stack:
        assert [allowed(keeps_prompts=False) for _ in range(2)] == [0, 0]
        places = ALL_KEPT_IDS // KEPT_IDS
        assert [allowed(keeps_prompts=True) for _ in range(places)] == [KEPT_IDS] * places
        assert allowed(keeps_prompts=True) == 0


class GrammarsSeen(SimulatedLoop):
    """Notes the grammars of requests."""

    def __init__(self, options: SimulatedOptions) -> None:
        super().__init__(options)
        self.grammars: list[Grammar | None] = []

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        self.grammars.append(request.sampling.grammar)
        plain = msgspec.structs.replace(request.sampling, grammar=None)
        return super().submit(msgspec.structs.replace(request, sampling=plain))


def test_grammar_of_many_outputs_reaches_the_engine_with_each_and_is_there_once(make_request: MakeRequest) -> None:
    regex, lark = (Grammar(kind=kind, text="a" * 100_000) for kind in (GrammarKind.REGEX, GrammarKind.LARK))
    sent = [*16 * [regex], None, regex, lark, regex, None]
    options = SimulatedOptions()
    loop = GrammarsSeen(options)

    async def submit_all(access: EngineAccess) -> None:
        handle, ended = join_engine(access), 0
        for number, grammar in enumerate(sent):
            request = make_request(number, max_tokens=1)
            sampling = msgspec.structs.replace(request.sampling, grammar=grammar)
            handle.submit(msgspec.structs.replace(request, sampling=sampling))
        async for events in handle.events():
            ended += ends(events)
            if ended == len(sent):
                break
        await handle.close()

    with listening(LinkKind.UNIX) as (listener, address), Server(listener, options, loop=loop):
        asyncio.run(submit_all(EngineAccess(address=address, token=TOKEN)))
    assert loop.grammars == sent
    assert len({id(grammar) for grammar in loop.grammars[:18] if grammar is not None}) == 1


def test_client_that_refers_to_a_grammar_that_it_never_sent_is_dropped(
    server: Server, make_request: MakeRequest
) -> None:
    with server.client().greet() as bad, server.client().greet() as good:
        bad.send(SubmitAlike(make_request(1)))
        assert bad.receive() is None
        good.send(Submit(make_request(1)))
        assert ends(good.read_until(lambda events: ends(events) == 1)) == 1


def test_long_prompts_of_two_clients_with_the_same_id_reach_the_engine_whole(make_request: MakeRequest) -> None:
    options = SimulatedOptions(num_token_ids=60_000)
    prompts = [tuple(range(begin, begin + 3 * PART_IDS + 5)) for begin in (1, 2)]
    requests = [make_request(1, prompt=prompt, max_tokens=3) for prompt in prompts]
    with (
        listening(LinkKind.UNIX) as (listener, _),
        Server(listener, options) as server,
        server.client().greet() as first,
        server.client().greet() as second,
    ):
        for client, request in zip((first, second), requests, strict=True):
            parts, rest = prompt_parts(request)
            client.send(*parts, Submit(rest))
        for client, request in zip((first, second), requests, strict=True):
            events = client.read_until(lambda events: ends(events) == 1)
            assert token_ids(events) == [simulated_token(request, i, options) for i in range(3)]
            assert events[-1] == Finished(RequestId(1), FinishReason.LENGTH, 3 * PART_IDS + 5, 3, 0)


def test_two_clients_with_the_same_ids_each_get_their_own_events(server: Server, make_request: MakeRequest) -> None:
    with server.client().greet() as first, server.client().greet() as second:
        prompts = {first: (1, 2), second: (8, 9)}
        for client, prompt in prompts.items():
            client.send(*[Submit(make_request(i, prompt=(*prompt, i), max_tokens=9)) for i in range(8)])
        for client, prompt in prompts.items():
            events = client.read_until(lambda events: ends(events) == 8)
            for i in range(8):
                request = make_request(i, prompt=(*prompt, i))
                mine = [event for event in events if event.request_id == i]
                assert token_ids(mine) == [simulated_token(request, k, server.options) for k in range(9)]
                assert ends(mine) == 1


def test_abort_ends_the_clients_own_request_and_not_another_clients_of_that_id(
    idle_server: Server, make_request: MakeRequest
) -> None:
    with idle_server.client().greet() as first, idle_server.client().greet() as second:
        for client in (first, second):
            client.send(Submit(make_request(1)))
        wait_until(lambda: first.stats().running == 2)
        second.send(Abort(RequestId(1)), Abort(RequestId(99)))
        assert second.read_until(lambda events: ends(events) == 1) == [
            Finished(RequestId(1), FinishReason.ABORT, 3, 0, 0)
        ]
        assert first.stats().running == 1
        assert first.events == []


def test_wrong_token_is_dropped_and_the_others_live(
    server: Server, make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    with server.client().greet() as good, server.client() as bad:
        bad.send(Hello("a wrong token"), Submit(make_request(1)))
        assert bad.receive() is None
        good.send(Submit(make_request(2)))
        good.read_until(lambda events: ends(events) == 1)
    assert "a Hello with the right token" in caplog.text


@pytest.mark.parametrize("message", [Close(), AskStats(), Abort(RequestId(1))], ids=lambda m: type(m).__name__)
def test_client_that_does_not_begin_with_hello_is_dropped_unheard(
    server: Server, message: ToEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with server.client() as bad:
        bad.send(message)
        assert bad.receive() is None
    with server.client().greet() as good:
        assert good.stats().running == 0


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack("<I", 0),
        struct.pack("<I", MAX_FRAME_BYTES + 1),
        struct.pack("<I", 9) + msgspec.msgpack.encode(["hello", 5]) + b"\0\0",
        bytes(encode_frame(Hello(TOKEN))),
        b"\xff" * 64,
    ],
    ids=["not msgpack", "empty", "oversized", "not a message", "a second hello", "noise"],
)
def test_garbage_frame_drops_its_client_and_aborts_its_requests(
    idle_server: Server, make_request: MakeRequest, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with idle_server.client().greet() as good, idle_server.client().greet() as bad:
        bad.send(Submit(make_request(1)))
        wait_until(lambda: good.stats().running == 1)
        bad.socket.sendall(garbage)
        while (message := bad.receive()) is not None:
            assert isinstance(message, Events)
        wait_until(lambda: good.stats().running == 0)
    assert "broke the protocol" in caplog.text


def test_request_out_of_range_drops_its_client_only(idle_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    body = msgspec.msgpack.encode(
        ["submit", {"request_id": 1, "prompt_token_ids": [1], "sampling": {"max_tokens": -1}}]
    )
    with idle_server.client().greet() as good, idle_server.client().greet() as bad:
        bad.socket.sendall(struct.pack("<I", len(body)) + body)
        assert bad.receive() is None
        assert good.stats().running == 0
    assert "max_tokens is -1" in caplog.text


def test_duplicate_id_drops_its_client_and_aborts_the_request(
    idle_server: Server, make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    with idle_server.client().greet() as good, idle_server.client().greet() as bad:
        bad.send(Submit(make_request(1)), Submit(make_request(1)))
        while bad.receive() is not None:
            pass
        wait_until(lambda: good.stats().running == 0)
    assert "request id 1 is in use" in caplog.text


def test_client_that_leaves_has_its_requests_aborted(idle_server: Server, make_request: MakeRequest) -> None:
    with idle_server.client().greet() as good:
        with idle_server.client().greet() as leaver:
            leaver.send(*[Submit(make_request(i)) for i in range(5)])
            wait_until(lambda: good.stats().running == 5)
        wait_until(lambda: good.stats().running == 0)
        good.send(Submit(make_request(1)))  # an id the leaver used
        wait_until(lambda: good.stats().running == 1)


def test_client_that_never_reads_is_dropped_and_the_engine_never_waits(
    make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        listening(LinkKind.UNIX) as (listener, _),
        Server(listener, SimulatedOptions()) as server,
        server.client().greet() as good,
        server.client().greet() as slow,
    ):
        slow.send(*[Submit(make_request(i, max_tokens=FOREVER)) for i in range(64)])
        wait_until(lambda: "bytes unread and is dropped" in caplog.text)
        wait_until(lambda: good.stats().running == 0)
        good.send(Submit(make_request(1, max_tokens=3)))
        good.read_until(lambda events: ends(events) == 1)
        assert good.stats().failed_requests == 0


def test_client_that_reads_late_but_within_bounds_gets_everything_in_order(make_request: MakeRequest) -> None:
    request = make_request(1, max_tokens=10_000)
    with (
        listening(LinkKind.UNIX) as (listener, _),
        Server(listener, SimulatedOptions()) as server,
        server.client() as late,
    ):
        late.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        late.greet()
        with server.client().greet() as watcher:
            late.send(Submit(make_request(1, max_tokens=900)))
            wait_until(lambda: watcher.stats().generated_tokens >= 900)
        events = late.read_until(lambda events: ends(events) == 1)
    assert token_ids(events) == [simulated_token(request, i, server.options) for i in range(900)]


def test_stranger_who_says_nothing_is_dropped_after_the_deadline(
    make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        listening(LinkKind.UNIX) as (listener, _),
        Server(listener, SimulatedOptions()) as server,
        server.client().greet() as good,
        server.client() as silent,
    ):
        server.client().greet().socket.close()  # the silent one has been accepted before it
        server.now_s = HELLO_DEADLINE_S + 1
        good.stats()
        assert silent.receive() is None
        good.send(Submit(make_request(1)))
        good.read_until(lambda events: ends(events) == 1)
    assert "has not said Hello" in caplog.text


def test_client_that_finds_no_descriptor_is_accepted_when_there_is_one_again(
    make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        listening(LinkKind.UNIX) as (listener, _),
        Server(listener, SimulatedOptions()) as server,
        server.client().greet() as good,
        socket.socket(listener.family, socket.SOCK_STREAM) as late,
    ):
        late.settimeout(30)
        lowest_free = os.dup(late.fileno())
        os.close(lowest_free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
            late.connect(listener.getsockname())
            for _ in range(3):  # each wakes the thread that accepts
                good.stats()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caplog.text.count("a client has to wait") == 1
        server.now_s += ACCEPT_PAUSE_S
        good.stats()
        late.sendall(encode_frame(Hello(TOKEN)))
        assert late.recv(1)
        good.send(Submit(make_request(1)))
        good.read_until(lambda events: ends(events) == 1)


def test_stranger_who_sends_too_much_before_hello_is_dropped(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with server.client() as stranger:
        stranger.socket.sendall(struct.pack("<I", MAX_FRAME_BYTES) + b"x" * MAX_HELLO_BYTES)
        assert stranger.receive() is None
    assert "too long for a Hello" in caplog.text


def test_close_says_shutdown_to_every_client_and_then_ends_the_links(make_request: MakeRequest) -> None:
    with listening(LinkKind.UNIX) as (listener, _), Server(listener, SimulatedOptions(ttft_s=3000)) as server:
        first, second = server.client().greet(), server.client().greet()
        first.send(Submit(make_request(1)))
        second.send(Submit(make_request(1)))
        wait_until(lambda: first.stats().running == 2)
        second.send(Close())
        for client in (first, second):
            with client:
                assert client.receive() == Events(
                    [Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine has shut down")]
                )
                server.links.close()
                assert client.receive() is None


def test_close_of_a_server_that_was_never_started_frees_its_sockets() -> None:
    with listening(LinkKind.TCP) as (listener, _):
        loop = SimulatedLoop(SimulatedOptions())
        LinkServer(listener, token=TOKEN, host=LoopRunner(loop), welcome=Welcome(loop.info)).close()
        assert listener.fileno() == -1


def test_unix_socket_is_its_owners_alone_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with listening(LinkKind.UNIX) as (_, address):
        assert address.unix_path is not None
        folder = Path(address.unix_path).parent
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_temporary_folder_too_long_for_a_unix_socket_falls_back_to_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with listening(LinkKind.UNIX) as (listener, address):
        assert address.unix_path is None
        assert listener.getsockname() == ("127.0.0.1", address.tcp_port)
    assert list(deep.iterdir()) == []


def test_small_messages_are_read_without_large_pieces_of_memory(idle_server: Server) -> None:
    """Each read once asked the allocator for a megabyte, and what lived in between kept the megabytes apart."""
    with idle_server.client() as client:
        client.greet()
        client.stats()
        tracemalloc.start()
        try:
            for _ in range(20):
                client.stats()
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most_bytes < 3 * CLIENT_READ_BYTES
