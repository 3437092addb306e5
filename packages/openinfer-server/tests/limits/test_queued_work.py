"""Work that a client waits for: whose share it takes, and what becomes of it when the client leaves."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator

import pytest

from openinfer_core.fair_queue import FairQueue
from openinfer_server import ServerOptions
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.writers import ClientDisconnected
from openinfer_server.limits.budgets import Budgets
from openinfer_server.limits.queued_work import run_for
from openinfer_server.testing import DEADLINE_S


class Client:
    owner = "a"

    def __init__(self) -> None:
        self.has_left = asyncio.Event()

    async def disconnected(self) -> None:
        await self.has_left.wait()


@pytest.fixture
def queue() -> Iterator[FairQueue]:
    made = FairQueue("test")
    yield made
    made.close()
    made.join()


def test_result_and_error_of_work_are_its_clients(queue):
    async def run() -> None:
        client = Client()
        assert await run_for(client, queue, lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await run_for(client, queue, lambda: 1 // 0)
        assert len(asyncio.all_tasks()) <= 2  # this one, and one that is ending

    asyncio.run(run())


def test_work_that_waits_is_cancelled_when_its_client_leaves(queue):
    go, done = threading.Event(), []

    async def run() -> None:
        queue.submit("b", go.wait)
        client = Client()
        asking = asyncio.create_task(run_for(client, queue, lambda: done.append("work")))
        await asyncio.sleep(0)
        client.has_left.set()
        with pytest.raises(ClientDisconnected):
            await asyncio.wait_for(asking, DEADLINE_S)
        go.set()

    asyncio.run(run())
    queue.submit("a", lambda: None).result(DEADLINE_S)
    assert done == []


def test_work_that_has_begun_is_waited_for_when_its_client_has_left(queue):
    begun, go = threading.Event(), threading.Event()

    async def run() -> None:
        client = Client()
        asking = asyncio.create_task(run_for(client, queue, lambda: (begun.set(), go.wait())))
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        client.has_left.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asking.done()
        go.set()
        with pytest.raises(ClientDisconnected):
            await asyncio.wait_for(asking, DEADLINE_S)

    asyncio.run(run())


def test_work_of_a_request_is_done_before_that_of_a_later_one(queue):
    """Whichever asked first for this piece of it: else all of many requests are done late."""
    options, go, done = ServerOptions(), threading.Event(), []
    budgets = dataclasses.replace(Budgets.of(options), threads=queue)

    async def run() -> None:
        never = asyncio.Event()

        async def receive() -> dict[str, object]:
            await never.wait()
            return {"type": "http.disconnect"}

        async def send(message: object) -> None: ...

        early, late = (HttpRequest({"headers": []}, receive, send, options, budgets) for _ in range(2))
        begun = threading.Event()
        queue.submit("other", lambda: (begun.set(), go.wait()))
        assert begun.wait(DEADLINE_S)
        asking = [
            asyncio.create_task(request.in_thread(lambda name=name: done.append(name)))
            for name, request in (("late", late), ("early", early))
        ]
        await asyncio.sleep(0)  # both have asked
        assert queue.num_waiting == 2
        go.set()
        await asyncio.gather(*asking)

    asyncio.run(run())
    assert done == ["early", "late"]
