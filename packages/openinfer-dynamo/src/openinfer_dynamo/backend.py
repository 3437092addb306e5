"""`DynamoBackend`: an engine behind Dynamo's contract of backends, `dynamo.common.backend.engine.LLMEngine`.

    start() ─► generate() for each request, many at once ─► abort() of some ─► cleanup()

Dynamo's `Worker` calls all of it in one event loop. The command mixes this class with Dynamo's own, whose defaults
answer what is not here.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from openinfer_core import (
    EngineCapability,
    EngineClosed,
    EngineHandle,
    EngineInfo,
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    InvalidRequest,
    Refused,
    RequestId,
    TokenEvent,
    Tokens,
)
from openinfer_core.sampling_defaults import SamplingDefaults
from openinfer_dynamo.chunks import Chunk, cancelled_chunk, chunk_of, last_chunk, prompt_entry
from openinfer_dynamo.controls import controls_of, obey, told
from openinfer_dynamo.dynamo_api import DynamoApi
from openinfer_dynamo.options import DynamoOptions, Role
from openinfer_dynamo.request import Asked, RequestReader
from openinfer_dynamo.streams import Streams

logger = logging.getLogger("openinfer.dynamo")

_RANK = 0  # an engine balances its own data-parallel ranks: to Dynamo it is one
_LEAVE_KV = {"do_remote_decode": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What one worker serves."""

    launch: Callable[[], EngineHandle]
    """Starts the engine, which may take minutes; raises `OpenInferError`."""
    model_dir: str
    """Where Dynamo's frontend finds tokenizer and chat template."""
    served_model_name: str
    defaults: SamplingDefaults
    kv_events: str = ""
    """Endpoint at which the engine publishes its KV events; empty: it does not."""
    max_step_tokens: int | None = None


