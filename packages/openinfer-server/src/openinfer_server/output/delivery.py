"""How an answer, streamed or whole, gets to its client; a client that leaves or does not read ends it early.

The request's coroutine sleeps until one of a few futures is resolved; no token wakes it.
"""

import asyncio
from collections.abc import Callable

from openinfer_server.http.api_errors import ApiError, from_failed
from openinfer_server.http.request import Exchange
from openinfer_server.http.writers import ClientGone, StreamWriter
from openinfer_server.output.response import Answer

StreamEnd = Callable[[ApiError | None], bytes]
"""Makes what a stream ends with, when all choices have ended well or one failed."""


async def send_stream(exchange: Exchange, answer: Answer, writer: StreamWriter, end: StreamEnd) -> None:
    """Streams an answer to its end, or until its client is gone or too slow.

    The response begins when the engine begins to work on it, so that a full queue is still answered with a status.

    Args:
        exchange: whose response it is.
        answer: submitted.
        writer: the choices' writer.
        end: see `StreamEnd`.

    Raises:
        ApiError: the answer failed before it began.
        ClientGone: nobody reads any more; the answer is aborted.
    """
    gone = asyncio.create_task(exchange.disconnected())
    try:
        await _first_of(gone, answer.began)
        if not answer.began.done():
            raise ClientGone
        if answer.failure is not None:
            raise from_failed(answer.failure)
        exchange.status = 200
        await _send_events(
            exchange,
            answer.done,
            writer,
            lambda: end(None if answer.failure is None else from_failed(answer.failure)),
            gone,
        )
    finally:
        answer.abort()
        gone.cancel()


async def _send_events(
    exchange: Exchange,
    ended: "asyncio.Future[None]",
    writer: StreamWriter,
    end: Callable[[], bytes],
    gone: "asyncio.Task[None]",
) -> None:
    try:
        await writer.start()
        await _first_of(gone, ended, writer.dropped)
        if not ended.done():
            raise ClientGone
        writer.parts.append(end())
        await writer.end(exchange.options.write_timeout_s)
    except BaseException:
        writer.drop()  # half a response: only closing the connection tells the client
        raise


async def await_end(exchange: Exchange, ended: "asyncio.Future[None]", writer: StreamWriter) -> None:
    """Lets a reader follow what goes on without it, to its end or until the reader is gone or too slow.

    Args:
        exchange: whose response it is.
        ended: resolved when nothing more is written.
        writer: gets the events.

    Raises:
        ClientGone: nobody reads any more.
    """
    gone = asyncio.create_task(exchange.disconnected())
    try:
        await _send_events(exchange, ended, writer, lambda: b"", gone)
    finally:
        gone.cancel()


async def send_whole(exchange: Exchange, answer: Answer, body: Callable[[], bytes]) -> None:
    """Waits for an answer and sends it in one body; aborts it when its client leaves.

    Raises:
        ApiError: the answer failed.
        ClientGone: nobody waits any more; the answer is aborted.
    """
    await await_whole(exchange, answer)
    await exchange.send(200, body())


async def await_whole(exchange: Exchange, answer: Answer) -> None:
    """Waits for an answer; aborts it when its client leaves.

    Raises:
        ApiError: the answer failed.
        ClientGone: nobody waits any more; the answer is aborted.
    """
    gone = asyncio.create_task(exchange.disconnected())
    try:
        await _first_of(gone, answer.done)
        if not answer.done.done():
            raise ClientGone
        if answer.failure is not None:
            raise from_failed(answer.failure)
    finally:
        answer.abort()
        gone.cancel()


async def _first_of(*futures: "asyncio.Future[None]") -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
