"""The client before servers that answer well, badly and not at all; over loopback, byte by byte where that matters."""

import asyncio
import contextlib
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from openinfer_bench.serve.client import Client
from openinfer_bench.serve.messages import Assignment, Job, Outcome, Target
from openinfer_bench.serve.worker import work

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = (TOKEN, TOKEN, TOKEN, FINISH, USAGE, DONE)


def chunked(*bodies: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"


def scored(tokens: list[str], logprobs: list[float], top: list[dict[str, float] | None] | None) -> bytes:
    shown = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top}
    return b"data: %s\n\n" % msgspec.json.encode({"choices": [{"text": "a", "logprobs": shown}]})


def job(*, output_tokens: int = 3, abort_after: int | None = None) -> Job:
    return Job(prompt=np.array([5, 6], np.int32).tobytes(), output_tokens=output_tokens, abort_after=abort_after)


def ask(answer: bytes, *jobs: Job, cut: int = 1 << 20, closes: bool = False) -> tuple[list[Outcome], int]:
    """Outcomes of jobs sent one after the other to a server that always says `answer`, and the connections it saw."""
    handlers: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                assert b'"prompt":[5,6]' in await reader.readexactly(length)
                for begin, end in pairwise([*range(0, len(answer), cut), len(answer)]):
                    writer.write(answer[begin:end])
                    await writer.drain()
                if closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def run() -> list[Outcome]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(Target(host="127.0.0.1", port=port, path="", model="m"))
        try:
            return [await client.run(each) for each in jobs]
        finally:
            client.close()
            await asyncio.gather(*filter(None, handlers))
            server.close()

    return asyncio.run(run()), len(handlers)


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_stream_is_followed_however_it_is_cut_and_connections_are_used_again(cut: int) -> None:
    outcomes, connections = ask(chunked(*WHOLE), job(), job(), cut=cut)
    assert connections == 1
    for outcome in outcomes:
        assert (outcome.error, outcome.tokens, outcome.aborted) == ("", 3, False)
        assert len(outcome.times_s) == 3
        assert outcome.begin_s < outcome.times_s[0]
        assert (np.diff(outcome.times_s) >= 0).all()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (chunked(TOKEN, TOKEN, FINISH, DONE), "2 tokens came, 3 were asked for"),
        (chunked(TOKEN, TOKEN, TOKEN, FINISH), "the stream has no end"),
        (chunked(TOKEN, b'data: {"error":{"message":"boom"}}\n\n', DONE), "boom"),
        (chunked(TOKEN, b'data: {"error":{"message":"boom"}}\n\n', TOKEN, b"data: {not json\n\n", DONE), "boom"),
        (chunked(TOKEN, b"data: {not json\n\n", DONE), "an event is no completion's: JSON is malformed"),
        (chunked(b'data: {"choices":[{"text":null}]}\n\n', DONE), "an event is no completion's: Expected `str`"),
        (chunked(b'data: {"choices":[{"text":"\xff"}]}\n\n', DONE), "an event is no completion's: 'utf-8'"),
        (chunked(scored(["a", "b"], [-0.5], None), DONE), "an event is no completion's"),
        (chunked(DONE), "no tokens"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull", "HTTP 503: full"),
        (b"SMTP ready\r\n\r\n", "not HTTP"),
        (chunked(TOKEN)[:-8], "the connection ended early"),
    ],
)
def test_whatever_did_not_do_what_was_asked_is_an_error(answer: bytes, error: str) -> None:
    ((outcome,), _) = ask(answer, job(), closes=True)
    assert error in outcome.error


def test_client_leaves_when_it_is_told_to() -> None:
    ((outcome, after), connections) = ask(chunked(*WHOLE), job(abort_after=2), job())
    assert (outcome.aborted, outcome.error, len(outcome.times_s)) == (True, "", 2)
    assert (after.error, connections) == ("", 2)


def test_server_that_is_not_there_is_an_error_not_a_crash() -> None:
    async def free_port() -> int:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return port

    port = asyncio.run(free_port())
    target = Target(host="127.0.0.1", port=port, path="", model="m")
    (outcome,) = asyncio.run(work(Assignment(target=target, jobs=[job()], places=1, begin_at_s=0.0)))
    assert "Connect" in outcome.error


def test_alternatives_may_be_missing_where_the_server_has_none() -> None:
    events = [scored(["a"], [-0.5], top) for top in (None, [None], [{"a": -0.5}])]
    ((outcome,), _) = ask(chunked(*events, FINISH, USAGE, DONE), job())
    assert outcome.error == ""
    assert [each.top for each in outcome.scored] == [{}, {}, {"a": -0.5}]


@pytest.mark.parametrize(
    ("details", "cached", "is_told"),
    [
        ("null", 0, False),
        ('{"cached_tokens":null}', 0, False),
        ('{"cached_tokens":0}', 0, True),
        ('{"cached_tokens":1}', 1, True),
    ],
)
def test_whether_cached_tokens_are_told(details: str, cached: int, is_told: bool) -> None:
    usage = USAGE.replace(b'"completion_tokens"', b'"prompt_tokens_details":%s,"completion_tokens"' % details.encode())
    ((outcome,), _) = ask(chunked(TOKEN, TOKEN, TOKEN, FINISH, usage, DONE), job())
    assert (outcome.error, outcome.cached_tokens, outcome.tells_cached) == ("", cached, is_told)
