"""Clients that leave, do not read, or read slowly: the engine is told, memory stays bounded, others go on."""

import contextlib
import json
import socket

import pytest

from openinfer_server import ServerOptions
from openinfer_server.testing import DEADLINE_S, ParrotLoop, wait_until


def ask(server, *, stream: bool, max_tokens: int = 2000, n: int = 1, path: str = "/v1/completions") -> socket.socket:
    body = json.dumps(
        {"prompt": [1] * 8, "max_tokens": max_tokens, "n": n, "stream": stream, "ignore_eos": True}
    ).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(DEADLINE_S)
    connection.connect(server.address)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.fixture
def our_way(way):
    if "protocol" in way:
        pytest.skip("uvicorn's own protocol closes both halves of a connection")
    return way


def all_aborted(server) -> bool:
    return sorted(server.engine.aborted) == sorted(request.request_id for request in server.engine.submitted)


def was_dropped(metrics: bytes) -> bool:
    return b"openinfer_slow_clients_dropped_total 1" in metrics


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_before_the_first_token_is_aborted(start, info, way, stream, call):
    parrot = ParrotLoop(info)
    server = start(parrot, **way)
    parrot.hold()
    connection = ask(server, stream=stream, n=3)
    wait_until(lambda: len(server.engine.submitted) == 3, "submission")
    connection.close()
    wait_until(lambda: all_aborted(server), "aborts")
    parrot.go()
    running = b'openinfer_num_requests_running{model_name="parrot"} 0'
    wait_until(lambda: running in call(server, "GET", "/metrics")[2], "an empty engine")


def test_client_that_leaves_in_mid_stream_is_aborted(start, info, way):
    server = start(ParrotLoop(info, step_s=0.01), **way)
    connection = ask(server, stream=True, n=2)
    received = b""
    while received.count(b"data: ") < 10:
        received += connection.recv(4096)
    connection.close()
    wait_until(lambda: all_aborted(server), "aborts")


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_half_closes_gets_its_whole_answer(start, info, our_way, stream):
    """What is written meanwhile, to see whether it is still there, is nothing that a client shows to anyone."""
    parrot = ParrotLoop(info)
    server = start(parrot, **our_way)
    parrot.hold()
    with ask(server, stream=stream, max_tokens=20) as connection:
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: len(server.engine.submitted) == 1, "submission")
        data = b""
        while (b"\r\n:\n\n" if stream else b"100 Continue") not in data:
            data += connection.recv(4096)
        parrot.go()
        while piece := connection.recv(65536):
            data += piece
    assert server.engine.aborted == []
    head, _, body = data.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else b'"completion_tokens":20' in body


def test_old_client_that_half_closes_gets_its_answer_and_nothing_else(start, info):
    parrot = ParrotLoop(info)
    server = start(parrot)
    parrot.hold()
    body = b'{"prompt": "stone", "max_tokens": 3}'
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(server.address, timeout=DEADLINE_S) as connection:
        connection.sendall(head + body)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: len(server.engine.submitted) == 1, "submission")
        parrot.go()
        data = b""
        while piece := connection.recv(65536):
            data += piece
    assert data.startswith(b"HTTP/1.1 200 OK")  # interim responses are not for HTTP/1.0


def test_client_that_half_closes_behind_several_requests_gets_all_answers(start, info):
    server = start(ParrotLoop(info))
    body = b'{"prompt": "stone", "max_tokens": 3, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(server.address, timeout=DEADLINE_S) as connection:
        connection.sendall(3 * request)
        connection.shutdown(socket.SHUT_WR)
        data = b""
        while piece := connection.recv(65536):
            data += piece
    assert data.count(b"data: [DONE]") == 3


def test_client_that_half_closes_and_then_leaves_is_aborted(start, info, our_way):
    parrot = ParrotLoop(info)
    server = start(parrot, **our_way)
    parrot.hold()
    with ask(server, stream=False) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 Continue")
    wait_until(lambda: all_aborted(server), "aborts")


def test_client_that_read_the_head_of_a_stream_and_left_is_aborted_before_a_token(start, info):
    parrot = ParrotLoop(info)
    server = start(parrot)
    parrot.hold()
    with ask(server, stream=True) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
    wait_until(lambda: all_aborted(server), "aborts")


