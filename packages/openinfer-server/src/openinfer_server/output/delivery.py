"""How a response, streamed or whole, gets to its client; a client that leaves or does not read ends it early.

The request's coroutine sleeps until one of a few futures is resolved; no token wakes it.
"""

import asyncio
from collections.abc import Callable

from openinfer_server.http.api_errors import ApiError, from_failed
from openinfer_server.http.request import JSON, HttpRequest
from openinfer_server.http.writers import ClientDisconnected, StreamWriter
from openinfer_server.output.response import Response

_TOKEN_BYTES = 8  # of a request's body, which takes as long to read as one token of its response to write

# Makes what a stream ends with, when all choices have ended well or one failed.
StreamEnd = Callable[[ApiError | None], bytes]


async def send_stream(http_request: HttpRequest, response: Response, writer: StreamWriter, end: StreamEnd) -> None:
    """Streams a response to its end, or until its client is gone or too slow.

    Raises:
        ApiError: the response failed before it began.
        ClientDisconnected: the client has left; the response is aborted.
    """
    http_request.forget_body()
    gone = asyncio.create_task(http_request.disconnected())
    try:
        # no head is out until the engine begins: a full queue is still answered with a status
        await _first_of(gone, response.began)
        if not response.began.done():
            raise ClientDisconnected
        if response.failure is not None:
            raise from_failed(response.failure)
        http_request.status = 200  # from here on an error can only be an event
        await _send_events(
            http_request,
            response.done,
            writer,
            lambda: end(None if response.failure is None else from_failed(response.failure)),
            gone,
        )
    finally:
        response.abort()  # whatever ended it: what still runs has no reader
        gone.cancel()


async def _send_events(
    http_request: HttpRequest,
    ended: "asyncio.Future[None]",
    writer: StreamWriter,
    end: Callable[[], bytes],
    gone: "asyncio.Task[None]",
) -> None:
    try:
        await writer.start()
        await _first_of(gone, ended, writer.dropped)
        if not ended.done():
            raise ClientDisconnected
        writer.events.append(end())
        await writer.end(http_request.options.write_timeout_s)
    except BaseException:
        writer.drop()  # half a response: only closing the connection tells the client
        raise


async def await_end(http_request: HttpRequest, ended: "asyncio.Future[None]", writer: StreamWriter) -> None:
    """Lets a reader follow what goes on without it, to its end or until the reader is gone or too slow.

    Raises:
        ClientDisconnected: the client has left.
    """
    gone = asyncio.create_task(http_request.disconnected())
    try:
        await _send_events(http_request, ended, writer, lambda: b"", gone)
    finally:
        gone.cancel()


async def send_whole(
    http_request: HttpRequest, response: Response, body: Callable[[], bytes], *, content_type: bytes = JSON
) -> None:
    """Waits for a response and sends it in one body; aborts it when its client leaves."""
    await await_whole(http_request, response)
    num_bytes = sum(_TOKEN_BYTES * (choice.prompt_tokens + choice.completion_tokens) for choice in response.choices)
    await http_request.send(200, await http_request.aside(body, num_bytes=num_bytes), content_type=content_type)


async def await_whole(http_request: HttpRequest, response: Response) -> None:
    """Waits for a response; aborts it when its client leaves."""
    http_request.forget_body()
    gone = asyncio.create_task(http_request.disconnected())
    try:
        await _first_of(gone, response.done)
        if not response.done.done():
            raise ClientDisconnected
        if response.failure is not None:
            raise from_failed(response.failure)
    finally:
        response.abort()
        gone.cancel()


async def _first_of(*futures: "asyncio.Future[None]") -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
