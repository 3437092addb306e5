"""Drafters that are models, in an engine: what is answered with one is what is answered without, and what it drafts.

`recording(factory)` makes a drafter that notes what it was told and what it drafted, by the ids that were known: tests
compute the same again from the formulas, whatever was cached, cut or preempted in between.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from openinfer_core import EngineStats, GenerateRequest, RequestId, SamplingParams
from openinfer_core.scheduling import SlotStart
from openinfer_engine.drafters.contract import DrafterRequirements, DrafterSetting, DraftMemory, ObservedStep
from openinfer_engine.drafting import DrafterContext
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.loop import StepLoop
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions
from openinfer_engine.testing.answers import Answer, run_alone, run_at_once, run_together
from openinfer_engine.testing.drafters import with_drafter
from openinfer_engine.testing.drafts import drafted_requests
from openinfer_engine.testing.traffic import random_requests
from openinfer_kernels import Array, HostArray

_SIZES: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_step_tokens": 256,
    "block_size_tokens": 8,
    "num_blocks": 200,
    "batch_invariant": True,
}
_SHARED_TOKENS = 40  # that prompts of `drafts_after_prefixes` begin with, in whole blocks


@dataclass(slots=True)
class DraftedContext:
    """One row that was drafted."""

    token_ids: tuple[int, ...]
    """All known tokens."""
    last_hidden: HostArray
    """`[h]` the state after the final norm that predicted the last one."""
    drafts: list[int]


@dataclass(slots=True)
class DraftLog:
    """What a recording drafter was told, and what it answered."""

    hidden: dict[tuple[int, ...], HostArray] = field(default_factory=dict[tuple[int, ...], HostArray])
    """Ids up to a position, its own the last -> `[h]` after the final norm there."""
    taps: dict[tuple[int, ...], list[HostArray]] = field(default_factory=dict[tuple[int, ...], list[HostArray]])
    """The same -> of each tap `[h]`."""
    contexts: list[DraftedContext] = field(default_factory=list[DraftedContext])


class _Recording:
    def __init__(self, context: DrafterContext, factory: Any, log: DraftLog) -> None:
        self._drafter = factory(context)
        self._ops = context.ops
        self._log = log
        self._ids: dict[int, list[int]] = {}
        self.max_drafts: int = self._drafter.max_drafts

    def attach(self, memory: DraftMemory) -> None:
        self._drafter.attach(memory)

    def start(self, starts: Sequence[SlotStart]) -> None:
        for start in starts:
            self._ids[start.slot] = [*start.request.prompt_token_ids, *start.output_token_ids]
        self._drafter.start(starts)

    def observe(self, step: ObservedStep) -> None:
        download = self._ops.download
        positions, token_ids, hidden = (download(each) for each in (step.batch.positions, step.token_ids, step.hidden))
        taps, begins = [download(each) for each in step.taps], download(step.batch.query_starts).tolist()
        for row, slot in enumerate(download(step.slots).tolist()):
            for token in range(begins[row], begins[row + 1]):
                position = int(positions[token])
                ids = self._ids[slot]
                self._ids[slot] = ids = [*ids[:position], int(token_ids[token]), *ids[position + 1 :]]
                key = tuple(ids[: position + 1])
                self._log.hidden[key] = hidden[token].copy()
                self._log.taps[key] = [tap[token].copy() for tap in taps]
        self._drafter.observe(step)

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        drafts = self._drafter.draft(slots, last_ids, hidden, lengths)
        columns = [self._ops.download(each) for each in (slots, last_ids, lengths)]
        for row, (slot, last_id, length) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            self._ids[slot] = [*self._ids[slot][: length - 1], last_id]
            context = DraftedContext(
                token_ids=tuple(self._ids[slot]),
                last_hidden=self._ops.download(hidden[row]).copy(),
                drafts=self._ops.download(drafts[row]).tolist(),
            )
            self._log.contexts.append(context)
        return drafts


class RecordingFactory:
    """A drafter's factory whose drafters note everything in `log`, on one rank."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory
        self.options: tuple[str, ...] = getattr(factory, "options", ())
        self.log = DraftLog()

    def __call__(self, context: DrafterContext) -> _Recording:
        return _Recording(context, self._factory, self.log)

    def requirements(self, setting: DrafterSetting) -> DrafterRequirements:
        return self._factory.requirements(setting)


