"""The kit for engine handles passes good engines and refuses each broken one, saying what is broken."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from operator import attrgetter
from typing import Any, ClassVar

import msgspec
import pytest

from openinfer_core import (
    EngineClosed,
    EngineHandle,
    EngineInfo,
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    Refused,
    RequestId,
    SamplingParams,
    Scheduled,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)
from openinfer_core.control import ControlCommand
from openinfer_core.process.local import InProcessEngine
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions, spawn_simulated
from openinfer_core.testing import ConformanceError
from openinfer_core.testing import engine as kit
from openinfer_core.testing.engine import ENGINE_CHECKS, EngineCheck, check_engine

OPTIONS = SimulatedOptions(num_token_ids=50, max_model_tokens=4096, eos_token_ids=(49,), tpot_s=0.0002)

GOOD = {
    "ordinary": OPTIONS,
    "two rows of a tiny vocabulary and context": SimulatedOptions(
        num_token_ids=4, rows_per_step=2, max_model_tokens=64, tpot_s=0.0002
    ),
    "slow to begin": SimulatedOptions(ttft_s=0.01, max_model_tokens=512, tpot_s=0.001),
}


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=attrgetter("__name__"))
@pytest.mark.parametrize("name", GOOD)
def test_engine_in_a_thread_conforms(name: str, check: EngineCheck) -> None:
    check(lambda: InProcessEngine(SimulatedLoop(GOOD[name])))


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=attrgetter("__name__"))
def test_engine_in_a_process_conforms(check: EngineCheck) -> None:
    check(lambda: spawn_simulated(OPTIONS))


def test_check_engine_takes_a_coroutine_function_and_runs_every_check() -> None:
    made: list[InProcessEngine] = []

    async def make() -> EngineHandle:
        await asyncio.sleep(0)
        made.append(InProcessEngine(SimulatedLoop(OPTIONS)))
        return made[-1]

    check_engine(make)
    assert len(made) == len(ENGINE_CHECKS)


def test_every_check_of_the_module_is_listed() -> None:
    checks = [item for name, item in inspect.getmembers(kit) if name.startswith("check_") and name != "check_engine"]
    assert sorted(map(attrgetter("__name__"), checks)) == sorted(map(attrgetter("__name__"), ENGINE_CHECKS))


# Broken engines: a good one, meddled with


class Meddler:
    """A good engine; subclasses change what goes in or comes out."""

    def __init__(self) -> None:
        self.inner = InProcessEngine(SimulatedLoop(OPTIONS))
        self.requests: dict[RequestId, GenerateRequest] = {}

    @property
    def info(self) -> EngineInfo:
        return self.inner.info

    def submit(self, request: GenerateRequest) -> None:
        self.inner.submit(self.alter(request))
        self.requests[request.request_id] = request

    def abort(self, request_id: RequestId) -> None:
        self.inner.abort(request_id)

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        async for events in self.inner.events():
            changed = [after for event in events for after in self.change(event)]
            if changed:
                yield changed

    async def stats(self) -> EngineStats:
        return await self.inner.stats()

    async def control(self, command: ControlCommand) -> None:
        await self.inner.control(command)

    async def close(self) -> None:
        await self.inner.close()

    def alter(self, request: GenerateRequest) -> GenerateRequest:
        return request

    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [event]


def replace(item: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(item, **fields)


def test_engine_that_is_not_meddled_with_conforms() -> None:
    check_engine(Meddler)


class NoTerminal(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [] if isinstance(event, Finished) and event.request_id == 2 else [event]


class TwoTerminals(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [event, event] if isinstance(event, Finished) else [event]


class TokensAfterTheEnd(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        late = [Tokens(event.request_id, (1,))] if isinstance(event, Finished) else []
        return [event, *late]


class NoScheduled(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [] if isinstance(event, Scheduled) else [event]


class ScheduledTwice(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [event, event] if isinstance(event, Scheduled) else [event]


class FinishedWithoutScheduled(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [event] if isinstance(event, Finished) else []


class MoreCachedThanThereIs(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [replace(event, cached_tokens=4)] if isinstance(event, Scheduled) else [event]


class NegativeWait(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [replace(event, queued_s=-1.0)] if isinstance(event, Scheduled) else [event]


class Miscounts(Meddler):
    field: ClassVar[str]

    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        if isinstance(event, Finished):
            return [replace(event, **{self.field: getattr(event, self.field) + 1})]
        return [event]


class MiscountsPrompt(Miscounts):
    field = "prompt_tokens"


class MiscountsCompletion(Miscounts):
    field = "completion_tokens"


class MiscountsCached(Miscounts):
    field = "cached_tokens"


class DeliversStopTokens(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        if isinstance(event, Finished) and event.stop_token_id is not None:
            return [Tokens(event.request_id, (event.stop_token_id,)), event]
        return [event]


class DoesNotCountStopTokens(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        if isinstance(event, Finished) and event.stop_token_id is not None:
            return [replace(event, completion_tokens=event.completion_tokens - 1)]
        return [event]


class DoesNotNameStopTokens(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        if isinstance(event, Finished) and event.stop_token_id is not None:
            return [replace(event, stop_token_id=None, completion_tokens=event.completion_tokens - 1)]
        return [event]


class NamesAnotherStopToken(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        if isinstance(event, Finished) and event.stop_token_id is not None:
            return [replace(event, stop_token_id=(event.stop_token_id + 1) % 50)]
        return [event]


class AltersSampling(Meddler):
    """Serves other parameters than it was asked for."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        raise NotImplementedError

    def alter(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, sampling=self.other(request.sampling))


