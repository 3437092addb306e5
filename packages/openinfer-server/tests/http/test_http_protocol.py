"""Raw sockets: what uvicorn's protocol and ours make of well-formed, malformed and hostile HTTP.

This is also the contract with uvicorn's minor version: an upgrade that calls our overrides at other times fails here.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from openinfer_server import ServerOptions
from openinfer_server.http.protocol import bounded_protocol
from openinfer_server.limits.descriptors import NEWCOMERS
from openinfer_server.testing import DEADLINE_S, ParrotLoop, wait_until

BODY = b'{"prompt": "stone", "max_tokens": 3}'


def request(body: bytes = BODY, *headers: bytes, path: bytes = b"/v1/completions", method: bytes = b"POST") -> bytes:
    lines = [method + b" " + path + b" HTTP/1.1", b"host: localhost", b"content-type: application/json"]
    lines += [b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def talk(server, *pieces: bytes, wait_for_close: bool = True) -> bytes:
    """Sends and reads until the server closes, or until one whole response came."""
    with socket.create_connection(server.address, timeout=DEADLINE_S) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                connection.sendall(piece)
        return read_all(connection) if wait_for_close else read_response(connection)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


def read_response(connection: socket.socket) -> bytes:
    """One response with a content-length, or chunked."""
    data = b""
    while True:
        head, separator, body = data.partition(b"\r\n\r\n")
        if separator and b"chunked" in head and body.endswith(b"0\r\n\r\n"):
            return data
        if separator and b"content-length" in head:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            if len(body) >= length:
                return data
        piece = connection.recv(65536)
        if not piece:
            return data
        data += piece


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def error(response: bytes) -> dict[str, object]:
    return json.loads(response.partition(b"\r\n\r\n")[2])["error"]


@pytest.fixture(scope="module")
def strict(model_dir, info):
    from openinfer_server.testing import ThreadedServer

    options = ServerOptions(port=0, head_timeout_s=0.2, body_timeout_s=0.2, max_head_bytes=4096, max_url_bytes=512)
    with ThreadedServer(ParrotLoop(info), model_dir, options) as server:
        yield server


def test_request_in_single_bytes_is_answered(shared):
    with socket.create_connection(shared.address, timeout=DEADLINE_S) as connection:
        for byte in request(BODY, b"connection: close"):
            connection.sendall(bytes([byte]))
        assert status(read_all(connection)) == 200


def test_pipelined_requests_are_answered_in_order(shared):
    stream = b'{"prompt": "stone", "max_tokens": 3, "stream": true}'
    data = talk(shared, request(stream) + request(BODY) + request(stream) + request(BODY, b"connection: close"))
    assert data.count(b"HTTP/1.1 200 OK") == 4
    assert [b"text/event-stream" in part for part in data.split(b"HTTP/1.1 ")[1:]] == [True, False, True, False]


def test_expect_continue_is_answered(shared):
    with socket.create_connection(shared.address, timeout=DEADLINE_S) as connection:
        whole = request(BODY, b"expect: 100-continue", b"connection: close")
        connection.sendall(whole[: -len(BODY)])
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(BODY)
        assert status(read_all(connection)) == 200


def test_old_client_that_expects_continue_gets_its_answer_and_nothing_else(shared):
    data = talk(shared, request(BODY, b"expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert status(data) == 200
    assert data.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"x, Chunked"])
def test_transfer_codings_other_than_chunked_are_refused_by_name(shared, coding):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    data = talk(shared, head + b"transfer-encoding: " + coding + b"\r\n\r\n0\r\n\r\n", wait_for_close=False)
    assert status(data) == 501
    assert error(data)["code"] == "unsupported_transfer_encoding"


def test_chunks_may_have_extensions_and_trailers(shared):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    chunks = b'0%x;name="a;b";c\r\n%s\r\n000\r\nx-sum: 1\r\n\r\n' % (len(BODY), BODY)
    data = talk(shared, head + b"transfer-encoding: Chunked\r\n\r\n" + chunks, wait_for_close=False)
    assert status(data) == 200


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked",
        b"content-length: 5\r\ncontent-length: 6",
        b"content-length: x",
        b"bad header",
        b"a: b\rc: d",
    ],
)
def test_ambiguous_or_malformed_head_is_400_and_closes(shared, head):
    first = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n\r\n0\r\n\r\n"
    data = talk(shared, first + request())
    assert status(data) == 400
    assert error(data)["code"] == "invalid_http"
    assert data.count(b"HTTP/1.1") == 1  # what follows is never taken for a request


@pytest.mark.parametrize(
    ("version", "hosts", "code"),
    [("1.1", 1, 200), ("1.1", 0, 400), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 1, 200), ("1.0", 2, 400)],
)
def test_request_has_one_host_header(shared, version, hosts, code):
    head = f"GET /version HTTP/{version}\r\n" + hosts * "Host: localhost\r\n" + "connection: close\r\n\r\n"
    data = talk(shared, head.encode())
    assert status(data) == code
    assert code == 200 or error(data)["code"] == "invalid_http"


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
def test_what_is_not_http_is_400(shared, garbage):
    assert status(talk(shared, garbage)) == 400


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 5000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 1000 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 5000, 431),
        (b"GET /" + b"a" * 600 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /" + b"a" * 5000, 414),
    ],
)
def test_head_beyond_its_bound_is_refused_and_closes(strict, head, code):
    data = talk(strict, head)
    assert status(data) == code
    assert set(error(data)) == {"message", "type", "param", "code"}


def test_huge_head_is_refused_before_it_is_whole(shared):
    with socket.create_connection(shared.address, timeout=DEADLINE_S) as connection:
        sent = connection.send(b"GET /health HTTP/1.1\r\nx: " + b"a" * 20_000)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 32 * 2**20:
                sent += connection.send(b"a" * 65536)
        assert sent < 32 * 2**20  # the server stopped reading and closed


def test_head_of_a_later_request_is_bounded_too(strict):
    ok = request(BODY)
    with socket.create_connection(strict.address, timeout=DEADLINE_S) as connection:
        for _ in range(3):
            connection.sendall(ok)
            assert status(read_response(connection)) == 200
        connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * 5000)
        assert status(read_all(connection)) == 431


def test_half_sent_head_is_408(strict):
    begin = time.monotonic()
    data = talk(strict, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-")
    assert (status(data), error(data)["code"]) == (408, "timeout")
    assert time.monotonic() - begin >= 0.2


def test_head_that_trickles_is_408_however_often_it_trickles(strict):
    with socket.create_connection(strict.address, timeout=DEADLINE_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        connection.settimeout(0.02)
        data = b""
        while not data:
            with contextlib.suppress(TimeoutError):
                connection.sendall(b"x: y\r\n")
                data = connection.recv(65536)
        assert status(data) == 408


def test_half_sent_body_is_408(strict):
    data = talk(strict, request()[:-5])
    assert (status(data), error(data)["code"]) == (408, "timeout")


def test_idle_connection_is_closed_after_keep_alive(start, info):
    server = start(ParrotLoop(info), ServerOptions(port=0, keep_alive_s=1))
    with socket.create_connection(server.address, timeout=DEADLINE_S) as silent:
        with socket.create_connection(server.address, timeout=DEADLINE_S) as served:
            served.sendall(request())
            assert status(read_response(served)) == 200
            assert read_all(served) == b""
        assert read_all(silent) == b""


def test_request_may_take_longer_than_the_head_deadline(start, info):
    parrot = ParrotLoop(info)
    server = start(parrot, ServerOptions(port=0, head_timeout_s=0.05, keep_alive_s=1))
    parrot.hold()
    with socket.create_connection(server.address, timeout=DEADLINE_S) as connection:
        connection.sendall(request())
        wait_until(lambda: len(server.engine.submitted) == 1, "submission")
        connection.settimeout(1.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        parrot.go()
        connection.settimeout(DEADLINE_S)
        assert status(read_response(connection)) == 200


def test_connections_beyond_the_bound_are_503_while_all_others_ask(start, info):
    parrot = ParrotLoop(info)
    server = start(parrot, ServerOptions(port=0, max_connections=2))
    parrot.hold()
    with (
        socket.create_connection(server.address, timeout=DEADLINE_S) as first,
        socket.create_connection(server.address, timeout=DEADLINE_S) as second,
    ):
        for connection in (first, second):
            connection.sendall(request())
        wait_until(lambda: len(server.engine.submitted) == 2, "two requests")
        refusal = talk(server, request(), wait_for_close=False)
        assert status(refusal) == 503
        assert b"retry-after" in refusal
        for path in (b"/health", b"/metrics"):
            assert status(talk(server, request(b"", path=path, method=b"GET"), wait_for_close=False)) == 200
        parrot.go()
        for connection in (first, second):
            assert status(read_response(connection)) == 200
    wait_until(lambda: not server.connections, "an end of the connections")
    assert status(talk(server, request(), wait_for_close=False)) == 200


def test_connection_that_asks_nothing_for_longest_makes_room(start, info):
    """Slow connections can drive out each other, never a request that comes at once."""
    server = start(ParrotLoop(info), ServerOptions(port=0, max_connections=3))
    with contextlib.ExitStack() as stack:
        num_slow = 3 + NEWCOMERS
        slow = [
            stack.enter_context(socket.create_connection(server.address, timeout=DEADLINE_S)) for _ in range(num_slow)
        ]
        for connection in slow:
            connection.sendall(b"P")  # a silent one is the kernel's still
        slow[0].sendall(b"OST /v1/completions HTTP/1.1\r\nhost: loc")
        wait_until(lambda: len(server.connections) == num_slow, "all connections")
        for _ in range(3):
            assert status(talk(server, request(b"", path=b"/health", method=b"GET"), wait_for_close=False)) == 200
        with contextlib.suppress(ConnectionResetError):
            assert slow[0].recv(1) == b""


def test_body_that_does_not_end_after_its_answer_costs_the_connection(start, info):
    server = start(ParrotLoop(info), ServerOptions(port=0, body_timeout_s=0.2))
    with socket.create_connection(server.address, timeout=DEADLINE_S) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\nx")
        assert status(read_response(connection)) == 404
        with contextlib.suppress(ConnectionResetError):
            connection.sendall(b"x")
            assert connection.recv(1) == b""
    wait_until(lambda: not server.connections, "an end of the connection")


def test_head_request_has_no_body(shared):
    data = talk(shared, request(b"", b"connection: close", path=b"/health", method=b"HEAD"))
    assert status(data) == 200
    assert data.endswith(b"\r\n\r\n")


def test_http_1_0_gets_whole_answers_and_no_streams(shared):
    whole = request(BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
    assert status(talk(shared, whole)) == 200
    stream = request(b'{"prompt": "a", "stream": true}').replace(b"HTTP/1.1", b"HTTP/1.0")
    data = talk(shared, stream)
    assert (status(data), error(data)["param"]) == (400, "stream")


def test_websocket_upgrade_is_not_taken(shared):
    upgrade = (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-key: x", b"sec-websocket-version: 13")
    assert status(talk(shared, request(b"", *upgrade, path=b"/health", method=b"GET"), wait_for_close=False)) == 200
    assert status(talk(shared, request(b"", *upgrade, path=b"/nowhere", method=b"GET"), wait_for_close=False)) == 404


def test_percent_encoded_path_and_query_find_their_route(shared):
    data = talk(shared, request(b"", path=b"/v1/%6dodels?x=1", method=b"GET"), wait_for_close=False)
    assert status(data) == 200


def test_small_writes_are_sent_at_once(start, info, way):
    if "protocol" in way:
        pytest.skip("uvicorn's own protocol leaves it to the event loop")
    server = start(ParrotLoop(info), **way)
    with socket.create_connection(server.address, timeout=DEADLINE_S):
        wait_until(lambda: bool(server.connections), "the connection")
        (connection,) = server.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_one_write_carries_all_choices_of_a_wake_up(start, info, tokenizer):
    """Tokens of one wake-up leave in one chunk: the flush is per stream, not per token."""
    loop = ParrotLoop(info, tokens_per_event=8)
    loop.hold()  # until all four are there: a step between two of them would be a wake-up of its own
    server = start(loop)
    body = json.dumps({"prompt": "stone", "n": 4, "max_tokens": 16, "stream": True}).encode()
    with ThreadPoolExecutor(1) as client:
        talking = client.submit(talk, server, request(body, b"connection: close"))
        wait_until(lambda: loop.stats().running == 4, "four rows")
        loop.go()
        data = talking.result().partition(b"\r\n\r\n")[2]
    chunks = []
    while data:
        length, _, rest = data.partition(b"\r\n")
        chunks.append(rest[: int(length, 16)])
        data = rest[int(length, 16) + 2 :]
    assert b"".join(chunks).count(b"data: {") == 4 * 17
    assert len(chunks) <= 4  # two steps of the engine, [DONE], and the empty last one


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_what_follows_a_refusal_is_read_with_pauses(model_dir, info, make_loop):
    """A head of 10 MB takes no more of the event loop than one read in each pause."""
    from openinfer_server.testing import ThreadedServer

    options = ServerOptions(port=0, max_head_bytes=4096)
    reads: list[tuple[float, int]] = []

    class Watched(bounded_protocol(options)):
        def data_received(self, data: bytes) -> None:
            reads.append((self.loop.time(), len(data)))
            super().data_received(data)

    with ThreadedServer(ParrotLoop(info), model_dir, options, protocol=Watched, loop_factory=make_loop) as server:
        with socket.create_connection(server.address, timeout=DEADLINE_S) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * 10_000_000)
            with contextlib.suppress(ConnectionResetError):
                assert status(read_response(connection)) == 431
        assert status(talk(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", wait_for_close=False)) == 200
    refused = next(number for number, _ in enumerate(reads) if sum(size for _, size in reads[: number + 1]) > 4096)
    lasting = [time_s for time_s, size in reads[refused + 1 :] if size > 1000]
    assert all(later - earlier >= 0.019 for earlier, later in itertools.pairwise(lasting))


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_connection_that_makes_room_with_half_a_body_leaves_no_error_in_the_log(model_dir, info, make_loop, caplog):
    """Under uvloop its request waited for the rest, and was answered 408 over a transport that was closed."""
    from openinfer_server.testing import ThreadedServer

    options = ServerOptions(port=0, body_timeout_s=0.1)

    class MakesRoom(bounded_protocol(options)):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.config.app.service.budgets.connections.evict()

    with (
        ThreadedServer(ParrotLoop(info), model_dir, options, protocol=MakesRoom, loop_factory=make_loop) as server,
        socket.create_connection(server.address, timeout=DEADLINE_S) as connection,
    ):
        connection.sendall(request()[:-10])
        assert read_all(connection) == b""
    assert server.exit_code == 0
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []
