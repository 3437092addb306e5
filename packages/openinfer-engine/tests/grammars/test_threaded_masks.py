"""Real grammars, threads and sharing through the whole engine: answers are those of masks that are made one by one.

The reference has matchers that share nothing, and a scheduler that waits for every mask. The others share masks, which
come late at random. Grammars are random, outputs come sixteen at a time.
"""

import json
import random
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from openinfer_core import (
    EngineStats,
    Failed,
    Finished,
    GenerateRequest,
    Plugin,
    RequestId,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    Tokens,
    find_plugin,
)
from openinfer_core.grammars import GrammarCompiler, MaskWords, TokenMatcher, Vocabulary
from openinfer_core.plugins import GRAMMAR_COMPILERS, SCHEDULERS
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_core.scheduling import QueuePolicy, Scheduler, SchedulerConfig, StepPlan, StepResult
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.grammars.choice import llguidance_compiler
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.testing.drafters import DraftKind, scripted_drafter, with_drafter

MODEL_DIR: Path = find_plugin("openinfer.checkpoints", "tiny").load()()
TOKENIZER = LLTokenizer(str(MODEL_DIR / "tokenizer.json"))
END = TOKENIZER.tokenize_str("<|im_end|>", parse_special=True)[0]
NUM_OUTPUTS = 16
PREEMPTING_SEED = 0  # whose outputs outgrow the few blocks
Answers = dict[int, tuple[list[int], list[TokenLogprobs], str]]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.choice(("string", "integer", "enum", "object", "array") if depth < 2 else ("string", "integer", "enum"))
    if kind == "string":
        return {"type": "string", "maxLength": rng.randrange(1, 9)}
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": rng.randrange(1, 2000)}
    if kind == "enum":
        return {"enum": [rng.choice("abcdef") * rng.randrange(1, 6) for _ in range(rng.randrange(1, 4))]}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": 1, "maxItems": 3}
    properties = {f"k{n}": random_schema(rng, depth + 1) for n in range(rng.randrange(1, 4))}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def random_regex(rng: random.Random) -> str:
    parts = [
        rng.choice(("[a-z]", "(ab|cde)", "[0-9]{2}", "(one|two|three) ", "x?")) for _ in range(rng.randrange(1, 5))
    ]
    return "".join(f"({part}){{1,{rng.randrange(1, 6)}}}" for part in parts)


def requests(seed: int) -> list[GenerateRequest]:
    """Groups of sixteen outputs of one grammar: equal seeds in some, so that whole outputs are equal."""
    rng = random.Random(seed)
    asked: list[GenerateRequest] = []
    for group in range(2):
        schema = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(random_schema(rng)))
        regex = Grammar(kind=GrammarKind.REGEX, text=random_regex(rng) if group else "([a-z]{5} ){4}")
        grammar = rng.choice((schema, regex)) if group else regex
        prompt = tuple(TOKENIZER.tokenize_str("one two three " * rng.randrange(3, 6)))
        temperature = rng.choice((0.0, 1.0, 1.0))
        fields: dict[str, Any] = {"max_tokens": rng.choice((6, 24)) if group else 24, "logprobs": rng.choice((None, 2))}
        for output in range(6 if group else NUM_OUTPUTS):
            restricted = {"bad_words": ((prompt[0],),)} if output == 3 else {}
            sampling = SamplingParams(
                grammar=grammar,
                stop_token_ids=(END,),
                temperature=temperature,
                seed=output % rng.choice((2, 16)),
                **fields,
                **restricted,
            )
            number = group * NUM_OUTPUTS + output
            asked.append(GenerateRequest(request_id=RequestId(number), prompt_token_ids=prompt, sampling=sampling))
    free = SamplingParams(max_tokens=20, stop_token_ids=(END,), temperature=1.0, seed=5)
    asked.append(GenerateRequest(request_id=RequestId(999), prompt_token_ids=prompt, sampling=free))
    return asked


class Alone:
    """A matcher that says nothing of itself, so that nothing is shared."""

    def __init__(self, matcher: TokenMatcher) -> None:
        self.fill: Callable[[MaskWords], None] = matcher.fill
        self.accept: Callable[[int], None] = matcher.accept
        self.rollback: Callable[[int], None] = matcher.rollback


