"""What several test files share."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams


class MakeRequest(Protocol):
    def __call__(self, request_id: int, *, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> GenerateRequest: ...


@pytest.fixture(scope="session")
def make_request() -> MakeRequest:
    """Makes a request; keywords are fields of its `SamplingParams` (`max_tokens` is 4 unless given)."""

    def make(request_id: int, *, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> GenerateRequest:
        params = SamplingParams(**{"max_tokens": 4, **sampling})
        return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=prompt, sampling=params)

    return make


@pytest.fixture(scope="session")
def run_async() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine to its end in a new event loop; one that hangs fails after a minute."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await coroutine

        return asyncio.run(bounded())

    return run