def make_drafting_loop(
    definition: ModelDefinition[Any],
    model_dir: Path,
    factory: Any,
    *,
    max_drafts: int = 4,
    drafter_options: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> StepLoop:
    """An engine with a drafter that no package need offer; `options` are fields of `EngineOptions`."""
    engine_plan = resolve(definition, model_dir, EngineOptions(**_SIZES | options))
    return build_loop(with_drafter(engine_plan, factory, max_drafts=max_drafts, options=drafter_options))


def record_drafts(
    definition: ModelDefinition[Any],
    model_dir: Path,
    factory: Any,
    *,
    vocab_size: int,
    rounds: int = 2,
    max_drafts: int,
    drafter_options: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> DraftLog:
    """What a drafter sees and drafts in traffic with chunks, cached prefixes and preemptions, drawn at temperature 1.

    Args:
        definition: of the family.
        model_dir: `config.json` and safetensors.
        factory: of the drafter.
        vocab_size: prompts have ids below it.
        rounds: of the same requests together, each in another order.
        max_drafts: of a row.
        drafter_options: the drafter's own.
        options: further fields of `EngineOptions`.

    Raises:
        AssertionError: the drafter raised, or nothing was preempted or found in the prefix cache.
    """
    recording = RecordingFactory(factory)
    sizes: dict[str, Any] = {"max_step_tokens": 24, "num_blocks": 19, **options}
    drafting: dict[str, Any] = {"max_drafts": max_drafts, "drafter_options": drafter_options}
    loop = make_drafting_loop(definition, model_dir, recording, **drafting, **sizes)
    requests = random_requests(24, vocab_size=vocab_size, max_prompt_tokens=40, shared_tokens=20, temperature=1.0)
    for seed in range(rounds):
        run_together(loop, requests, seed=seed)
    stats = loop.stats()
    loop.close()
    assert stats.drafter_faults == 0
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    return recording.log


def drafts_after_prefixes(
    definition: ModelDefinition[Any],
    model_dir: Path,
    factory: Any,
    *,
    vocab_size: int,
    count: int = 6,
    drafter_options: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> tuple[list[list[int]], list[list[int]]]:
    """All drafts after prefixes that are cached, and all after the same ones computed: equal where a cache has enough.

    Requests whose prompts begin alike come one after the other, and then once more.

    Args:
        definition: of the family.
        model_dir: `config.json` and safetensors.
        factory: of the drafter.
        vocab_size: prompts have ids below it.
        count: of requests.
        drafter_options: the drafter's own.
        options: further fields of `EngineOptions`.

    Raises:
        AssertionError: the drafter raised, a beginning was not cached, or one was without a prefix cache.
    """
    requests = random_requests(count, vocab_size=vocab_size, max_prompt_tokens=30, shared_tokens=_SHARED_TOKENS)
    drafts: list[list[list[int]]] = []
    for prefix_cache in (True, False):
        recording = RecordingFactory(factory)
        drafting: dict[str, Any] = {"drafter_options": drafter_options, "prefix_cache": prefix_cache, **options}
        loop = make_drafting_loop(definition, model_dir, recording, **drafting)
        first, again = run_alone(loop, requests), run_alone(loop, requests)
        faults = loop.stats().drafter_faults
        loop.close()
        assert faults == 0, "the drafter raised"
        cached = [first[requests[-1].request_id].cached_tokens, *(answer.cached_tokens for answer in again.values())]
        assert min(cached) >= _SHARED_TOKENS if prefix_cache else not any(cached), cached
        drafts.append([context.drafts for context in recording.log.contexts])
    return drafts[0], drafts[1]


def check_model_drafter(
    definition: ModelDefinition[Any],
    model_dir: Path,
    factory: Any,
    *,
    requests: Sequence[GenerateRequest] = (),
    seeds: Sequence[int] = (0, 1),
    max_drafts: int = 4,
    drafter_options: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> EngineStats:
    """Requests together, in several orders, others aborted between them, are answered as each alone without a drafter.

    Args:
        definition: of the family.
        model_dir: `config.json` and safetensors.
        factory: of the drafter.
        requests: by default some that ask for all that sampling offers, whose prompts begin alike.
        seeds: of the orders, one round for each in one engine, so that later ones find prefixes cached.
        max_drafts: of a row.
        drafter_options: the drafter's own.
        options: fields of `EngineOptions`, of the engine with the drafter alone.

    Returns:
        Counts of the engine with the drafter.

    Raises:
        AssertionError: an answer differs, the drafter raised, or nothing was compared.
        ValueError: a request has neither a seed nor temperature 0, so that its answers cannot be compared.
    """
    for request in requests:
        if request.sampling.seed is None and request.sampling.temperature > 0:
            message = f"request {request.request_id} is drawn differently each time: give it a seed, or temperature 0"
            raise ValueError(message)
    # Sums over ranks, and KV that is rounded, have bits of their own.
    same = {name: options[name] for name in ("tensor_parallel_size", "kv_cache_dtype") if name in options}
    alone = build_loop(resolve(definition, model_dir, EngineOptions(**_SIZES, **same, prefix_cache=False)))
    asked = requests or drafted_requests(alone.info.num_token_ids, shared_tokens=40)
    expected = run_alone(alone, asked)
    alone.close()
    drafting: dict[str, Any] = {"max_drafts": max_drafts, "drafter_options": drafter_options}
    loop = make_drafting_loop(definition, model_dir, factory, **drafting, **options)
    try:
        rounds = [run_together(loop, asked, seed=seed) for seed in seeds]
        stats = loop.stats()
    finally:
        loop.close()
    for found in rounds:
        for request_id, answer in expected.items():
            _check_same(found[request_id], answer, request_id)
    assert stats.drafter_faults == 0, "the drafter raised"
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0), stats
    num_drafts = stats.spec_decode_num_draft_tokens
    assert num_drafts > 50, f"only {num_drafts} drafts were compared: ask for more tokens, or for what it can draft"
    return stats


def accepted_share(loop: StepLoop, prompts: Sequence[Sequence[int]], *, max_tokens: int = 48) -> float:
    """How much of the drafts of greedy answers is accepted, one request after the other; the loop stays open."""
    before, sampling = loop.stats(), SamplingParams(max_tokens=max_tokens, temperature=0.0)
    for index, prompt in enumerate(prompts):
        run_at_once(
            loop, [GenerateRequest(request_id=RequestId(index), prompt_token_ids=tuple(prompt), sampling=sampling)]
        )
    after = loop.stats()
    accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
    return accepted / (after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens)


def agreeing_logits(logits: HostArray, token_id: int, *, tolerance: float) -> bool:
    """Whether a token is the likeliest of `logits [V]`, or as likely within a tolerance."""
    return bool(np.max(logits) - logits[token_id] <= tolerance)


def _check_same(found: Answer, expected: Answer, request_id: int) -> None:
    assert found.finished is not None, f"request {request_id} has not ended"
    assert expected.finished is not None
    assert found.token_ids == expected.token_ids, f"request {request_id}"
    assert found.finished.reason == expected.finished.reason, f"request {request_id}"
    assert found.logprobs == expected.logprobs, f"request {request_id}: log-probabilities"
    assert found.prompt_logprobs == expected.prompt_logprobs, f"request {request_id}: those of the prompt"
