"""Conformance of an `EngineHandle`: `check_engine(make_handle)` runs every check; `ENGINE_CHECKS` lists them.

    @pytest.mark.parametrize("check", ENGINE_CHECKS, ids=attrgetter("__name__"))
    def test_my_engine_conforms(check):
        check(make_my_engine)

Each check starts an engine of its own with `make_handle` (a function or a coroutine function without arguments, called
within an event loop) and closes it. The engine must have a context of at least 64 tokens and no other requests.
Throughout, every event is held against the contract (see `Transcript`): Scheduled, then Tokens, then exactly one
terminal event, counts that agree with the tokens, no stop token delivered, no more tokens than asked for,
log-probabilities that are consistent, and nothing more after the end, which is certain once `events()` has ended.
"""

import asyncio
import functools
import random
from typing import Any, Protocol

import msgspec

from openinfer_core.control import (
    CAPABILITY_OF,
    ControlCommand,
    FlushCache,
    LoadAdapter,
    Pause,
    Resume,
    Sleep,
    UnloadAdapter,
    UpdateWeights,
    Wake,
)
from openinfer_core.engine import EngineCapability, EngineHandle, EngineStats
from openinfer_core.errors import EngineClosed, InvalidRequest, Refused
from openinfer_core.events import Failed, FailureKind, Finished, FinishReason
from openinfer_core.request import RequestId
from openinfer_core.sampling import MAX_LOGPROBS, MAX_TOKEN_ID, MAX_TOKENS, SamplingParams
from openinfer_core.testing.engine_driver import EngineDriver, MakeHandle, Scenario, drive
from openinfer_core.testing.errors import ConformanceError, require
from openinfer_core.testing.transcript import LOGPROB_TOLERANCE, Transcript, describe_end

DEADLINE_S = 300.0  # how long one check may take before the engine counts as hanging

_MUCH_WORK_TOKENS = 50_000  # what no engine does between two turns of the event loop
_SETTLE_POLLS = 1000
_SETTLE_POLL_S = 0.005


class EngineCheck(Protocol):
    """One check of the kit."""

    __name__: str

    def __call__(self, make_handle: MakeHandle, *, deadline_s: float = DEADLINE_S) -> None:
        """Raises `ConformanceError` unless the engines that `make_handle` makes keep what the check is about."""
        ...


def check_engine(make_handle: MakeHandle, *, deadline_s: float = DEADLINE_S) -> None:
    """Runs all of `ENGINE_CHECKS`, each within `deadline_s`. Not to be called within an event loop.

    Raises:
        ConformanceError: the engine does not conform.
    """
    for check in ENGINE_CHECKS:
        check(make_handle, deadline_s=deadline_s)


def _check(scenario: Scenario) -> EngineCheck:
    @functools.wraps(scenario)
    def check(make_handle: MakeHandle, *, deadline_s: float = DEADLINE_S) -> None:
        drive(make_handle, scenario, deadline_s=deadline_s)

    return check


@_check
async def check_info(driver: EngineDriver) -> None:
    """What an engine says of itself makes sense."""
    require(_is_handle(driver.handle), f"{type(driver.handle).__name__} lacks a member of EngineHandle")
    info = driver.info
    for name in ("max_model_tokens", "num_token_ids", "block_size_tokens", "num_blocks", "max_num_seqs", "max_waiting"):
        require(getattr(info, name) >= 1, f"info.{name} is {getattr(info, name)}")
    require(info.max_model_tokens >= 64, f"a context of {info.max_model_tokens} tokens is too short for this kit")
    bad = [token_id for token_id in info.eos_token_ids if not 0 <= token_id < info.num_token_ids]
    require(not bad, f"info.eos_token_ids has {bad}; ids are below {info.num_token_ids}")
    require(driver.handle.info == info, "info changed")


@_check
async def check_requests(driver: EngineDriver) -> None:
    """Requests alone and together get exactly as many tokens as they ask for."""
    for max_tokens in (1, 2, 7):
        transcript = await driver.serve(_prompt(driver, 0), _greedy(max_tokens))
        _require_length(transcript)
    transcripts = [
        driver.submit(driver.request(_prompt(driver, index, num_tokens=1 + index), _greedy(1 + index % 5)))
        for index in range(12)
    ]
    await driver.end_of(*transcripts)
    for transcript in transcripts:
        _require_length(transcript)


