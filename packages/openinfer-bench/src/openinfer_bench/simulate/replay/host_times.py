"""What a served request takes on the host: of each prompt id, of each step and row, and of each streamed token.

    server's process   request_s, prompt_token_s: HTTP, checks, the frame to the engine
                       decoded_byte_s, sliced_byte_s: JSON
    engine's process   taken_token_s: the frame of a prompt
                       cold_token_s, cached_token_s, plan_s, planned_row_s: `add`, `plan` and `apply`

What a token costs that is streamed is not among them: `openinfer bench frontend` measures that.
"""

import asyncio
import http.client
import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import count
from typing import Any

import msgspec
import numpy as np

from openinfer.models import find_model_dir
from openinfer_bench.scheduler_timing import measure_scheduler
from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.engine import EngineInfo
from openinfer_core.process.wire import Submit, encode_frame, to_engine_decoder
from openinfer_core.queue_policies import FairShare
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan, StepResult
from openinfer_engine.scheduler.token_budget import TokenBudgetScheduler
from openinfer_server.http.body_checks import check_elements
from openinfer_server.http.sliced_json import SLICE_BYTES, decode_body
from openinfer_server.openai.types import CompletionRequest
from openinfer_server.options import ServerOptions
from openinfer_server.testing import ParrotLoop, ThreadedServer

_REPEATS = 25
_FEW_TOKENS, _SHORT_TOKENS, _LONG_TOKENS = 16, 1024, 16384  # a body of the last is decoded in a thread
_FEW_ROWS, _MANY_ROWS = 4, 128
_BLOCK_TOKENS, _STEP_TOKENS = 16, 4096
_NUM_TOKEN_IDS = 151_000
_MOST_ELEMENTS = 262_144
_JSON = {"content-type": "application/json"}


class HostTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one processor."""

    request_s: float
    """A request's way through the server and back, with few ids."""
    prompt_token_s: float
    """Of each prompt id, on the server's event loop, without decoding."""
    decoded_byte_s: float
    """JSON of a body that is decoded on the event loop."""
    sliced_byte_s: float
    """JSON of a larger one, in a thread."""
    taken_token_s: float
    """Of each prompt id, for the frame between the processes."""
    cold_token_s: float
    """Of each prompt token that is computed, in `plan` and `apply`."""
    cached_token_s: float
    """Of each prompt token that the prefix cache has."""
    plan_s: float
    planned_row_s: float
    """`plan` and `apply` of a step of decode rows."""


