"""Structured output of the tiny model: compiled, masked and sampled by the whole engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from openinfer_core import (
    Failed,
    FailureKind,
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
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve

MODEL_DIR: Path = find_plugin("openinfer.checkpoints", "tiny").load()()
TOKENIZER = LLTokenizer(str(MODEL_DIR / "tokenizer.json"))
END = TOKENIZER.tokenize_str("<|im_end|>", parse_special=True)[0]
PROMPT = tuple(TOKENIZER.tokenize_str("Once upon a time"))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loop() -> Iterator[StepLoop]:
    family = find_plugin("openinfer.models", "qwen3").load()()
    options = EngineOptions(num_blocks=128, max_num_seqs=16, max_step_tokens=128)
    made = build_loop(resolve(family.definition, MODEL_DIR, options))
    yield made
    made.close()


def ask(number: int, kind: GrammarKind | None, text: str = "", **fields: Any) -> GenerateRequest:
    grammar = None if kind is None else Grammar(kind=kind, text=text)
    fields = {"max_tokens": 200, "stop_token_ids": (END,), "seed": number, **fields}
    sampling = SamplingParams(**fields, grammar=grammar)
    return GenerateRequest(request_id=RequestId(number), prompt_token_ids=PROMPT, sampling=sampling)


def run(loop: StepLoop, *requests: GenerateRequest) -> list[list[TokenEvent]]:
    events = [event for request in requests for event in loop.submit(request)]
    while loop.busy:
        events += loop.step()
    return [[event for event in events if event.request_id == request.request_id] for request in requests]


def text_of(events: list[TokenEvent]) -> str:
    return TOKENIZER.decode_str([token for event in events if isinstance(event, Tokens) for token in event.token_ids])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_json_follows_its_schema_whatever_the_model_would_say(loop: StepLoop, temperature: float) -> None:
    asked = [ask(n, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), temperature=temperature) for n in range(4)]
    for events in run(loop, *asked, ask(9, None)):
        assert isinstance(events[-1], Finished)
        if events[-1].request_id != 9:
            assert events[-1].reason is FinishReason.STOP
            jsonschema.validate(json.loads(text_of(events)), SCHEMA)


def test_log_probabilities_are_of_the_model_not_of_the_mask(loop: StepLoop) -> None:
    (events,) = run(loop, ask(1, GrammarKind.CHOICE, '["zzz"]', logprobs=3, temperature=0.0))
    scores: list[TokenLogprobs] = [
        score for event in events if isinstance(event, Tokens) for score in event.logprobs or ()
    ]
    assert text_of(events) == "zzz"
    assert scores[0].rank > 3
    assert scores[0].logprob < scores[0].top_logprobs[-1]


def test_max_tokens_cuts_what_the_grammar_would_go_on_with(loop: StepLoop) -> None:
    (events,) = run(loop, ask(1, GrammarKind.REGEX, "[0-9]{50}", max_tokens=7))
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH
    assert len(text_of(events)) == 7


def test_a_grammar_that_cannot_be_used_fails_its_request_alone(loop: StepLoop) -> None:
    bad, good = run(loop, ask(1, GrammarKind.REGEX, "(("), ask(2, GrammarKind.REGEX, "yes|no"))
    (failure,) = bad
    assert isinstance(failure, Failed)
    assert failure.kind is FailureKind.INVALID
    assert "unclosed group" in failure.message
    assert text_of(good) in {"yes", "no"}


def test_a_grammar_over_before_min_tokens_fails_its_request(loop: StepLoop) -> None:
    (events,) = run(loop, ask(1, GrammarKind.REGEX, "7", min_tokens=5))
    assert isinstance(events[-1], Failed)
    assert events[-1].kind is FailureKind.INVALID
    assert "min_tokens is 5" in events[-1].message


def test_a_grammar_outlives_preemption() -> None:
    family = find_plugin("openinfer.models", "qwen3").load()()
    options = EngineOptions(num_blocks=10, max_num_seqs=8, max_step_tokens=64, max_model_tokens=128)
    loop = build_loop(resolve(family.definition, MODEL_DIR, options))
    asked = [ask(n, GrammarKind.REGEX, "([a-z]{5} ){20}", max_tokens=110) for n in range(4)]
    for events in run(loop, *asked):
        text = text_of(events)
        assert all(len(word) == 5 and word.isalpha() for word in text.split(" ")[:-1])
    assert loop.stats().preemptions > 0
    loop.close()


def test_without_a_compiler_a_grammar_is_refused() -> None:
    family = find_plugin("openinfer.models", "qwen3").load()()
    composition = resolve(family.definition, MODEL_DIR, EngineOptions(num_blocks=16, grammar_compiler="none"))
    assert composition.parts["grammar_compiler"] == "none"
    loop = build_loop(composition)
    (events,) = run(loop, ask(1, GrammarKind.REGEX, "a"))
    assert isinstance(events[-1], Failed)
    assert "no grammar compiler" in events[-1].message
    loop.close()
