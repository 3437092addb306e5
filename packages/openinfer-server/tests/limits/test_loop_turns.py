"""Many choices are handed over in slices: counted by what runs between two turns of the loop, not by a clock."""

import asyncio
import itertools
from collections.abc import Coroutine

import pytest

from openinfer_core.events import Failed, FailureKind
from openinfer_core.request import GenerateRequest
from openinfer_core.sampling import SamplingParams
from openinfer_server.http.api_errors import ApiError
from openinfer_server.limits.admission import AdmissionControl
from openinfer_server.limits.loop_turns import SLICE_CHOICES, SLICE_TOKENS
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.output.engine_link import EngineLink
from openinfer_server.output.response import Choice, Response


class Engine:
    """Writes down what it is asked, and what else the loop did meanwhile."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.submitted: list[int] = []
        self.aborted: list[int] = []

    def submit(self, request: GenerateRequest) -> None:
        self.log.append("request")
        self.submitted.append(request.request_id)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)


class World:
    def __init__(self, **limits: int) -> None:
        self.engine = Engine()
        self.admission = AdmissionControl(**limits)
        self.link = EngineLink(self.engine, ServerMetrics(max_model_tokens=2**20), admission=self.admission)

    def response(self, num_choices: int, num_tokens: int = 3) -> tuple[Response, Coroutine[None, None, None]]:
        response = Response(self.link)
        choices = [Choice(response, index, prompt_tokens=num_tokens) for index in range(num_choices)]
        requests = [
            GenerateRequest(
                request_id=self.link.new_id(),
                prompt_token_ids=(1,) * num_tokens,
                sampling=SamplingParams(max_tokens=9),
                tenant="a",
            )
            for _ in range(num_choices)
        ]
        return response, response.submit(choices, requests)

    async def count_turns(self) -> None:
        while True:
            self.engine.log.append("turn")
            await asyncio.sleep(0)

    def requests_between_turns(self) -> list[int]:
        groups = itertools.groupby(self.engine.log)
        return [len(list(entries)) for what, entries in groups if what == "request"]


async def _while_turns_are_counted(world: World, *submissions: Coroutine[None, None, None]) -> None:
    turns = asyncio.create_task(world.count_turns())
    await asyncio.gather(*submissions)
    turns.cancel()


def test_many_choices_are_handed_over_in_slices() -> None:
    async def main() -> None:
        world = World()
        _, submission = world.response(5 * SLICE_CHOICES + 1)
        await _while_turns_are_counted(world, submission)
        assert world.requests_between_turns() == [SLICE_CHOICES] * 5 + [1]

    asyncio.run(main())


def test_long_prompts_are_a_slice_each() -> None:
    async def main() -> None:
        world = World()
        _, submission = world.response(4, num_tokens=SLICE_TOKENS - 1)
        await _while_turns_are_counted(world, submission)
        assert world.requests_between_turns() == [1, 1, 1, 1]

    asyncio.run(main())


def test_of_several_requests_one_slice_runs_in_a_turn() -> None:
    async def main() -> None:
        world = World()
        submissions = [world.response(4 * SLICE_CHOICES)[1] for _ in range(6)]
        await _while_turns_are_counted(world, *submissions)
        first, *others = world.requests_between_turns()
        assert first == 6 * SLICE_CHOICES  # they began in one turn, each with one slice
        assert others == [SLICE_CHOICES] * 18

    asyncio.run(main())


def test_few_choices_are_handed_over_before_anything_else_runs() -> None:
    async def main() -> None:
        world = World()
        _, submission = world.response(SLICE_CHOICES)
        with pytest.raises(StopIteration):
            submission.send(None)
        assert len(world.engine.submitted) == SLICE_CHOICES

    asyncio.run(main())


def test_all_choices_take_room_in_the_queue_at_once() -> None:
    async def main() -> None:
        world = World(max_tokens=1000)
        _, first = world.response(3 * SLICE_CHOICES)
        task = asyncio.create_task(first)
        await asyncio.sleep(0)
        assert len(world.engine.submitted) == SLICE_CHOICES
        assert len(world.admission) == 3 * SLICE_CHOICES
        refused, second = world.response(300)
        with pytest.raises(ApiError):
            await second
        assert not refused.done.done()
        await task
        assert len(world.admission) == 3 * SLICE_CHOICES == len(world.engine.submitted)

    asyncio.run(main())


def test_choices_after_one_that_failed_are_not_handed_over() -> None:
    async def main() -> None:
        world = World()
        response, submission = world.response(3 * SLICE_CHOICES)
        handing_over = asyncio.create_task(submission)
        await asyncio.sleep(0)
        assert len(world.engine.submitted) == SLICE_CHOICES
        world.link.dispatch([Failed(world.engine.submitted[0], FailureKind.INTERNAL, "broken")])
        await handing_over
        assert response.failure is not None
        assert len(world.engine.submitted) == SLICE_CHOICES
        assert sorted(world.engine.aborted) == world.engine.submitted[1:]

    asyncio.run(main())


def test_a_cancelled_request_leaves_nothing_in_the_queue() -> None:
    async def main() -> None:
        world = World()
        _, submission = world.response(3 * SLICE_CHOICES)
        handing_over = asyncio.create_task(submission)
        await asyncio.sleep(0)
        handing_over.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handing_over
        assert sorted(world.engine.aborted) == world.engine.submitted
        assert len(world.admission) == 0 == world.link.num_open

    asyncio.run(main())