def measure() -> HostTimes:
    """The times of this machine."""
    request_s, prompt_token_s = _server_times()
    taken_token_s = _frame_token_s()
    cold_token_s, cached_token_s = _scheduled_token_times()
    few, many = (measure_scheduler(rows=rows, steps=200) for rows in (_FEW_ROWS, _MANY_ROWS))
    plan_s, planned_row_s = line((_FEW_ROWS, few.median_step_s), (_MANY_ROWS, many.median_step_s))
    times = HostTimes(
        request_s=request_s,
        prompt_token_s=prompt_token_s,
        decoded_byte_s=_json_byte_s(SLICE_BYTES // 2),
        sliced_byte_s=_json_byte_s(SLICE_BYTES * 4),
        taken_token_s=taken_token_s,
        cold_token_s=cold_token_s,
        cached_token_s=cached_token_s,
        plan_s=plan_s,
        planned_row_s=planned_row_s,
    )
    return msgspec.convert({name: float(f"{getattr(times, name):.3g}") for name in times.__struct_fields__}, HostTimes)


def line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Where the line through two points meets the axis, and its slope; neither below nothing."""
    slope = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
    return max(0.0, first[1] - slope * first[0]), slope


# --- server's process ---------------------------------------------------------------------------------------


def _server_times() -> tuple[float, float]:
    """Processor time of the event loop's thread for a request with few ids, and for each id, without decoding."""
    loops: list[asyncio.AbstractEventLoop] = []

    def make_loop() -> asyncio.AbstractEventLoop:
        if find_spec("uvloop") is None:
            loops.append(asyncio.new_event_loop())
        else:
            import uvloop

            loops.append(uvloop.new_event_loop())
        return loops[0]

    info = EngineInfo(
        model="fit",
        family="tiny",
        max_model_tokens=2 * _LONG_TOKENS,
        num_token_ids=_NUM_TOKEN_IDS,
        eos_token_ids=(),
        block_size_tokens=_BLOCK_TOKENS,
        num_blocks=65536,
        max_num_seqs=8,
        max_waiting=8,
    )
    options = ServerOptions(port=0, model_name=["fit"])
    with ThreadedServer(ParrotLoop(info), find_model_dir("tiny"), options, loop_factory=make_loop) as server:
        connection = http.client.HTTPConnection(*server.address)

        def spent_s(num_tokens: int) -> float:
            body = json.dumps(_completion(num_tokens))
            before_s = _thread_time_of(loops[0])
            connection.request("POST", "/v1/completions", body, _JSON)
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise RuntimeError(f"the server answered {response.status}: {answer[:200]!r}")
            return _thread_time_of(loops[0]) - before_s

        few_s, long_s = (min(spent_s(size) for _ in range(_REPEATS)) for size in (_FEW_TOKENS, _LONG_TOKENS))
        connection.close()
    return few_s, line((_FEW_TOKENS, few_s), (_LONG_TOKENS, long_s))[1]


def _completion(num_tokens: int) -> dict[str, Any]:
    return {
        "model": "fit",
        "prompt": _ids(num_tokens),
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _thread_time_of(loop: asyncio.AbstractEventLoop) -> float:
    async def ask() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(ask(), loop).result(10)


def _json_byte_s(body_bytes: int) -> float:
    """Of decoding a body of about so many bytes, and of the checks before."""
    decoder = msgspec.json.Decoder(CompletionRequest)
    body = msgspec.json.encode(_completion(body_bytes // 7))

    def decode() -> None:
        check_elements(body, _MOST_ELEMENTS)
        decode_body(decoder, body)

    return _least_s(decode) / len(body)


# --- engine's process ---------------------------------------------------------------------------------------


def _frame_token_s() -> float:
    """The frame of a prompt: written by the server, read by the engine."""

    def once(num_tokens: int) -> Callable[[], object]:
        request = _request(_ids(num_tokens))
        return lambda: to_engine_decoder.decode(memoryview(encode_frame(Submit(request)))[4:])

    sizes = (_SHORT_TOKENS, _LONG_TOKENS)
    short_s, long_s = (_least_s(once(size)) for size in sizes)
    return line((sizes[0], short_s), (sizes[1], long_s))[1]


def _scheduled_token_times() -> tuple[float, float]:
    """Seconds per prompt token of `add`, `plan` and `apply`: of prompts that are new, and of the same ones again."""
    cold: list[float] = []
    cached: list[float] = []
    for size in (_SHORT_TOKENS, _LONG_TOKENS):
        colds_s, cached_s = list[float](), list[float]()
        for _ in range(_REPEATS):
            scheduler, prompt = _scheduler(), _ids(size)
            colds_s.append(_run(scheduler, prompt))
            cached_s.append(_run(scheduler, prompt))
        cold.append(min(colds_s))
        cached.append(min(cached_s))
    first, second = (line((_SHORT_TOKENS, short_s), (_LONG_TOKENS, long_s)) for short_s, long_s in (cold, cached))
    return first[1], second[1]


def _scheduler() -> TokenBudgetScheduler:
    config = SchedulerConfig(
        num_blocks=8192,
        block_size_tokens=_BLOCK_TOKENS,
        max_num_seqs=8,
        max_step_tokens=_STEP_TOKENS,
        max_model_tokens=2 * _LONG_TOKENS,
        max_waiting=8,
    )
    return TokenBudgetScheduler(config, FairShare(QueuePolicyConfig()))


_numbers = count()


def _run(scheduler: TokenBudgetScheduler, prompt: Sequence[int]) -> float:
    """Processor time of a request of one token, to its end."""
    request = _request(prompt)
    begin_s = time.thread_time()
    scheduler.add(request, now_s=0.0)
    while (plan := scheduler.plan(now_s=0.0)) is not None:
        scheduler.apply(plan, _result(plan), now_s=0.0)
    return time.thread_time() - begin_s


def _result(plan: StepPlan) -> StepResult:
    return StepResult.of_single_tokens(np.where(plan.max_new > 0, np.int32(7), np.int32(-1)).astype(np.int32))


def _request(prompt: Sequence[int]) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    return GenerateRequest(request_id=RequestId(next(_numbers)), prompt_token_ids=tuple(prompt), sampling=sampling)


def _ids(count_: int) -> list[int]:
    return np.random.default_rng(next(_numbers)).integers(200, _NUM_TOKEN_IDS, count_).tolist()


def _least_s(work: Callable[[], object]) -> float:
    """Of processor time, so that other processes count as little as possible."""

    def once() -> float:
        begin_s = time.thread_time()
        work()
        return time.thread_time() - begin_s

    return min(once() for _ in range(_REPEATS))