@_check
async def check_requests_before_events(driver: EngineDriver) -> None:
    """What is submitted before any iteration over `events()` is served."""
    transcripts = [driver.submit(driver.request(_prompt(driver, index), _greedy(3))) for index in range(3)]
    driver.handle.abort(transcripts[1].request.request_id)
    await driver.end_of(*transcripts)
    for transcript in (transcripts[0], transcripts[2]):
        _require_length(transcript)
    _require_ended(transcripts[1], FinishReason.ABORT, FinishReason.LENGTH)


@_check
async def check_stop_tokens(driver: EngineDriver) -> None:
    """A stop token ends its request, is named, counted and not delivered; `min_tokens` keeps it from being sampled."""
    prompt = _prompt(driver, 3)
    reference = (await driver.serve(prompt, _greedy(12))).token_ids
    for stop in sorted(set(reference)):
        first = reference.index(stop)
        stopped = await driver.serve(prompt, _greedy(12, stop_token_ids=(stop,)))
        _require_ended(stopped, FinishReason.STOP)
        require(
            stopped.token_ids == reference[:first],
            f"with stop token {stop} a greedy request got {stopped.token_ids}; without it, {reference}",
        )
    stop = reference[0]
    held = await driver.serve(prompt, _greedy(12, stop_token_ids=(stop,), min_tokens=6))
    require(len(held.token_ids) >= 6, f"min_tokens is 6; a request ended after {len(held.token_ids)}")
    _require_ended(held, FinishReason.STOP, FinishReason.LENGTH)


@_check
async def check_aborts(driver: EngineDriver) -> None:
    """An abort before the start, amid tokens, after the end, twice, and of an unknown id."""
    driver.start()
    *long, bystander = _submit_long(driver)
    driver.handle.abort(long[0].request.request_id)
    driver.handle.abort(RequestId(10**9))
    for transcript in long[1:]:
        await driver.until(lambda t=transcript: bool(t.token_ids) or t.terminal is not None)
        driver.handle.abort(transcript.request.request_id)
        driver.handle.abort(transcript.request.request_id)
    await driver.end_of(*long)
    for transcript in long:
        _require_ended(transcript, FinishReason.ABORT, FinishReason.LENGTH)
        driver.handle.abort(transcript.request.request_id)
    if _is_much_work([*long, bystander]):
        aborted = sum(_reason(transcript) is FinishReason.ABORT for transcript in long)
        require(aborted > 0, f"{len(long)} requests were aborted soon, and all of them ran to their end")
    require(_reason(bystander) is not FinishReason.ABORT, "a request that was not aborted finished with abort")
    driver.handle.abort(bystander.request.request_id)
    await driver.end_of(bystander)
    _require_length(await driver.serve(_prompt(driver, 9), _greedy(3)))


@_check
async def check_duplicate_ids(driver: EngineDriver) -> None:
    """An id in use is refused, harms the request that has it in no way, and is free after its end."""
    driver.start()
    first = driver.submit(driver.request(_prompt(driver, 0), _long(driver)))
    try:
        driver.handle.submit(first.request)
    except InvalidRequest:
        pass
    else:
        raise ConformanceError("a second request with an id in use was taken; InvalidRequest is due")
    driver.handle.abort(first.request.request_id)
    await driver.end_of(first)
    _require_ended(first, FinishReason.ABORT, FinishReason.LENGTH)
    again = driver.submit(first.request)
    driver.handle.abort(again.request.request_id)
    await driver.end_of(again)