class DynamoBackend:
    """One engine as a worker of Dynamo.

    Args:
        setup: what it serves.
        options: how Dynamo knows it.
        api: what is made of Dynamo's.
        on_death: called once if the engine ends by itself.

    Attributes:
        has_died: whether it has.
    """

    def __init__(
        self, setup: WorkerSetup, options: DynamoOptions, api: DynamoApi, *, on_death: Callable[[], None]
    ) -> None:
        self._setup = setup
        self._options = options
        self._api = api
        self._on_death = on_death
        self._handle: EngineHandle | None = None
        self._streams: Streams | None = None
        self._reader: RequestReader | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ids: dict[str, RequestId] = {}  # by the context's id
        self._load_publisher: Any = None
        self._closing = asyncio.Event()
        self.has_died = False

    async def start(self, worker_id: int) -> Any:
        """Loads the model.

        Raises:
            OpenInferError: the engine cannot be had, or cannot do what its role needs.
        """
        del worker_id
        self._handle = await asyncio.to_thread(self._setup.launch)
        info = self._handle.info
        if self._options.role is not Role.AGGREGATED and EngineCapability.KV_TRANSFER not in info.capabilities:
            raise Refused(
                f"a worker of the role {self._options.role} needs --kv-transfer and the --kv-tier that it names: "
                "prefill leaves KV there, decode finds it"
            )
        self._reader = RequestReader(info, self._setup.defaults)
        self._streams = Streams(self._handle)
        self._tasks = [asyncio.create_task(self._follow(self._streams)), asyncio.create_task(self._report_load())]
        return self._registration(info)

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[Chunk, None]:
        """The chunks of one request's stream.

        Raises:
            Exception: one of `dynamo.llm.exceptions`, whose class says whose fault it is.
        """
        streams, asked = self._read(request, context)
        if context.is_stopped():
            yield cancelled_chunk(len(asked.prompt_token_ids))
            return
        self._begin(streams, asked)
        self._ids[context.id()] = asked.request_id
        watch = asyncio.create_task(_abort_when_stopped(context, streams, asked.request_id))
        try:
            chunks = self._chunks(streams.events(asked.request_id), asked.prompt_token_ids)
            if self._options.role is Role.PREFILL:
                chunks = _as_one(chunks)
            async for chunk in chunks:
                yield chunk
        finally:
            watch.cancel()
            self._ids.pop(context.id(), None)
            streams.leave(asked.request_id)

    async def abort(self, context: Any) -> None:
        """Ends a request whose client has left; its stream ends with `cancelled`."""
        request_id = self._ids.get(context.id())
        if request_id is not None and self._streams is not None:
            self._streams.abort(request_id)

    async def is_quiescent(self) -> bool:
        """Whether no request is open: a prefill worker's are until their KV can be read by others."""
        return self._streams is None or self._streams.num_open == 0

    async def cleanup(self) -> None:
        """Ends the engine. Idempotent, also after a start that failed."""
        self._closing.set()
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.close()  # which fails what is open, and ends the events
        tasks, self._tasks = self._tasks, []
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.error("a task of the worker failed", exc_info=outcome)

    async def kv_event_sources(self) -> list[Any]:
        """Where the engine's KV events are to be had."""
        if not self._setup.kv_events:
            return []
        return [self._api.zmq_source(endpoint=self._setup.kv_events, topic="", dp_rank=_RANK)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """One rank, whose load is reported."""
        return [_RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Takes what the load is reported to."""
        self._load_publisher = publisher

    async def health_check_payload(self) -> dict[str, Any]:
        """What Dynamo asks of an idle worker, to see whether it answers."""
        return self._api.probe(0)

    def supported_controls(self) -> set[str]:
        """Names of what the engine can be asked beside requests."""
        return controls_of(None if self._handle is None else self._handle.info.capabilities)

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """Has the engine sleep, wake, pause, go on, or forget its cached prefixes; answers when it has."""
        if self._handle is None:
            return told("the engine has not been started")
        try:
            return await obey(self._handle, control, body)
        except (InvalidRequest, Refused, EngineClosed) as error:
            return told(str(error))

    def _registration(self, info: EngineInfo) -> Any:
        registration = self._api.llm_registration(
            context_length=info.max_model_tokens,
            kv_cache_block_size=info.block_size_tokens,
            total_kv_blocks=info.num_blocks,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=self._setup.max_step_tokens,
            max_gpu_lora_count=info.max_adapters or None,
        )
        return self._api.engine_config(
            model=self._setup.model_dir, served_model_name=self._setup.served_model_name, llm=registration
        )

    def _read(self, request: Mapping[str, Any], context: Any) -> tuple[Streams, GenerateRequest]:
        if self._streams is None or self._reader is None:
            raise self._failure(FailureKind.SHUTDOWN, "the engine has not been started")
        headers: Mapping[str, str] = context.trace_headers() or {}
        trace_parent = headers.get("traceparent")
        try:
            asked = self._reader.read(request, self._streams.new_id(), trace_parent=trace_parent)
            return self._streams, self._in_role(asked, request)
        except InvalidRequest as error:
            raise self._failure(FailureKind.INVALID, str(error)) from error

    def _in_role(self, asked: Asked, request: Mapping[str, Any]) -> GenerateRequest:
        """The request as a worker of this role runs it; Dynamo's own looks at it are served alone."""
        found, role = asked.request, self._options.role
        if asked.is_probe or role is Role.AGGREGATED:
            return found
        if role is Role.DECODE:
            # Without a peer's answer its tier is asked all the same, and what is not there is computed.
            return msgspec.structs.replace(found, transfer=_found_kv(request))
        least = min(found.sampling.min_tokens, 1)
        sampling = msgspec.structs.replace(found.sampling, max_tokens=1, min_tokens=least)
        return msgspec.structs.replace(found, sampling=sampling, transfer=dict(_LEAVE_KV))

    def _begin(self, streams: Streams, request: GenerateRequest) -> None:
        try:
            streams.begin(request)
        except EngineClosed as error:
            raise self._failure(FailureKind.SHUTDOWN, str(error)) from error

    async def _chunks(
        self, events: AsyncIterator[TokenEvent], prompt_token_ids: tuple[int, ...]
    ) -> AsyncIterator[Chunk]:
        prompt_logprobs: list[Any] | None = None
        async for event in events:
            if isinstance(event, Failed):
                raise self._failure(event.kind, event.message)
            if isinstance(event, Finished):
                yield last_chunk(event, prompt_logprobs)
            elif isinstance(event, Tokens):
                if event.prompt_logprobs is not None:
                    prompt_logprobs = prompt_logprobs or [None]  # nothing is said of the first token
                    ids = prompt_token_ids[len(prompt_logprobs) :]
                    prompt_logprobs += map(prompt_entry, ids, event.prompt_logprobs)
                if event.token_ids:
                    yield chunk_of(event)

    def _failure(self, kind: FailureKind, message: str) -> Exception:
        return self._api.failure[kind](message)

    async def _follow(self, streams: Streams) -> None:
        await streams.run()
        if self._handle is not None:  # nothing has closed it
            self.has_died = True
            logger.critical("the engine died: %s", streams.ended_because)
            self._on_death()

    async def _report_load(self) -> None:
        while (handle := self._handle) is not None:
            try:
                stats = await handle.stats()
            except EngineClosed:
                return
            if self._load_publisher is not None:
                self._load_publisher.publish(_RANK, self._load(stats))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._options.load_period_s)

    def _load(self, stats: EngineStats) -> Any:
        prompt_tokens = stats.cached_tokens + stats.prompt_tokens
        return self._api.component_snapshot(
            kv_used_blocks=stats.blocks_used,
            kv_total_blocks=stats.blocks_total,
            gpu_cache_usage=stats.blocks_used / max(1, stats.blocks_total),
            dp_rank=_RANK,
            kv_cache_hit_rate=stats.cached_tokens / prompt_tokens if prompt_tokens else None,
        )


def _found_kv(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a prefill worker's last chunk said, of which the addresses of other engines are no part."""
    left = _mapping_of(_mapping_of(request, "prefill_result"), "disaggregated_params")
    stored = left.get("openinfer")
    return {"do_remote_prefill": True, **({"openinfer": stored} if stored is not None else {})}


def _mapping_of(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object of another engine's answer; an empty one in place of anything else, which is then computed."""
    value = mapping.get(name)
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


async def _as_one(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """All of a stream as its last chunk: Dynamo's router reads no more than the first one of a prefill worker's."""
    token_ids: list[int] = []
    async for chunk in chunks:
        token_ids += chunk["token_ids"]
        if "finish_reason" in chunk:
            yield {**chunk, "token_ids": token_ids}


async def _abort_when_stopped(context: Any, streams: Streams, request_id: RequestId) -> None:
    """Dynamo calls `abort` of a decode worker only after its first token, for transfers that others have."""
    await context.async_killed_or_stopped()
    streams.abort(request_id)
