"""Further processes' handles to one engine: they share it, and leaving does not end it."""

import asyncio

import pytest

from openinfer_core import EngineClosed, Finished, GenerateRequest, RequestId, SamplingParams
from openinfer_core.process.engine_process import Address, LinkKind, default_link
from openinfer_core.process.remote import EngineAccess, RemoteEngine, join_engine
from openinfer_core.simulated import SimulatedOptions, spawn_simulated

LINKS = sorted({default_link(), LinkKind.TCP})


def request(request_id: int, max_tokens: int = 5) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=(1, 2), sampling=sampling)


async def end_of(handle: RemoteEngine, request_id: int) -> Finished:
    async for events in handle.events():
        for event in events:
            if isinstance(event, Finished) and event.request_id == request_id:
                return event
    raise AssertionError("no end")


def access_of(handle: RemoteEngine) -> EngineAccess:
    assert handle.access is not None
    return handle.access


async def running(handle: RemoteEngine, count: int) -> None:
    async with asyncio.timeout(20):
        while (await handle.stats()).running != count:  # asking takes a round trip to the engine's process
            pass


@pytest.mark.parametrize("link", LINKS)
def test_two_handles_share_an_engine_and_its_ids_are_their_own(link: LinkKind) -> None:
    async def main() -> None:
        first = spawn_simulated(SimulatedOptions(), link=link)
        second = join_engine(access_of(first))
        assert second.info == first.info
        assert second.access is None
        for handle in (first, second):
            handle.submit(request(7))
        ends = await asyncio.gather(end_of(first, 7), end_of(second, 7))
        assert [end.completion_tokens for end in ends] == [5, 5]
        assert (await first.stats()).generated_tokens == 10
        await second.close()
        await first.close()

    asyncio.run(main())


def test_leaving_aborts_the_leavers_requests_and_the_engine_goes_on() -> None:
    async def main() -> None:
        first = spawn_simulated(SimulatedOptions(tpot_s=0.001))
        second = join_engine(access_of(first))
        second.submit(request(1, max_tokens=10**5))
        await second.stats()  # the first use in an event loop sends what was submitted before
        await running(first, 1)
        await second.close()
        with pytest.raises(EngineClosed):
            await second.stats()
        await running(first, 0)
        first.submit(request(1))
        assert (await end_of(first, 1)).completion_tokens == 5
        await first.close()

    asyncio.run(main())


def test_joining_needs_the_token_and_an_engine() -> None:
    first = spawn_simulated(SimulatedOptions())
    access = access_of(first)
    with pytest.raises(EngineClosed):
        join_engine(EngineAccess(address=access.address, token="wrong"))
    asyncio.run(first.close())
    with pytest.raises(EngineClosed, match="cannot be reached"):
        join_engine(access)
    with pytest.raises(EngineClosed, match="cannot be reached"):
        join_engine(EngineAccess(address=Address(tcp_port=1), token="x"))