@_check
async def check_invalid_requests(driver: EngineDriver) -> None:
    """A prompt that no engine of this size can serve fails with `invalid`, and the others live."""
    info = driver.info
    prompts: list[tuple[int, ...]] = [(info.num_token_ids,), (0, MAX_TOKEN_ID, 0)]
    if info.max_model_tokens < MAX_TOKENS:
        prompts.append((0,) * (info.max_model_tokens + 1))
    good = [driver.submit(driver.request(_prompt(driver, 0), _greedy(4)))]
    bad = [driver.submit(driver.request(prompt, _greedy(1))) for prompt in prompts]
    good.append(driver.submit(driver.request(_prompt(driver, 1), _greedy(4))))
    await driver.end_of(*good, *bad)
    for transcript in bad:
        invalid = isinstance(transcript.terminal, Failed) and transcript.terminal.kind is FailureKind.INVALID
        prompt = transcript.request.prompt_token_ids
        what = f"a prompt of {len(prompt)} tokens up to id {max(prompt)}"
        limits = f"of {info.max_model_tokens} tokens and {info.num_token_ids} ids"
        require(invalid, f"{what}, for a model {limits}, {describe_end(transcript)}; Failed(INVALID) is due")
        require(transcript.scheduled is None, f"{what} was scheduled before it failed")
    for transcript in good:
        _require_length(transcript)


@_check
async def check_crowd(driver: EngineDriver) -> None:
    """64 requests at once with random aborts: each has one end, and a new request is answered."""
    rng = random.Random(20)  # noqa: S311 - no secrets here
    driver.start()
    crowd: list[Transcript] = []
    for index in range(64):
        sampling = SamplingParams(max_tokens=rng.randrange(1, 24), temperature=rng.choice((0.0, 1.0)))
        crowd.append(driver.submit(driver.request(_prompt(driver, index, num_tokens=rng.randrange(1, 30)), sampling)))
        if rng.random() < 0.3:
            driver.handle.abort(rng.choice(crowd).request.request_id)
        if rng.random() < 0.2:
            await asyncio.sleep(0)
    for transcript in rng.sample(crowd, 20):
        await driver.until(lambda t=transcript: t.scheduled is not None or t.terminal is not None)
        driver.handle.abort(transcript.request.request_id)
    await driver.end_of(*crowd)
    for transcript in crowd:
        _require_ended(transcript, FinishReason.ABORT, FinishReason.LENGTH)
    _require_length(await driver.serve(_prompt(driver, 99), _greedy(3)))


@_check
async def check_determinism(driver: EngineDriver) -> None:
    """The same prompt with the same seed gives the same tokens; so does a greedy one."""
    for sampling in (_greedy(16), SamplingParams(max_tokens=16, seed=2**64 - 1, top_p=0.9)):
        runs = [(await driver.serve(_prompt(driver, 5), sampling)).token_ids for _ in range(3)]
        require(runs[0] == runs[1] == runs[2], f"one prompt, {sampling.seed=}, {sampling.temperature=}: {runs}")


@_check
async def check_logprobs(driver: EngineDriver) -> None:
    """Log-probabilities come when they are asked for, agree with each other, and the greedy token is the likeliest."""
    prompt = _prompt(driver, 6, num_tokens=9)
    for top in (0, 1, MAX_LOGPROBS):
        greedy = await driver.serve(prompt, _greedy(6, logprobs=top, prompt_logprobs=top))
        _require_length(greedy)
        for token_id, entry in zip(greedy.token_ids, greedy.logprobs, strict=True):
            require(entry.rank == 1, f"the greedy token {token_id} has rank {entry.rank}")
            best = max(entry.top_logprobs, default=entry.logprob)
            require(best <= entry.logprob + LOGPROB_TOLERANCE, f"the greedy token {token_id} is not the best: {entry}")
    sampled = await driver.serve(prompt, SamplingParams(max_tokens=6, temperature=1.5, seed=1, logprobs=2))
    _require_length(sampled)
    scored = await driver.serve(prompt, SamplingParams(max_tokens=0, prompt_logprobs=2))
    _require_ended(scored, FinishReason.LENGTH)
    require(scored.prompt_logprobs[:1], "a request for prompt_logprobs alone got none")


@_check
async def check_deadline(driver: EngineDriver) -> None:
    """A request ends with `Failed(DEADLINE)` once its deadline is over, and no other with it."""
    late = msgspec.structs.replace(driver.request(_prompt(driver, 0), _long(driver)), deadline_s=1e-6)
    in_time = msgspec.structs.replace(driver.request(_prompt(driver, 1), _greedy(3)), deadline_s=DEADLINE_S)
    transcripts = [driver.submit(late), driver.submit(in_time)]
    await driver.end_of(*transcripts)
    terminal = transcripts[0].terminal
    is_late = isinstance(terminal, Failed) and terminal.kind is FailureKind.DEADLINE
    require(is_late, f"request {late.request_id} had a microsecond; it ended with {terminal}")
    _require_length(transcripts[1])
    await _stats_at_rest(driver)


