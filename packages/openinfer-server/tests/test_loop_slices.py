"""What requests may do between two turns of the event loop: counted in calls, so that no machine is too slow for it.

A call of a Python function is up to 1 µs with what it does, so that `MOST_CALLS` are less than 4 ms. What these
requests make now is 100 to 2,300; before they were read in threads and handed over in slices, it was up to 44,000.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from openinfer_server import ServerOptions
from openinfer_server.limits.conversation import check_depth
from openinfer_server.testing import ParrotLoop

MOST_CALLS = 4_000


class Counted(Coroutine[Any, Any, Any]):
    """A coroutine whose calls are counted between two turns."""

    def __init__(self, coro: Coroutine[Any, Any, Any], most: dict[str, int]) -> None:
        self._coro = coro
        self._most = most

    def send(self, value: Any) -> Any:
        return self._counted(lambda: self._coro.send(value))

    def throw(self, *error: Any) -> Any:
        return self._counted(lambda: self._coro.throw(*error))

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def _counted(self, work: Callable[[], Any]) -> Any:
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            del frame, argument
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            return work()
        finally:
            sys.setprofile(None)
            name = getattr(self._coro, "__qualname__", "")
            self._most[name] = max(calls, self._most.get(name, 0))


def counting(most: dict[str, int]) -> Callable[[], asyncio.AbstractEventLoop]:
    def make() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_task_factory(lambda loop, coro, **options: asyncio.Task(Counted(coro, most), loop=loop, **options))
        return loop

    return make


SCHEMA = {"type": "object", "properties": {f"p{i}": {"anyOf": [{"enum": [[i]]}]} for i in range(4_000)}}
ROLES = ["user" if i % 2 == 0 else "assistant" for i in range(1999)]
TURNS = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ROLES]
ITEMS = [{"role": role, "content": "a"} for role in ROLES]
TOOLS = [{"type": "function", "function": {"name": f"f{i}", "parameters": SCHEMA}} for i in range(3)]
REQUESTS: dict[str, tuple[str, dict[str, object]]] = {
    "ids": ("/v1/completions", {"prompt": [[7] * 400] * 128, "max_tokens": 1}),
    "choices": ("/v1/completions", {"prompt": "a", "n": 128, "max_tokens": 1, "seed": 3}),
    "streamed choices": ("/v1/completions", {"prompt": "a", "n": 128, "max_tokens": 1, "stream": True}),
    "chat choices": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "n": 128, "max_tokens": 1, "logprobs": True},
    ),
    "schema": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": SCHEMA}}),
    "tools": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}),
    "turns": ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 1}),
    "messages": ("/v1/messages", {"model": "m", "messages": TURNS, "max_tokens": 1}),
    "items": ("/v1/responses", {"input": ITEMS, "max_output_tokens": 1}),
    "chat to tokenize": ("/tokenize", {"messages": TURNS}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_no_request_makes_many_calls_between_two_turns_of_the_loop(name, start, call, info) -> None:
    most: dict[str, int] = {}
    options = ServerOptions(port=0, max_request_kv_tokens=2**30, model_name=["m"])
    server = start(ParrotLoop(info), options, loop_factory=counting(most))
    most.clear()  # what a start does is no request's
    path, body = REQUESTS[name]
    status, _, answer = call(server, "POST", path, body)
    assert status in (200, 400), answer  # what the model's context or the parrot refuses has been read before
    # the task of the link takes all that an engine says at once, of however many requests
    assert most["RequestResponseCycle.run_asgi"] < MOST_CALLS, most


def test_work_in_one_piece_would_be_seen() -> None:
    most: dict[str, int] = {}

    async def check() -> None:
        check_depth(json.loads(json.dumps(SCHEMA)), "schema")

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(
            lambda loop, coro, **options: asyncio.Task(Counted(coro, most), loop=loop, **options)
        )
        await asyncio.create_task(check())

    asyncio.run(main())
    assert max(most.values()) > 2 * MOST_CALLS
