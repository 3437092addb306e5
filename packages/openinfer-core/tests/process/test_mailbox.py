"""The mailbox wakes its reader once for all that is there, and fails what is open when it ends."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from openinfer_core import (
    ContractViolation,
    EngineClosed,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    InvalidRequest,
    RequestId,
    Tokens,
)
from openinfer_core.process.mailbox import Mailbox

RunAsync = Callable[..., Any]


def tokens(request_id: int, *token_ids: int) -> Tokens:
    return Tokens(RequestId(request_id), token_ids)


def finished(request_id: int) -> Finished:
    return Finished(RequestId(request_id), FinishReason.LENGTH, 1, 1, 0)


def shutdown(request_id: int, message: str = "the engine has shut down") -> Failed:
    return Failed(RequestId(request_id), FailureKind.SHUTDOWN, message)


def test_read_yields_all_that_is_there_at_once(run_async: RunAsync) -> None:
    async def main() -> None:
        mailbox = Mailbox()
        mailbox.put([tokens(1, 1)])
        mailbox.put([tokens(1, 2), finished(1)])
        assert await anext(mailbox.read()) == [tokens(1, 1), tokens(1, 2), finished(1)]

    run_async(main())


def test_waiting_reader_is_woken_once_for_several_puts(run_async: RunAsync) -> None:
    async def main() -> None:
        mailbox = Mailbox()
        batches: list[list[Any]] = []

        async def read() -> None:
            batches.extend([list(events) async for events in mailbox.read()])

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        mailbox.put([tokens(1, 1)])
        mailbox.put([tokens(1, 2)])
        await asyncio.sleep(0)
        mailbox.end()
        await reader
        assert batches == [[tokens(1, 1), tokens(1, 2)]]

    run_async(main())


def test_end_fails_open_requests_and_then_the_reader_ends(run_async: RunAsync) -> None:
    async def main() -> None:
        mailbox = Mailbox()
        for request_id in (3, 1, 2):
            mailbox.open(RequestId(request_id))
        mailbox.put([finished(2)])
        mailbox.end()
        mailbox.end("a second end changes nothing")
        assert [events async for events in mailbox.read()] == [[finished(2), shutdown(1), shutdown(3)]]
        assert mailbox.ended

    run_async(main())


def test_end_with_a_failure_yields_the_failed_ones_and_then_raises_every_time(run_async: RunAsync) -> None:
    async def main() -> None:
        mailbox = Mailbox()
        mailbox.open(RequestId(1))
        mailbox.end("it died")
        reader = mailbox.read()
        assert await anext(reader) == [shutdown(1, "it died")]
        with pytest.raises(EngineClosed, match="it died"):
            await anext(reader)
        with pytest.raises(EngineClosed, match="it died"):
            await anext(mailbox.read())

    run_async(main())


def test_open_with_an_id_in_use_is_refused_until_its_terminal_event() -> None:
    mailbox = Mailbox()
    mailbox.open(RequestId(1))
    with pytest.raises(InvalidRequest, match="request id 1 is in use"):
        mailbox.open(RequestId(1))
    mailbox.put([tokens(1, 5)])
    assert RequestId(1) in mailbox
    mailbox.put([shutdown(1)])
    assert RequestId(1) not in mailbox
    mailbox.open(RequestId(1))


@pytest.mark.parametrize(("failure", "message"), [(None, "the engine was closed"), ("it died", "it died")])
def test_open_after_the_end_says_why(failure: str | None, message: str) -> None:
    mailbox = Mailbox()
    mailbox.end(failure)
    with pytest.raises(EngineClosed, match=message):
        mailbox.open(RequestId(1))
    with pytest.raises(EngineClosed, match=message):
        mailbox.require_open()


def test_second_reader_beside_one_that_waits_is_a_violation(run_async: RunAsync) -> None:
    async def main() -> None:
        mailbox = Mailbox()
        first = asyncio.ensure_future(anext(mailbox.read()))
        await asyncio.sleep(0)
        with pytest.raises(ContractViolation, match="one consumer"):
            await anext(mailbox.read())
        mailbox.put([tokens(1, 1)])
        assert await first == [tokens(1, 1)]

    run_async(main())


def test_reader_after_one_that_was_cancelled_gets_everything(run_async: RunAsync) -> None:
    async def main() -> None:
        mailbox = Mailbox()
        first = asyncio.ensure_future(anext(mailbox.read()))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(anext(mailbox.read()))
        await asyncio.sleep(0)
        mailbox.put([tokens(1, 1)])
        assert await second == [tokens(1, 1)]

    run_async(main())