def test_body_cut_short_by_a_half_close_asks_nothing(start, info):
    server = start(ParrotLoop(info))
    with socket.create_connection(server.address, timeout=DEADLINE_S) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: 100\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096) == b""
    assert server.engine.submitted == []


def test_client_that_resets_is_aborted(start, info, way):
    server = start(ParrotLoop(info, step_s=0.01), **way)
    connection = ask(server, stream=True)
    assert connection.recv(100)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    wait_until(lambda: all_aborted(server), "aborts")


def test_client_that_never_reads_is_dropped(start, info, way, call):
    server = start(ParrotLoop(info), ServerOptions(port=0, max_buffered_bytes=4096), **way, sndbuf=4096)
    with ask(server, stream=True, n=16):
        wait_until(lambda: all_aborted(server), "aborts")
        wait_until(lambda: was_dropped(call(server, "GET", "/metrics")[2]), "the drop")
    status, _, _ = call(server, "POST", "/v1/completions", {"prompt": "a"})
    assert status == 200


def test_client_that_never_reads_the_end_is_dropped_after_the_write_timeout(start, info, way, call):
    options = ServerOptions(port=0, max_buffered_bytes=2**30, write_timeout_s=0.3)
    server = start(ParrotLoop(info), options, **way, sndbuf=4096)
    with ask(server, stream=True, n=4):
        wait_until(lambda: was_dropped(call(server, "GET", "/metrics")[2]), "the drop")
        assert server.engine.aborted == []  # the generation had ended well


@pytest.mark.parametrize("num_requests", [1, 3])
def test_client_that_never_reads_a_whole_answer_is_dropped(start, info, num_requests):
    """It is more than the kernel's buffers hold; without a deadline closing would wait for ever."""
    server = start(ParrotLoop(info), ServerOptions(port=0, write_timeout_s=0.2), sndbuf=4096)
    text = "The capital of France is Paris. " * 150
    body = json.dumps({"prompt": text, "n": 128, "echo": True, "max_tokens": 1}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(DEADLINE_S)
        connection.connect(server.address)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall((f"{head}content-length: {len(body)}\r\n\r\n".encode() + body) * num_requests)
        assert connection.recv(100)
        wait_until(lambda: not server.connections, "the drop")
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(1 << 20):
                received += len(data)
    assert received < 128 * len(text)


def test_client_that_left_is_not_counted_as_slow(start, info, way, call):
    server = start(ParrotLoop(info, step_s=0.01), **way)
    with ask(server, stream=True) as connection:
        assert connection.recv(100)
    wait_until(lambda: all_aborted(server), "aborts")
    metrics = call(server, "GET", "/metrics")[2]
    assert b"openinfer_slow_clients_dropped_total 0" in metrics


def test_echo_larger_than_the_bound_reaches_a_client_that_reads(start, info, way, connect):
    server = start(ParrotLoop(info), ServerOptions(port=0, max_buffered_bytes=4096), **way)
    prompt = "The capital of France is Paris. " * 100
    stream = connect(server).completions.create(
        model="parrot", prompt=prompt, n=8, echo=True, logprobs=3, max_tokens=1, stream=True
    )
    texts = ["" for _ in range(8)]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [prompt + texts[0][len(prompt) :]] * 8


def test_client_that_pauses_gets_everything(start, info, way):
    parrot = ParrotLoop(info)
    server = start(parrot, ServerOptions(port=0, max_buffered_bytes=2**30), **way)
    with ask(server, stream=True, n=16, max_tokens=1000) as connection:
        wait_until(lambda: len(server.engine.submitted) == 16, "submission")
        wait_until(lambda: parrot.stats().running == 0, "the engine's end")
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(1 << 20)
    assert data.count(b"data: {") == 16 * 1001
    assert data.count(b'"finish_reason":"length"') == 16
    assert b"data: [DONE]" in data


def test_other_streams_go_on_while_one_does_not_read(start, info, way, connect):
    server = start(ParrotLoop(info), ServerOptions(port=0, max_buffered_bytes=65536), **way, sndbuf=4096)
    with ask(server, stream=True, n=4):
        chunks = list(connect(server).completions.create(model="parrot", prompt="stone", max_tokens=300, stream=True))
    assert len(chunks) == 301