class IgnoresStopTokens(AltersSampling):
    def other(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, stop_token_ids=())


class StopsLate(AltersSampling):
    """As with a stop that is found one step late and not taken back."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, min_tokens=2 if sampling.stop_token_ids else 0)


class IgnoresMinTokens(AltersSampling):
    def other(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, min_tokens=0)


class OneTokenMore(AltersSampling):
    def other(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, max_tokens=sampling.max_tokens + 1)


class OneTokenLess(AltersSampling):
    def other(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, max_tokens=max(1, sampling.max_tokens - 1))


class SilentlyShort(OneTokenLess):
    """And it claims to have been aborted."""

    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [replace(event, reason=FinishReason.ABORT)] if isinstance(event, Finished) else [event]


class NoSuchToken(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [replace(event, token_ids=(50,))] if isinstance(event, Tokens) else [event]


class EmptyTokens(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [event, Tokens(event.request_id, ())] if isinstance(event, Scheduled) else [event]


class EmptyBatches(Meddler):
    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        async for events in super().events():
            yield events
            yield []


class StrangersEvents(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [replace(event, request_id=999)] if isinstance(event, Scheduled) else [event]


class IgnoresAborts(Meddler):
    def abort(self, request_id: RequestId) -> None:
        pass


class AnswersEveryAbort(Meddler):
    """With a terminal event, also when the request has one."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: list[TokenEvent] = []

    def abort(self, request_id: RequestId) -> None:
        super().abort(request_id)
        if request_id in self.requests:
            self.extra.append(Finished(request_id, FinishReason.ABORT, 4, 0, 0))

    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        extra, self.extra = self.extra, []
        return [event, *extra]


class AbortFailsTheOthers(Meddler):
    def abort(self, request_id: RequestId) -> None:
        for other in self.requests:
            super().abort(other)


class IgnoresDeadlines(Meddler):
    def alter(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, deadline_s=None)


