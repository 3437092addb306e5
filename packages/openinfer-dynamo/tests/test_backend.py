"""The backend held to Dynamo's contract: the checks of its conformance kit, roles, cancellation and the engine's end.

`check_*` transcribe `lib/backend-common/src/testing.rs` of ai-dynamo (commit 08b47a9b), a kit in Rust for engines in
Rust, of which its wheel has nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from dynamo_stand_in import API, Context, DynamoError
from recorded import COMPLETION

from openinfer_core import (
    EngineCapability,
    EngineClosed,
    EngineHandle,
    EngineInfo,
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    Refused,
    RequestId,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)
from openinfer_core.control import InFlight, Sleep, Wake
from openinfer_core.process.local import InProcessEngine
from openinfer_core.sampling_defaults import NO_DEFAULTS
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions
from openinfer_dynamo.backend import DynamoBackend, WorkerSetup
from openinfer_dynamo.chunks import Chunk
from openinfer_dynamo.options import DynamoOptions, Role

PATIENCE_S = 60.0


def setup_of(launch: Callable[[], EngineHandle], **fields: Any) -> WorkerSetup:
    return WorkerSetup(launch=launch, model_dir="/model", served_model_name="tiny", defaults=NO_DEFAULTS, **fields)


def backend_of(
    launch: Callable[[], EngineHandle],
    *,
    role: Role = Role.AGGREGATED,
    deaths: asyncio.Queue[str] | None = None,
    **fields: Any,
) -> DynamoBackend:
    died: asyncio.Queue[str] = asyncio.Queue() if deaths is None else deaths
    options = DynamoOptions(role=role, load_period_s=0.05)
    return DynamoBackend(setup_of(launch, **fields), options, API, on_death=lambda: died.put_nowait("died"))


def simulated(options: SimulatedOptions | None = None) -> DynamoBackend:
    return backend_of(lambda: InProcessEngine(SimulatedLoop(options or SimulatedOptions())))


@asynccontextmanager
async def started(backend: DynamoBackend) -> AsyncGenerator[DynamoBackend]:
    await backend.start(0)
    try:
        yield backend
    finally:
        await backend.cleanup()


async def collect(backend: DynamoBackend, request: dict[str, Any], context: Context | None = None) -> list[Chunk]:
    return [chunk async for chunk in backend.generate(request, context or Context())]


def asked(**stops: Any) -> dict[str, Any]:
    """The kit's request: three tokens, no more said."""
    return {"model": "tiny", "token_ids": [1, 2, 3], "stop_conditions": stops, "sampling_options": {}}


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


def require_terminal(chunks: list[Chunk]) -> None:
    assert ["finish_reason" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk["index"] == 0 and isinstance(chunk["token_ids"], list) for chunk in chunks)


async def check_start(backend: DynamoBackend) -> None:
    config = await backend.start(0)
    assert config.model == "/model"
    assert config.llm.kv_cache_block_size > 0, "without it Dynamo publishes no KV events"


async def check_sources_are_stable(backend: DynamoBackend) -> None:
    first, second = await backend.kv_event_sources(), await backend.kv_event_sources()
    assert [each.dp_rank for each in first] == [each.dp_rank for each in second]
    assert backend.component_metrics_dp_ranks() == backend.component_metrics_dp_ranks()


async def check_single_generate(backend: DynamoBackend) -> None:
    require_terminal(await collect(backend, asked(max_tokens=20)))


async def check_concurrent_generates(backend: DynamoBackend) -> None:
    streams = (collect(backend, asked(max_tokens=20), Context(str(number))) for number in range(8))
    for chunks in await asyncio.gather(*streams):
        require_terminal(chunks)
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == 20


async def check_cancellation(backend: DynamoBackend) -> None:
    context = Context()
    stream = backend.generate(asked(max_tokens=10_000), context)
    context.stop_generating()  # before the stream's first chunk is asked for, as the kit does
    chunks = [chunk async for chunk in stream]
    assert chunks[-1]["finish_reason"] == "cancelled"


def test_the_checks_of_dynamos_conformance_kit_pass() -> None:
    async def scenario() -> None:
        backend = simulated()
        await check_start(backend)
        await check_sources_are_stable(backend)
        await check_single_generate(backend)
        await check_concurrent_generates(backend)
        await check_cancellation(backend)
        await backend.cleanup()
        await backend.cleanup()
        await simulated().cleanup()  # one that was never started

    run(scenario())


