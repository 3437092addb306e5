"""Long texts wait for threads: in shares of tenants or addresses, and only while their client is there."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from openinfer_server import ServerOptions
from openinfer_server.http.api_errors import ApiError
from openinfer_server.testing import DEADLINE_S, ParrotLoop, wait_until
from openinfer_server.text.encoding_threads import CHARACTERS_PER_THREAD, THIS_PROCESS, EncodingThreads

TEXT = "stone mountain " * 50  # long enough for a thread, and short enough for the context of 2,048 tokens
CHAT = [{"role": "user", "content": TEXT}]
BODIES = {
    "/tokenize": {"prompt": TEXT},
    "/v1/completions": {"prompt": [TEXT, TEXT]},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"model": "parrot", "max_tokens": 4, "messages": CHAT},
    "/v1/messages/count_tokens": {"model": "parrot", "messages": CHAT},
    "/v1/responses": {"model": "parrot", "input": TEXT},
}
KEYS = {name: f"key-of-the-tenant-{name}" for name in ("flood", "other", "third")}


def ask(server, path: str, body: object, *, tenant: str | None = None) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    if tenant is not None:
        head += f"authorization: Bearer {KEYS[tenant]}\r\n"
    connection = socket.create_connection(server.address, timeout=DEADLINE_S)
    connection.sendall(f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content)
    return connection


def answer(connection: socket.socket) -> tuple[int, bytes]:
    with connection:
        data = b""
        while part := connection.recv(65536):
            data += part
    return int(data.split(b" ", 2)[1]), data


@contextlib.contextmanager
def held(encoding: EncodingThreads) -> Iterator[None]:
    """All threads are at something else meanwhile."""
    go, meetings = threading.Event(), []
    for queue in (encoding.texts, encoding.long_texts, encoding.huge_texts):
        begun = threading.Barrier(queue.num_threads + 1)
        for _ in range(queue.num_threads):
            queue.submit("", lambda begun=begun: (begun.wait(DEADLINE_S), go.wait()))
        meetings.append(begun)
    for begun in meetings:
        begun.wait(DEADLINE_S)
    try:
        yield
    finally:
        go.set()


@pytest.fixture
def server(start, info):
    return start(ParrotLoop(info))


@pytest.fixture
def with_keys(start, info, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[[keys]]\ntenant = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))
    path.chmod(0o600)
    return start(ParrotLoop(info), ServerOptions(port=0, api_keys_file=str(path)))


@pytest.mark.parametrize("path", BODIES)
def test_text_of_a_client_that_has_left_is_not_encoded(server, path, call):
    encoding = server.service.tokenizer.encoding
    with held(encoding):
        connection = ask(server, path, BODIES[path])
        wait_until(lambda: encoding.texts.num_waiting == 1, "a text that waits")
        assert encoding.characters.used >= len(TEXT)
        connection.close()
        wait_until(lambda: encoding.texts.num_waiting == 0 == encoding.characters.used, "an empty queue")
        left = f'openinfer_http_responses_total{{route="{path}",status="499"}} 1'.encode()
        wait_until(lambda: left in call(server, "GET", "/metrics")[2], "the end of the request")
    assert server.engine.submitted == []


def test_tenant_has_its_share_and_others_have_theirs(with_keys, call):
    encoding = with_keys.service.tokenizer.encoding
    encoding.characters.limit = 8 * len(TEXT)
    with held(encoding):
        flood = [ask(with_keys, "/tokenize", BODIES["/tokenize"], tenant="flood") for _ in range(6)]
        wait_until(lambda: encoding.texts.num_waiting == 6, "texts that wait")
        status, refusal = answer(ask(with_keys, "/tokenize", BODIES["/tokenize"], tenant="flood"))
        assert status == 429
        assert b"retry-after: 1" in refusal
        assert b"characters of text to encode are yours already" in refusal
        other = ask(with_keys, "/tokenize", BODIES["/tokenize"], tenant="other")
        wait_until(lambda: encoding.texts.num_waiting == 7, "the text of another tenant")
        status, refusal = answer(ask(with_keys, "/tokenize", BODIES["/tokenize"], tenant="third"))
        assert status == 503
        assert b"retry-after: 1" in refusal
        page = call(with_keys, "GET", "/metrics")[2].decode()
        for number in (
            f'used{{budget="encode_characters"}} {7 * len(TEXT)}',
            'refused_total{budget="encode_characters"} 2',
        ):
            assert f"openinfer_budget_{number}" in page
    assert [answer(connection)[0] for connection in (other, *flood)] == [200] * 7
    assert encoding.characters.used == 0


def test_text_of_a_newcomer_is_encoded_before_the_rest_of_a_flood(with_keys):
    encoding = with_keys.service.tokenizer.encoding
    with held(encoding):
        flood = [ask(with_keys, "/tokenize", BODIES["/tokenize"], tenant="flood") for _ in range(40)]
        wait_until(lambda: encoding.texts.num_waiting == 40, "texts that wait")
        gate = threading.Event()
        other = ask(with_keys, "/tokenize", BODIES["/tokenize"], tenant="other")
        wait_until(lambda: encoding.texts.num_waiting == 41, "the text of another tenant")
        # Each thread that comes to these stops: what is answered before was taken before them.
        stops = [encoding.texts.submit("stops", gate.wait) for _ in range(encoding.texts.num_threads)]
    assert answer(other)[0] == 200
    assert encoding.texts.num_waiting >= 40 - 3 * encoding.texts.num_threads
    gate.set()
    for stop in stops:
        stop.result(DEADLINE_S)
    assert [answer(connection)[0] for connection in flood] == [200] * 40


def test_text_of_more_than_a_million_characters_is_refused_where_no_context_holds_it(server):
    """An encoding takes up to 200 bytes for each character."""
    encoding = server.service.tokenizer.encoding
    assert encoding.max_characters == 2**20
    with held(encoding):  # it waits for none
        status, refusal = answer(ask(server, "/tokenize", {"prompt": "a" * (2**20 + 1)}))
    assert status == 413
    assert b"1048577 characters; at most 1048576" in refusal
    assert encoding.characters.used == 0
    encoding.cover(2**18)
    assert encoding.max_characters == 2**21


@pytest.mark.parametrize("num_characters", [2**16, 2**20, 2**20 + 1])
def test_text_does_not_wait_for_much_longer_ones(num_characters):
    encoding, go = EncodingThreads(num_processors=1), threading.Event()
    encoding.cover(max_model_tokens=2**20)
    longer = {2**16: (encoding.long_texts, encoding.huge_texts), 2**20: (encoding.huge_texts,)}
    for queue in longer.get(num_characters, ()):
        queue.submit("", go.wait)

    async def encode() -> str:
        return await asyncio.wait_for(encoding.run(THIS_PROCESS, num_characters, lambda: "ids"), DEADLINE_S)

    try:
        assert asyncio.run(encode()) == "ids"
    finally:
        go.set()
        encoding.close()


@pytest.mark.parametrize(("num_processors", "long", "short"), [(1, 1, 2), (2, 1, 2), (8, 2, 4), (64, 4, 8)])
def test_threads_and_budget_follow_the_processors(num_processors, long, short):
    encoding = EncodingThreads(num_processors=num_processors)
    queues = (encoding.texts, encoding.long_texts, encoding.huge_texts)
    assert tuple(queue.num_threads for queue in queues) == (short, long, 1)
    assert encoding.characters.limit == long * CHARACTERS_PER_THREAD
    encoding.close()


@dataclass
class Begun:
    new_characters: int


@pytest.mark.parametrize(("new", "is_taken"), [(2000, True), (503_000, False)])
def test_long_texts_take_room_for_what_is_new_of_them(new: int, is_taken: bool) -> None:
    """Forty turns of 503,000 characters at once, of one client."""
    encoding = EncodingThreads(num_processors=1)
    goes_on = threading.Event()

    async def turn() -> str:
        return await encoding.run_rest(
            THIS_PROCESS, 503_000, look_up=lambda: goes_on.wait(DEADLINE_S) and Begun(new), encode=lambda _: "ids"
        )

    async def play() -> list[str | BaseException]:
        turns = [asyncio.create_task(turn()) for _ in range(40)]
        await asyncio.sleep(0.05)
        goes_on.set()
        return await asyncio.gather(*turns, return_exceptions=True)

    try:
        answers = asyncio.run(play())
        refused = [each for each in answers if each != "ids"]
        assert all(isinstance(each, ApiError) and each.status == 429 for each in refused)
        assert bool(refused) is not is_taken
        assert encoding.characters.used == 0
    finally:
        encoding.close()


def test_text_that_no_context_holds_is_refused_before_it_is_looked_up() -> None:
    encoding = EncodingThreads(num_processors=1)

    async def ask() -> str:
        return await encoding.run_rest(
            THIS_PROCESS, encoding.max_characters + 1, look_up=lambda: Begun(1), encode=lambda _: "ids"
        )

    with pytest.raises(ApiError) as raised:
        asyncio.run(ask())
    assert raised.value.status == 413
    assert encoding.characters.used == 0
    encoding.close()
