"""Real grammars and drafts through the whole engine: the answers are those without a drafter, token by token."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLTokenizer

from openinfer_core import (
    EngineStats,
    Finished,
    FinishReason,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    Tokens,
    find_plugin,
)
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.drafting import DrafterFactory
from openinfer_engine.testing.drafters import DraftKind, scripted_drafter, with_drafter

MODEL_DIR: Path = find_plugin("openinfer.checkpoints", "tiny").load()()
TOKENIZER = LLTokenizer(str(MODEL_DIR / "tokenizer.json"))
END = TOKENIZER.tokenize_str("<|im_end|>", parse_special=True)[0]
PROMPT = tuple(TOKENIZER.tokenize_str("one two three one two three one two"))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "tags": {"enum": ["red red red", "green green"]}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
GRAMMARS: list[tuple[GrammarKind, str]] = [
    (GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    (GrammarKind.REGEX, "(ab|cd){6,12}[0-9]{4}"),
    (GrammarKind.CHOICE, json.dumps(["red red red red", "red red blue", "green green"])),
    (GrammarKind.LARK, 'start: ("one " | "two ")+ "end"'),
]
NUM_GRAMMARS = 2 * len(GRAMMARS)
Answers = dict[int, tuple[list[int], list[TokenLogprobs], Finished]]


def requests() -> list[GenerateRequest]:
    """Each grammar greedily and at random, cut short, with penalties, with `min_tokens`; and free text beside them."""
    shared: dict[str, Any] = {"stop_token_ids": (END,), "logprobs": 2}
    fields: list[dict[str, Any]] = [
        {**shared, "grammar": Grammar(kind=kind, text=text), "temperature": temperature, "max_tokens": 60}
        for kind, text in GRAMMARS
        for temperature in (0.0, 1.0)
    ]
    fields[1] |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    fields[3] |= {"min_tokens": 14, "logit_bias": {END: 5.0}}
    fields[2] |= {"max_tokens": 7}
    fields += [{**shared, "temperature": temperature, "max_tokens": 40} for temperature in (0.0, 1.0)]
    return [
        GenerateRequest(
            request_id=RequestId(number), prompt_token_ids=PROMPT, sampling=SamplingParams(**each, seed=number)
        )
        for number, each in enumerate(fields)
    ]


def answers_of(events: Sequence[TokenEvent], number: int) -> tuple[list[int], list[TokenLogprobs], Finished]:
    own = [event for event in events if event.request_id == number]
    tokens = [event for event in own if isinstance(event, Tokens)]
    end = own[-1]
    assert isinstance(end, Finished), end
    token_ids = [token_id for event in tokens for token_id in event.token_ids]
    end = msgspec.structs.replace(end, accepted_drafts=0, rejected_drafts=0)
    return token_ids, [score for event in tokens for score in event.logprobs or ()], end


def serve(factory: DrafterFactory | None, **options: Any) -> tuple[Answers, EngineStats]:
    family = find_plugin("openinfer.models", "qwen3").load()()
    fields = {"num_blocks": 128, "max_num_seqs": 16, "max_step_tokens": 64, "batch_invariant": True, **options}
    plan = resolve(family.definition, MODEL_DIR, EngineOptions(**fields))
    loop = build_loop(plan if factory is None else with_drafter(plan, factory, max_drafts=4))
    asked = requests()
    try:
        events = [event for request in asked for event in loop.submit(request)]
        while loop.busy:
            events += loop.step()
        return {int(each.request_id): answers_of(events, each.request_id) for each in asked}, loop.stats()
    finally:
        loop.close()


@pytest.fixture(scope="module")
def plain() -> Answers:
    return serve(None)[0]


def test_answers_without_drafts_end_both_ways_and_fit(plain: Answers) -> None:
    ends = {number: end.reason for number, (_, _, end) in plain.items()}
    assert ends[2] is FinishReason.LENGTH
    assert ends[3] is FinishReason.STOP
    assert json.loads(TOKENIZER.decode_str(plain[0][0])).keys() == {"name", "tags"}
    assert all(len(token_ids) == len(scores) > 0 for token_ids, scores, _ in plain.values())


@pytest.mark.parametrize("kind", DraftKind)
def test_answers_with_grammars_and_drafts_are_those_without(plain: Answers, kind: DraftKind) -> None:
    outputs = {number: token_ids for number, (token_ids, _, _) in plain.items()}
    found, stats = serve(scripted_drafter(kind, outputs))
    assert found == plain
    assert stats.spec_decode_num_draft_tokens > 0
    if kind is DraftKind.RIGHT:
        free = sum(len(token_ids) for number, token_ids in outputs.items() if number >= NUM_GRAMMARS)
        assert stats.spec_decode_num_accepted_tokens > free, "rows with a grammar had no accepted drafts"


def test_answers_with_grammars_drafts_and_preemptions_are_those_without(plain: Answers) -> None:
    outputs = {number: token_ids for number, (token_ids, _, _) in plain.items()}
    found, stats = serve(scripted_drafter(DraftKind.RANDOM, outputs), num_blocks=6, max_model_tokens=96)
    assert found == plain
    assert stats.preemptions > 0
    assert stats.spec_decode_num_accepted_tokens > 0
