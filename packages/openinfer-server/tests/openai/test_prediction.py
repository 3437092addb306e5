"""OpenAI's `prediction`: its ids reach an engine that drafts from it, and usage says what became of them."""

import json

import msgspec
import openai
import pytest

from openinfer_core import EngineCapability
from openinfer_core.request import MAX_PREDICTION_TOKENS
from openinfer_server.testing import ParrotLoop

TURNS = [{"role": "user", "content": "Say it again."}]


@pytest.fixture
def drafting(start, info):
    """A server whose engine drafts from predictions; the parrot says the prompt, which a prediction may begin like."""
    return start(ParrotLoop(msgspec.structs.replace(info, capabilities=(EngineCapability.PREDICTIONS,))))


@pytest.fixture
def client(drafting, connect) -> openai.OpenAI:
    return connect(drafting)


def ask(client, prediction, **fields):
    return client.chat.completions.create(
        model="parrot",
        messages=TURNS,
        max_tokens=6,
        prediction={"type": "content", "content": prediction},
        extra_body={"ignore_eos": True},
        **fields,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_prediction_reaches_the_engine_and_usage_counts_its_drafts(client, drafting, tokenizer, stream) -> None:
    begins_like_the_answer = "<|im_start|>user\nSay something else"
    wanted = tokenizer.encode(begins_like_the_answer, add_special_tokens=False).ids
    if stream:
        *_, last = ask(client, begins_like_the_answer, stream=True, stream_options={"include_usage": True})
        usage = last.usage
    else:
        usage = ask(client, begins_like_the_answer).usage
    request = drafting.engine.submitted[-1]
    assert request.prediction_token_ids == tuple(wanted)
    same = [a == b for a, b in zip(wanted, request.prompt_token_ids[:6], strict=False)]
    num_accepted = same.index(False) if False in same else len(same)
    details = usage.completion_tokens_details
    assert num_accepted > 0
    assert details.accepted_prediction_tokens == num_accepted
    assert details.rejected_prediction_tokens == len(wanted) - num_accepted
    assert usage.completion_tokens == 6


def test_parts_of_text_are_one_prediction_of_all_choices(client, drafting, tokenizer) -> None:
    ask(client, [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], n=2)
    wanted = tuple(tokenizer.encode("one two", add_special_tokens=False).ids)
    assert [each.prediction_token_ids for each in drafting.engine.submitted[-2:]] == [wanted, wanted]


def test_answers_without_a_prediction_count_none(client, call, drafting) -> None:
    body = {"model": "parrot", "messages": TURNS, "max_tokens": 2}
    _, _, answer = call(drafting, "POST", "/v1/chat/completions", body)
    assert json.loads(answer)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert ask(client, "").usage.completion_tokens_details.accepted_prediction_tokens is None
    assert drafting.engine.submitted[-1].prediction_token_ids == ()


def test_what_cannot_be_drafted_from_is_refused_by_name(client, connect, start, info) -> None:
    with pytest.raises(openai.BadRequestError, match=f"at most {MAX_PREDICTION_TOKENS} are possible") as too_long:
        ask(client, "naïve 🙂 " * MAX_PREDICTION_TOKENS)
    assert too_long.value.param == "prediction"
    with pytest.raises(openai.BadRequestError, match="whose parts are text; not 'image_url'"):
        ask(client, [{"type": "image_url", "image_url": {"url": "x"}}])
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="parrot", messages=TURNS, prediction={"type": "picture", "content": "x"})
    without = connect(start(ParrotLoop(info)))
    with pytest.raises(openai.BadRequestError, match="with --speculative ngram it does") as refused:
        ask(without, "one")
    assert refused.value.param == "prediction"