@_check
async def check_stats(driver: EngineDriver) -> None:
    """Counters never fall and hold what was served; gauges come to rest when all requests have ended."""
    before = await _stats(driver)
    transcripts = [driver.submit(driver.request(_prompt(driver, index), _greedy(5))) for index in range(8)]
    amid = await _stats(driver)
    await driver.end_of(*transcripts)
    after = await _stats_at_rest(driver)
    for name in _COUNTERS:
        values = [getattr(stats, name) for stats in (before, amid, after)]
        require(values == sorted(values), f"the counter {name} fell: {values}")
    generated = after.generated_tokens - before.generated_tokens
    require(generated == 8 * 5, f"8 requests got 5 tokens each; stats count {generated}")
    computed = after.prompt_tokens + after.cached_tokens - before.prompt_tokens - before.cached_tokens
    num_prompt = sum(len(transcript.request.prompt_token_ids) for transcript in transcripts)
    require(computed >= num_prompt, f"{num_prompt} prompt tokens were served; stats count {computed}")


@_check
async def check_control(driver: EngineDriver) -> None:
    """Commands that `EngineInfo.capabilities` does not name are refused by name, and those that mean nothing before the
    engine hears of them; a flushed cache is no obstacle.
    """
    commands: tuple[ControlCommand, ...] = (
        LoadAdapter("kit", "/nowhere"),
        UnloadAdapter("kit"),
        Pause(),
        Resume(),
        Sleep(),
        Wake(),
        UpdateWeights("/nowhere"),
    )
    for command in commands:
        capability = CAPABILITY_OF[type(command)]
        if capability in driver.info.capabilities:
            continue
        try:
            await driver.handle.control(command)
        except Refused as refusal:
            require(capability in str(refusal), f"{command} is refused with {str(refusal)!r}, which does not say why")
        else:
            raise ConformanceError(f"{command} was obeyed; the engine does not say {capability}")
    for command in (LoadAdapter("", "/nowhere"), UpdateWeights("/nowhere", content_hash="step-12")):
        try:
            await driver.handle.control(command)
        except InvalidRequest:
            continue
        raise ConformanceError(f"{command} was obeyed, and means nothing")
    served = await driver.serve(_prompt(driver, 0), _greedy(4))
    if EngineCapability.FLUSH_CACHE in driver.info.capabilities:
        await driver.handle.control(FlushCache())
    again = await driver.serve(_prompt(driver, 0), _greedy(4))
    require(
        again.token_ids == served.token_ids, f"after a flush the tokens are {again.token_ids}, not {served.token_ids}"
    )
    await driver.finish()
    try:
        await driver.handle.control(FlushCache())
    except (EngineClosed, Refused) as error:
        require(isinstance(error, EngineClosed), f"control after close raises {error!r}; EngineClosed is due")
    else:
        raise ConformanceError("control after close was taken; EngineClosed is due")


@_check
async def check_close(driver: EngineDriver) -> None:
    """After `close`, `events()` ends, `submit` and `stats` raise, `abort` and a second `close` do nothing."""
    served = await driver.serve(_prompt(driver, 0), _greedy(2))
    await driver.finish()
    request = driver.request(_prompt(driver, 1), _greedy(2))
    try:
        driver.handle.submit(request)
    except EngineClosed:
        pass
    else:
        raise ConformanceError("submit after close was taken; EngineClosed is due")
    try:
        await driver.handle.stats()
    except EngineClosed:
        pass
    else:
        raise ConformanceError("stats after close answered; EngineClosed is due")
    driver.handle.abort(served.request.request_id)
    await asyncio.gather(driver.handle.close(), driver.handle.close())


@_check
async def check_close_with_open_requests(driver: EngineDriver) -> None:
    """`close` ends the open requests with `Failed(SHUTDOWN)`."""
    transcripts = _submit_long(driver)
    await driver.until(lambda: any(transcript.token_ids for transcript in transcripts))
    await driver.finish()
    _require_shut_down(transcripts)