def test_a_chunk_after_the_last_one_would_be_found() -> None:
    with pytest.raises(AssertionError):
        require_terminal([{"token_ids": [], "index": 0, "finish_reason": "stop"}, {"token_ids": [1], "index": 0}])


def test_a_stream_that_is_not_read_to_its_end_is_aborted() -> None:
    async def scenario() -> None:
        async with started(simulated(SimulatedOptions(tpot_s=0.01))) as backend:
            stream = backend.generate(asked(max_tokens=1 << 19), Context())
            await anext(stream)
            await stream.aclose()
            assert await backend.is_quiescent()

    run(scenario())


def test_an_abort_of_what_is_not_there_does_nothing() -> None:
    async def scenario() -> None:
        await simulated().abort(Context())
        async with started(simulated()) as backend:
            await backend.abort(Context())

    run(scenario())


def test_what_an_engine_cannot_do_is_the_clients_error() -> None:
    async def scenario() -> None:
        async with started(simulated()) as backend:
            for request in (asked(max_tokens=-1), {**asked(), "token_ids": []}, {**asked(), "prompt_embeds": "x"}):
                with pytest.raises(DynamoError) as refusal:
                    await collect(backend, request)
                assert refusal.value.kind is FailureKind.INVALID
            assert await backend.is_quiescent()

    run(scenario())


def test_usage_counts_what_the_engine_counted() -> None:
    async def scenario() -> None:
        async with started(simulated()) as backend:
            *_, last = await collect(backend, asked(max_tokens=7))
            usage = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
            assert last["completion_usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
            assert last["finish_reason"] == "length"

    run(scenario())


class ScriptedEngine:
    """An `EngineHandle` that says what a test lets it say."""

    def __init__(self, *capabilities: EngineCapability) -> None:
        info = SimulatedLoop(SimulatedOptions()).info
        self.info: EngineInfo = msgspec.structs.replace(info, capabilities=capabilities)
        self.requests: asyncio.Queue[GenerateRequest] = asyncio.Queue()
        self.closed = 0
        self.now = EngineStats(blocks_used=3, blocks_total=12, cached_tokens=1, prompt_tokens=3)
        self.said: asyncio.Queue[list[TokenEvent] | Exception | None] = asyncio.Queue()

    def submit(self, request: GenerateRequest) -> None:
        self.requests.put_nowait(request)

    def abort(self, request_id: RequestId) -> None:
        self.said.put_nowait([Finished(request_id, FinishReason.ABORT, 3, 0, 0)])

    async def events(self) -> AsyncGenerator[list[TokenEvent]]:
        while (said := await self.said.get()) is not None:
            if isinstance(said, Exception):
                raise said
            yield said

    async def stats(self) -> EngineStats:
        return self.now

    async def control(self, command: object) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed += 1
        self.said.put_nowait(None)

    async def asked(self) -> GenerateRequest:
        return await self.requests.get()

    def finish(self, request: GenerateRequest, *tokens: Tokens, **fields: Any) -> None:
        counts = (len(request.prompt_token_ids), 1, 0)
        self.said.put_nowait([*tokens, Finished(request.request_id, FinishReason.LENGTH, *counts, **fields)])


def test_a_prefill_worker_generates_one_token_and_says_where_the_kv_is() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(EngineCapability.KV_TRANSFER)
        async with started(backend_of(lambda: engine, role=Role.PREFILL)) as backend:
            stops = {**COMPLETION["stop_conditions"], "min_tokens": 2}
            reading = asyncio.create_task(collect(backend, {**COMPLETION, "stop_conditions": stops}))
            request = await engine.asked()
            assert request.transfer == {"do_remote_decode": True}
            assert (request.sampling.max_tokens, request.sampling.min_tokens) == (1, 1)
            assert not await backend.is_quiescent(), "others cannot read its KV yet"
            left = {"do_remote_prefill": True, "openinfer": {"tokens": 16}}
            engine.finish(request, Tokens(request.request_id, (9,)), transfer=left)
            (only,) = await reading  # Dynamo's router reads the first chunk alone
            assert (only["token_ids"], only["finish_reason"]) == ([9], "length")
            assert only["disaggregated_params"] == left
            assert await backend.is_quiescent()

    run(scenario())


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, {}),
        ({"disaggregated_params": None}, {}),
        ({"disaggregated_params": {"worker_id": 4, "remote_host": "10.0.0.1"}}, {}),
        ({"disaggregated_params": {"do_remote_prefill": True, "openinfer": {"a": 1}}}, {"openinfer": {"a": 1}}),
    ],
)
def test_a_decode_worker_looks_for_what_was_left(result: Any, expected: dict[str, Any]) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(EngineCapability.KV_TRANSFER)
        async with started(backend_of(lambda: engine, role=Role.DECODE)) as backend:
            reading = asyncio.create_task(collect(backend, {**COMPLETION, "prefill_result": result}))
            request = await engine.asked()
            assert request.transfer == {"do_remote_prefill": True, **expected}
            assert request.sampling.max_tokens == 2
            engine.finish(request)
            assert "disaggregated_params" not in (await reading)[-1]

    run(scenario())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_dynamos_look_at_a_worker_is_served_alone(role: Role) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(EngineCapability.KV_TRANSFER)
        async with started(backend_of(lambda: engine, role=role)) as backend:
            reading = asyncio.create_task(collect(backend, await backend.health_check_payload()))
            request = await engine.asked()
            assert request.transfer is None
            engine.finish(request)
            await reading

    run(scenario())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_role_without_a_shared_tier_is_refused_and_the_engine_ended(role: Role) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        backend = backend_of(lambda: engine, role=role)
        with pytest.raises(Refused, match="--kv-transfer"):
            await backend.start(0)
        await backend.cleanup()
        assert engine.closed == 1

    run(scenario())


