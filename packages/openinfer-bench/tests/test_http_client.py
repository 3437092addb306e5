"""`ask` tells answers that end from those that are cut, refused, left or late."""

import asyncio

import pytest

from openinfer_bench.http_client import HANG, LOST, Address, ask

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices": [{"text": "ab"}]}\n\n'


def asked(*parts: bytes, stays: bool = False, **options):
    """What `ask` makes of a server that writes these parts."""

    async def run():
        left = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.writelines(parts)
            if stays:
                await reader.read()
                left.set()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            answer = await ask(Address(*server.sockets[0].getsockname()), "/", {}, **options)
            if stays:
                await left.wait()
        return answer

    return asyncio.run(run())


def test_stream_is_followed_to_its_end():
    answer = asked(STREAM, EVENT, EVENT, b"data: [DONE]\n\n")
    assert (answer.status, answer.text, len(answer.event_s)) == (200, "abab", 2)
    assert answer.begin_s <= answer.event_s[0] <= answer.event_s[1] <= answer.end_s


def test_refusal_has_its_status_and_text():
    answer = asked(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\nno")
    assert (answer.status, answer.text, answer.event_s) == (429, "no", [])


@pytest.mark.parametrize("parts", [(), (STREAM, EVENT), (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nno",)])
def test_answer_without_its_end_is_lost(parts):
    assert asked(*parts).status == LOST


def test_client_leaves_after_so_many_events():
    answer = asked(STREAM, EVENT, EVENT, stays=True, leave_after=2)
    assert (answer.status, answer.left, len(answer.event_s)) == (200, True, 2)


def test_server_that_says_nothing_is_given_up():
    assert asked(stays=True, deadline_s=0.05).status == HANG
