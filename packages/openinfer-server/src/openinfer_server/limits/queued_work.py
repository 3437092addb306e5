"""Work that a client waits for in a `FairQueue`: it is cancelled when the client has left, unless it has begun."""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from openinfer_core.fair_queue import FairQueue
from openinfer_server.http.writers import ClientDisconnected

T = TypeVar("T")


class Client(Protocol):
    """Who waits for work; an `HttpRequest` is one."""

    @property
    def owner(self) -> str:
        """Whose share of what is shared the work takes."""
        ...

    async def disconnected(self) -> None:
        """Returns when the client has left."""
        ...


async def run_for(client: Client, queue: FairQueue, work: Callable[[], T], *, order_s: float | None = None) -> T:
    """What the work returns or raises; returns when no thread has anything of it, also where the client leaves before.

    `order_s` is `FairQueue.submit`'s.

    Raises:
        ClientDisconnected: the client has left. What has begun was done all the same.
    """
    future = queue.submit(client.owner, work, order_s=order_s)
    done = asyncio.wrap_future(future)
    gone = asyncio.create_task(client.disconnected())
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            if not future.cancel():
                await asyncio.wait((done,))  # it cannot be stopped: until its end it takes memory and a thread
            raise ClientDisconnected
        return done.result()
    finally:
        done.cancel()
        gone.cancel()