@_check
async def check_close_before_events(driver: EngineDriver) -> None:
    """`close` before any iteration over `events()`: the iteration then gives the ends, and ends."""
    transcripts = _submit_long(driver)
    await driver.finish()
    _require_shut_down(transcripts)


ENGINE_CHECKS: tuple[EngineCheck, ...] = (
    check_info,
    check_requests,
    check_requests_before_events,
    check_stop_tokens,
    check_aborts,
    check_duplicate_ids,
    check_invalid_requests,
    check_crowd,
    check_determinism,
    check_logprobs,
    check_deadline,
    check_stats,
    check_control,
    check_close,
    check_close_with_open_requests,
    check_close_before_events,
)

_COUNTERS = (
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "preemptions",
    "wasted_rows",
    "failed_requests",
    "policy_faults",
    "drafter_faults",
    "evicted_state_snapshots",
    "tier_tokens",
    "unsaved_blocks",
    "prefetched_blocks",
    "early_blocks",
    "early_unused_blocks",
    "kv_tier_faults",
)


def _is_handle(handle: object) -> bool:
    return isinstance(handle, EngineHandle)


def _prompt(driver: EngineDriver, index: int, *, num_tokens: int = 4) -> tuple[int, ...]:
    return tuple((7 * index + 3 * position + 1) % driver.info.num_token_ids for position in range(num_tokens))


def _greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)


def _long(driver: EngineDriver) -> SamplingParams:
    return _greedy(min(20_000, driver.info.max_model_tokens - 4))


def _submit_long(driver: EngineDriver) -> list[Transcript]:
    # Too much work to be done before an abort or a close, if the queue allows.
    sampling = _long(driver)
    count = max(8, min(_MUCH_WORK_TOKENS // sampling.max_tokens + 1, driver.info.max_waiting, 256))
    return [driver.submit(driver.request(_prompt(driver, index), sampling)) for index in range(count)]


def _is_much_work(transcripts: list[Transcript]) -> bool:
    return sum(transcript.request.sampling.max_tokens for transcript in transcripts) >= _MUCH_WORK_TOKENS


def _reason(transcript: Transcript) -> FinishReason | None:
    return transcript.terminal.reason if isinstance(transcript.terminal, Finished) else None


def _require_ended(transcript: Transcript, *reasons: FinishReason) -> None:
    require(
        _reason(transcript) in reasons,
        f"request {transcript.request.request_id} {describe_end(transcript)}; due is {' or '.join(reasons)}",
    )


def _require_length(transcript: Transcript) -> None:
    _require_ended(transcript, FinishReason.LENGTH)
    asked = transcript.request.sampling.max_tokens
    got = len(transcript.token_ids)
    require(got == asked, f"request {transcript.request.request_id} asked for {asked} tokens and got {got}")


def _require_shut_down(transcripts: list[Transcript]) -> None:
    for transcript in transcripts:
        shut_down = isinstance(transcript.terminal, Failed) and transcript.terminal.kind is FailureKind.SHUTDOWN
        require(
            shut_down or _reason(transcript) is FinishReason.LENGTH,
            f"request {transcript.request.request_id} was open at close and {describe_end(transcript)}; "
            "Failed(SHUTDOWN) is due",
        )
    if _is_much_work(transcripts):
        failed = sum(isinstance(transcript.terminal, Failed) for transcript in transcripts)
        require(failed > 0, f"{len(transcripts)} long requests were open at close, and all of them ran to their end")


async def _stats(driver: EngineDriver) -> EngineStats:
    driver.start()
    stats = await driver.handle.stats()
    numbers = {name: value for name, value in msgspec.structs.asdict(stats).items() if isinstance(value, int | float)}
    negative = [name for name, value in numbers.items() if value < 0]
    require(not negative, f"stats are negative: {negative} in {stats}")
    return stats


async def _stats_at_rest(driver: EngineDriver) -> EngineStats:
    # The last step may still be on its way when its events have come.
    for _ in range(_SETTLE_POLLS):
        stats = await _stats(driver)
        if stats.running == stats.waiting == stats.blocks_used == 0 and stats.step_age_s == 0.0:
            return stats
        await asyncio.sleep(_SETTLE_POLL_S)
    raise ConformanceError(f"all requests have ended, and the gauges do not come to rest: {await _stats(driver)}")