def test_a_client_that_leaves_ends_its_request_at_once() -> None:
    async def scenario(leave: Callable[[DynamoBackend, Context], Coroutine[Any, Any, None]]) -> None:
        engine = ScriptedEngine()
        async with started(backend_of(lambda: engine)) as backend:
            context = Context()
            reading = asyncio.create_task(collect(backend, asked(max_tokens=5), context))
            await engine.asked()
            await leave(backend, context)
            (chunk,) = await reading
            assert chunk["finish_reason"] == "cancelled"
            assert chunk["completion_usage"]["completion_tokens"] == 0
            assert await backend.is_quiescent()

    async def stop(_: DynamoBackend, context: Context) -> None:
        context.stop_generating()

    async def abort(backend: DynamoBackend, context: Context) -> None:
        await backend.abort(context)

    run(scenario(stop))
    run(scenario(abort))


def test_every_failure_of_the_engine_has_its_kind() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        async with started(backend_of(lambda: engine)) as backend:
            for kind in FailureKind:
                reading = asyncio.create_task(collect(backend, COMPLETION))
                request = await engine.asked()
                engine.said.put_nowait([Failed(request.request_id, kind, f"because of {kind}")])
                with pytest.raises(DynamoError, match=f"because of {kind}") as failure:
                    await reading
                assert failure.value.kind is kind
            assert await backend.is_quiescent()

    run(scenario())


def test_an_engine_that_dies_ends_streams_and_the_worker() -> None:
    async def scenario() -> None:
        engine, deaths = ScriptedEngine(), asyncio.Queue[str]()
        backend = backend_of(lambda: engine, deaths=deaths)
        async with started(backend):
            reading = asyncio.create_task(collect(backend, COMPLETION))
            await engine.asked()
            engine.said.put_nowait(EngineClosed("killed"))
            with pytest.raises(DynamoError, match="killed") as failure:
                await reading
            assert failure.value.kind is FailureKind.SHUTDOWN
            await deaths.get()
            with pytest.raises(DynamoError, match="killed"):
                await collect(backend, COMPLETION)
        assert (deaths.empty(), backend.has_died) == (True, True)

    run(scenario())


def test_a_worker_that_is_told_to_end_has_not_died() -> None:
    async def scenario() -> None:
        deaths = asyncio.Queue[str]()
        backend = backend_of(ScriptedEngine, deaths=deaths)
        async with started(backend):
            pass
        with pytest.raises(DynamoError, match="closed"):
            await collect(backend, COMPLETION)
        assert (deaths.empty(), backend.has_died) == (True, False)

    run(scenario())