class OneByOne:
    """The compiler, with matchers that share nothing, called from one thread."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self.close = compiler.close

    def compile(self, request: GenerateRequest) -> "Future[TokenMatcher]":
        made: Future[TokenMatcher] = Future()
        made.set_result(Alone(self._compiler.compile(request).result(60)))
        return made


class PlansAll:
    """The scheduler without `hold`: every mask is waited for."""

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        inner = self._inner = TokenBudgetScheduler(config, policy)
        self.capabilities = inner.capabilities
        self.add, self.abort, self.stats = inner.add, inner.abort, inner.stats
        self.use_tiers, self.listen = inner.use_tiers, inner.listen

    def plan(self, *, now_s: float) -> StepPlan | None:
        return self._inner.plan(now_s=now_s)

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        return self._inner.apply(plan, result, now_s=now_s)

    @property
    def unfinished_ids(self) -> AbstractSet[RequestId]:
        return self._inner.unfinished_ids


class HoldsMore(PlansAll):
    """The scheduler told of masks that are late, and of more than are: it holds others at random for a step."""

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(config, policy)
        self._rng = random.Random(1)
        self._sampled: set[RequestId] = set()

    def hold(self, request_ids: AbstractSet[RequestId]) -> None:
        # Only what is between two of its tokens may be held.
        more = {each for each in sorted(self._sampled & set(self.unfinished_ids)) if self._rng.random() < 0.3}
        self._inner.hold(request_ids | more if len(self._sampled) > 1 else request_ids)

    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = self._inner.plan(now_s=now_s)
        if plan is None:
            self._inner.hold(frozenset())
            plan = self._inner.plan(now_s=now_s)
        return plan

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        events = self._inner.apply(plan, result, now_s=now_s)
        self._sampled |= {event.request_id for event in events if isinstance(event, Tokens)} - {RequestId(999)}
        return events


@dataclass(frozen=True)
class Given(Plugin):
    """A plug-in that is here already."""

    factory: Callable[..., Any]

    def load(self) -> Callable[..., Any]:
        return self.factory


def given(group: str, factory: Callable[..., Any]) -> Given:
    entry_point = EntryPoint("given", "openinfer_engine.grammars.choice:given", group)
    return Given(group, entry_point.name, entry_point, factory)


def one_by_one(vocabulary: Vocabulary) -> GrammarCompiler:
    return OneByOne(llguidance_compiler(vocabulary))


def serve(
    asked: list[GenerateRequest],
    *,
    scheduler: Callable[[SchedulerConfig, QueuePolicy], Scheduler],
    compiler: Callable[[Vocabulary], GrammarCompiler] = llguidance_compiler,
    outputs: dict[int, list[int]] | None = None,
    **options: Any,
) -> tuple[Answers, EngineStats]:
    family = find_plugin("openinfer.models", "qwen3").load()()
    fields: dict[str, Any] = {"num_blocks": 256, "max_num_seqs": 24, "max_step_tokens": 64, "batch_invariant": True}
    fields |= options
    plan = resolve(family.definition, MODEL_DIR, EngineOptions(**fields))
    plan = replace(plan, grammar_compiler=given(GRAMMAR_COMPILERS, compiler), scheduler=given(SCHEDULERS, scheduler))
    if outputs is not None:
        plan = with_drafter(plan, scripted_drafter(DraftKind.RANDOM, outputs), max_drafts=4)
    loop = build_loop(plan)
    try:
        events = [event for request in asked for event in loop.submit(request)]
        while loop.busy:
            events += loop.step()
        return {int(each.request_id): answer_of(events, each.request_id) for each in asked}, loop.stats()
    finally:
        loop.close()


def answer_of(events: list[TokenEvent], number: int) -> tuple[list[int], list[TokenLogprobs], str]:
    own = [event for event in events if event.request_id == number]
    tokens = [event for event in own if isinstance(event, Tokens)]
    end = own[-1]
    assert isinstance(end, Finished | Failed), end
    said = end.message if isinstance(end, Failed) else f"{end.reason} {end.stop_token_id}"
    token_ids = [token_id for event in tokens for token_id in event.token_ids]
    return token_ids, [score for event in tokens for score in event.logprobs or ()], said


@pytest.mark.parametrize("seed", range(2))
def test_answers_are_those_of_masks_that_are_made_one_by_one(seed: int) -> None:
    asked = requests(seed)
    plain, _ = serve(asked, scheduler=PlansAll, compiler=one_by_one)
    outputs = {number: token_ids for number, (token_ids, _, _) in plain.items()}
    assert sum(map(len, outputs.values())) > 100

    shared, stats = serve(asked, scheduler=TokenBudgetScheduler)
    assert shared == plain
    assert stats.grammars is not None
    assert stats.grammars.masks_shared > 0

    small: dict[str, Any] = {"num_blocks": 9, "max_model_tokens": 64, "max_step_tokens": 24}
    late, stats = serve(asked, scheduler=HoldsMore, **small)
    assert late == plain
    assert stats.preemptions > 0 or seed != PREEMPTING_SEED

    drafted, stats = serve(asked, scheduler=HoldsMore, outputs=outputs, **small)
    assert drafted == plain
    assert stats.spec_decode_num_accepted_tokens > 0