class CallsLateInternal(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [replace(event, kind=FailureKind.INTERNAL) if isinstance(event, Failed) else event]


class OneDeadlineForAll(Meddler):
    def alter(self, request: GenerateRequest) -> GenerateRequest:
        return request if request.deadline_s is None else replace(request, deadline_s=1e-6)


class TakesDuplicates(Meddler):
    def submit(self, request: GenerateRequest) -> None:
        try:
            super().submit(request)
        except InvalidRequest:
            return


class ForgetsToFreeIds(Meddler):
    def submit(self, request: GenerateRequest) -> None:
        if request.request_id in self.requests:
            raise InvalidRequest("in use")
        super().submit(request)


class ServesEveryPrompt(Meddler):
    def alter(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, prompt_token_ids=tuple(token_id % 50 for token_id in request.prompt_token_ids[:4096]))


class CallsInvalidInternal(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [replace(event, kind=FailureKind.INTERNAL)] if isinstance(event, Failed) else [event]


class SaysNothingInFailures(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [replace(event, message="")] if isinstance(event, Failed) else [event]


class DiesOfAnInvalidPrompt(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        if isinstance(event, Failed):
            raise EngineClosed("index out of range")
        return [event]


class InvalidPromptTakesOthersAlong(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        if isinstance(event, Finished) and event.request_id == 1 and len(self.requests) > 3:
            return [Failed(event.request_id, FailureKind.INTERNAL, "batch failed")]
        return [event]


class OtherTokensEachTime(Meddler):
    def alter(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, prompt_token_ids=(*request.prompt_token_ids[:-1], request.request_id % 50))


class ChangesLogprobs(Meddler):
    """Subclasses change the log-probabilities of each token."""

    def entry(self, entry: TokenLogprobs) -> TokenLogprobs:
        raise NotImplementedError

    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        if isinstance(event, Tokens) and event.logprobs:
            return [replace(event, logprobs=tuple(map(self.entry, event.logprobs)))]
        return [event]


class NoLogprobs(AltersSampling):
    def other(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, logprobs=None)


class LogprobsForAll(AltersSampling):
    def other(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, logprobs=1)


class TooFewAlternatives(AltersSampling):
    def other(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, logprobs=0 if sampling.logprobs is not None else None)


class NoPromptLogprobs(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [] if isinstance(event, Tokens) and event.prompt_logprobs else [event]


class PromptLogprobsTwice(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [event, event] if isinstance(event, Tokens) and event.prompt_logprobs else [event]


class RankZero(ChangesLogprobs):
    def entry(self, entry: TokenLogprobs) -> TokenLogprobs:
        return replace(entry, rank=0)


class RankAmongTheAlternativesOnly(ChangesLogprobs):
    """The token is named far below its place."""

    def entry(self, entry: TokenLogprobs) -> TokenLogprobs:
        return replace(entry, rank=7)


class WorstFirst(ChangesLogprobs):
    def entry(self, entry: TokenLogprobs) -> TokenLogprobs:
        return replace(entry, top_ids=entry.top_ids[::-1], top_logprobs=entry.top_logprobs[::-1])


class LogitsInsteadOfLogprobs(ChangesLogprobs):
    def entry(self, entry: TokenLogprobs) -> TokenLogprobs:
        return replace(entry, logprob=entry.logprob + 3, top_logprobs=tuple(x + 3 for x in entry.top_logprobs))


class TwoTruths(ChangesLogprobs):
    def entry(self, entry: TokenLogprobs) -> TokenLogprobs:
        return replace(entry, logprob=entry.logprob + 0.4)


class SameAlternativeTwice(ChangesLogprobs):
    def entry(self, entry: TokenLogprobs) -> TokenLogprobs:
        return replace(entry, top_ids=entry.top_ids[:1] * len(entry.top_ids))


class NegativeStats(Meddler):
    async def stats(self) -> EngineStats:
        return replace(await super().stats(), blocks_used=-1)


class FallingCounters(Meddler):
    async def stats(self) -> EngineStats:
        stats = await super().stats()
        return replace(stats, steps=1000 - stats.steps)


class CountsNoTokens(Meddler):
    async def stats(self) -> EngineStats:
        return replace(await super().stats(), generated_tokens=0)


class CountsNoPrompts(Meddler):
    async def stats(self) -> EngineStats:
        return replace(await super().stats(), prompt_tokens=0)


class LeaksBlocks(Meddler):
    async def stats(self) -> EngineStats:
        return replace(await super().stats(), blocks_used=1)


class SubmitAfterClose(Meddler):
    def submit(self, request: GenerateRequest) -> None:
        try:
            super().submit(request)
        except EngineClosed:
            return


class StatsAfterClose(Meddler):
    async def stats(self) -> EngineStats:
        try:
            return await super().stats()
        except EngineClosed:
            return EngineStats()


class EventsNeverEnd(Meddler):
    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        async for events in super().events():
            yield events
        await asyncio.Event().wait()


class EventsEndEarly(Meddler):
    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        async for events in super().events():
            yield events
            break


class CloseForgetsOpenRequests(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        return [] if isinstance(event, Failed) and event.kind is FailureKind.SHUTDOWN else [event]


class CloseAborts(Meddler):
    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        if isinstance(event, Failed) and event.kind is FailureKind.SHUTDOWN:
            return [Failed(event.request_id, FailureKind.INTERNAL, "closing")]
        return [event]


class CloseRunsToTheEnd(Meddler):
    """It waits until what is open has run to its end."""

    async def close(self) -> None:
        await self.at_rest.wait()
        await super().close()

    def __init__(self) -> None:
        super().__init__()
        self.at_rest = asyncio.Event()

    def change(self, event: TokenEvent) -> Iterable[TokenEvent]:
        self.ended = getattr(self, "ended", 0) + isinstance(event, Finished)
        if self.ended == len(self.requests):
            self.at_rest.set()
        return [event]


class ObeysWhatItDoesNotSay(Meddler):
    async def control(self, command: ControlCommand) -> None:
        """Whatever it is, it is not done."""


class RefusesWithoutAReason(Meddler):
    async def control(self, command: ControlCommand) -> None:
        raise Refused("no")


class BadInfo(Meddler):
    @property
    def info(self) -> EngineInfo:
        return replace(self.inner.info, eos_token_ids=(50,))


class NoStats:
    """Lacks a method."""

    def __init__(self) -> None:
        inner = InProcessEngine(SimulatedLoop(OPTIONS))
        self.info, self.submit, self.abort = inner.info, inner.submit, inner.abort
        self.events, self.close = inner.events, inner.close


MUTANTS: list[tuple[Callable[[], Any], EngineCheck, str]] = [
    (ObeysWhatItDoesNotSay, kit.check_control, "was obeyed; the engine does not say load_adapter"),
    (RefusesWithoutAReason, kit.check_control, "refused with 'no', which does not say why"),
    (NoTerminal, kit.check_requests, r"no end within 0\.5 s; requests without a terminal event: \[2\]"),
    (TwoTerminals, kit.check_requests, "request 1: Finished.* after the terminal event"),
    (TokensAfterTheEnd, kit.check_requests, "request 1: Tokens.* after the terminal event"),
    (NoScheduled, kit.check_requests, "request 1: Tokens before Scheduled"),
    (ScheduledTwice, kit.check_requests, "a second Scheduled"),
    (FinishedWithoutScheduled, kit.check_requests, "by the events it is 0"),
    (MoreCachedThanThereIs, kit.check_requests, "4 tokens cached of a prompt of 4"),
    (NegativeWait, kit.check_requests, r"queued for -1\.0 s"),
    (MiscountsPrompt, kit.check_requests, "Finished says prompt_tokens=5; by the events it is 4"),
    (MiscountsCompletion, kit.check_requests, "Finished says completion_tokens=2; by the events it is 1"),
    (MiscountsCached, kit.check_requests, "Finished says cached_tokens=1; by the events it is 0"),
    (OneTokenMore, kit.check_requests, "2 tokens; max_tokens is 1"),
    (OneTokenLess, kit.check_requests, "reason length after 1 of 2 tokens"),
    (SilentlyShort, kit.check_requests, "finished with abort; due is length"),
    (NoSuchToken, kit.check_requests, "token id 50 does not exist"),
    (EmptyTokens, kit.check_requests, "Tokens without any"),
    (EmptyBatches, kit.check_requests, "yielded an empty list"),
    (StrangersEvents, kit.check_requests, "names a request that was never submitted"),
    (LogprobsForAll, kit.check_requests, "logprobs that were not asked for"),
    (EventsEndEarly, kit.check_requests, r"events\(\) ended although the engine was not closed"),
    (EventsNeverEnd, kit.check_requests, r"no end within 0\.5 s; requests without a terminal event: none"),
    (DeliversStopTokens, kit.check_stop_tokens, "the stop token .* was delivered"),
    (DoesNotCountStopTokens, kit.check_stop_tokens, "Finished says completion_tokens="),
    (DoesNotNameStopTokens, kit.check_stop_tokens, "reason and stop_token_id contradict"),
    (NamesAnotherStopToken, kit.check_stop_tokens, "is no stop token"),
    (IgnoresStopTokens, kit.check_stop_tokens, "was delivered"),
    (StopsLate, kit.check_stop_tokens, "due is stop|a greedy request got"),
    (IgnoresMinTokens, kit.check_stop_tokens, "a stop token after 0 tokens; min_tokens is 6"),
    (IgnoresAborts, kit.check_aborts, "were aborted soon, and all of them ran to their end"),
    (AnswersEveryAbort, kit.check_aborts, "after the terminal event"),
    (AbortFailsTheOthers, kit.check_aborts, "that was not aborted finished with abort"),
    (IgnoresDeadlines, kit.check_deadline, "request 1 had a microsecond; it ended with Finished"),
    (CallsLateInternal, kit.check_deadline, "request 1 had a microsecond; it ended with Failed.*internal"),
    (OneDeadlineForAll, kit.check_deadline, "request 2 failed .*deadline"),
    (TakesDuplicates, kit.check_duplicate_ids, "a second request with an id in use was taken"),
    (ServesEveryPrompt, kit.check_invalid_requests, r"finished with length; Failed\(INVALID\) is due"),
    (CallsInvalidInternal, kit.check_invalid_requests, r"failed \(internal: .*; Failed\(INVALID\) is due"),
    (SaysNothingInFailures, kit.check_invalid_requests, "a Failed without a message"),
    (DiesOfAnInvalidPrompt, kit.check_invalid_requests, "the engine died: index out of range"),
    (InvalidPromptTakesOthersAlong, kit.check_invalid_requests, r"request 1 failed \(internal: batch failed\)"),
    (TwoTerminals, kit.check_crowd, "after the terminal event"),
    (NoTerminal, kit.check_crowd, r"no end within 0\.5 s; requests without a terminal event: \[2\]"),
    (OtherTokensEachTime, kit.check_determinism, "one prompt, sampling.seed=None"),
    (NoLogprobs, kit.check_logprobs, "0 logprobs for 1 tokens"),
    (TooFewAlternatives, kit.check_logprobs, "0 alternatives with 0 logprobs; 1 were asked for"),
    (NoPromptLogprobs, kit.check_logprobs, "8 prompt tokens have no log-probabilities"),
    (PromptLogprobsTwice, kit.check_logprobs, "more prompt_logprobs than prompt tokens"),
    (RankZero, kit.check_logprobs, r"rank 0; ranks are 1 \.\. 50"),
    (RankAmongTheAlternativesOnly, kit.check_logprobs, "the greedy token .* has rank 7"),
    (WorstFirst, kit.check_logprobs, "not sorted, best first"),
    (LogitsInsteadOfLogprobs, kit.check_logprobs, "probabilities sum to more than 1"),
    (TwoTruths, kit.check_logprobs, "has two log-probabilities"),
    (SameAlternativeTwice, kit.check_logprobs, "are not distinct"),
    (NegativeStats, kit.check_stats, r"stats are negative: \['blocks_used'\]"),
    (FallingCounters, kit.check_stats, "the counter steps fell"),
    (CountsNoTokens, kit.check_stats, "8 requests got 5 tokens each; stats count 0"),
    (CountsNoPrompts, kit.check_stats, "32 prompt tokens were served; stats count 0"),
    (LeaksBlocks, kit.check_stats, r"no end within 0\.5 s|do not come to rest"),
    (SubmitAfterClose, kit.check_close, "submit after close was taken"),
    (StatsAfterClose, kit.check_close, "stats after close answered"),
    (CloseForgetsOpenRequests, kit.check_close_with_open_requests, "without a terminal event for each request"),
    (CloseForgetsOpenRequests, kit.check_close_before_events, "without a terminal event for each request"),
    (CloseAborts, kit.check_close_with_open_requests, r"failed \(internal: closing\); Failed\(SHUTDOWN\) is due"),
    (CloseRunsToTheEnd, kit.check_close_with_open_requests, "open at close, and all of them ran to their end"),
    (BadInfo, kit.check_info, r"info\.eos_token_ids has \[50\]"),
    (NoStats, kit.check_info, "NoStats lacks a member of EngineHandle"),
]


@pytest.mark.parametrize(
    ("make_mutant", "check", "message"),
    MUTANTS,
    ids=[f"{make.__name__}-{check.__name__}" for make, check, _ in MUTANTS],  # type: ignore[attr-defined]
)
def test_broken_engine_is_refused_with_what_is_broken(
    make_mutant: Callable[[], Any], check: EngineCheck, message: str
) -> None:
    with pytest.raises(ConformanceError, match=message):
        check(make_mutant, deadline_s=0.5 if "no end" in message else 60)


def test_ids_that_are_never_freed_are_noticed() -> None:
    with pytest.raises(InvalidRequest, match="in use"):
        kit.check_duplicate_ids(ForgetsToFreeIds)