def test_log_probabilities_are_aligned_with_tokens_and_prompt() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        async with started(backend_of(lambda: engine)) as backend:
            reading = asyncio.create_task(collect(backend, COMPLETION))
            request = await engine.asked()
            one = TokenLogprobs(-0.5, 2, (4, 9), (-0.25, -0.5))
            none = TokenLogprobs(float("-inf"), 3, (), ())
            of_prompt = Tokens(request.request_id, (), prompt_logprobs=(one, none))
            engine.finish(request, of_prompt, Tokens(request.request_id, (9,), logprobs=(one,)))
            first, last = await reading
            assert (first["token_ids"], first["log_probs"]) == ([9], [-0.5])
            expected = [(1, 4, None, -0.25), (2, 9, None, -0.5)]
            assert [tuple(each.values()) for each in first["top_logprobs"][0]] == expected
            assert last["engine_data"]["prompt_logprobs"] == [
                None,
                {
                    "4": {"logprob": -0.25, "rank": 1},
                    "9": {"logprob": -0.5, "rank": 2},
                    "75": {"logprob": -0.5, "rank": 2},
                },
                {"512": {"logprob": -9999.0, "rank": 3}},
            ]

    run(scenario())


def test_the_load_is_reported_and_a_pool_without_prompts_has_no_rate() -> None:
    class Publisher:
        def __init__(self) -> None:
            self.seen: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

        def publish(self, rank: int, snapshot: Any) -> None:
            self.seen.put_nowait((rank, snapshot))

    async def scenario() -> None:
        engine, publisher = ScriptedEngine(), Publisher()
        async with started(backend_of(lambda: engine)) as backend:
            backend.attach_snapshot_publisher(publisher)
            rank, snapshot = await publisher.seen.get()
            assert (rank, snapshot.dp_rank) == (0, 0)
            assert (snapshot.kv_used_blocks, snapshot.kv_total_blocks, snapshot.gpu_cache_usage) == (3, 12, 0.25)
            assert snapshot.kv_cache_hit_rate == 0.25
            engine.now = EngineStats(blocks_total=12)
            while snapshot.kv_cache_hit_rate is not None:
                _, snapshot = await publisher.seen.get()
            assert snapshot.kv_used_blocks == 0

    run(scenario())


def test_kv_events_are_told_of_where_the_engine_publishes_them() -> None:
    async def scenario() -> None:
        (source,) = await backend_of(ScriptedEngine, kv_events="ipc:///x/kv-events").kv_event_sources()
        assert (source.endpoint, source.topic, source.dp_rank) == ("ipc:///x/kv-events", "", 0)
        assert await backend_of(ScriptedEngine).kv_event_sources() == []

    run(scenario())


def test_a_trace_goes_on_in_the_engine() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        async with started(backend_of(lambda: engine)) as backend:
            parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            reading = asyncio.create_task(collect(backend, COMPLETION, Context(headers={"traceparent": parent})))
            request = await engine.asked()
            assert request.trace_parent == parent
            engine.finish(request)
            await reading

    run(scenario())


class Obeying(SimulatedLoop):
    """Sleeps and wakes."""

    def __init__(self) -> None:
        super().__init__(SimulatedOptions())
        self.commands: list[Any] = []

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(super().info, capabilities=(EngineCapability.SLEEP,))

    def control(self, command: Any) -> list[TokenEvent]:
        if isinstance(command, Wake):
            raise Refused("other processes hold its memory of the GPU")
        self.commands.append(command)
        return []


def test_an_engine_is_asked_what_it_can_do_and_answers_as_dynamo_does() -> None:
    async def scenario() -> None:
        loop = Obeying()
        backend = backend_of(lambda: InProcessEngine(loop))
        assert backend.supported_controls() == {
            "clear_cache",
            "pause_generation",
            "resume_generation",
            "sleep",
            "wake_up",
        }
        assert (await backend.engine_control("sleep", {}))["status"] == "error"  # not started
        async with started(backend):
            assert backend.supported_controls() == {"sleep", "wake_up"}
            slept = await backend.engine_control("sleep", {"level": 2, "requests": "abort"})
            assert slept == {"status": "ok"}
            assert loop.commands == [Sleep(keeps_weights=False, requests=InFlight.ABORT)]
            for name, body, reason in (
                ("wake_up", {}, "other processes hold its memory"),
                ("sleep", {"tags": ["weights"]}, "tags"),
                ("sleep", {"level": 0}, "level"),
                ("restart", {}, "there is no control 'restart'"),
            ):
                answer = await backend.engine_control(name, body)
                assert answer["status"] == "error"
                assert reason in answer["message"], answer
        assert (await backend.engine_control("sleep", {}))["status"] == "error"

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
