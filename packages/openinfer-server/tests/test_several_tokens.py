"""Responses do not depend on how many tokens an engine's event brings: as a drafter's guesses turn out."""

import json

import pytest

from openinfer_core.simulated import SimulatedLoop, SimulatedOptions
from openinfer_server.testing import ThreadedServer


def simulated(info, drafts_per_step: int) -> SimulatedLoop:
    return SimulatedLoop(
        SimulatedOptions(
            num_token_ids=info.num_token_ids,
            eos_token_ids=info.eos_token_ids,
            max_model_tokens=info.max_model_tokens,
            drafts_per_step=drafts_per_step,
            acceptance_rate=0.8,
        )
    )


@pytest.fixture
def servers(start, info) -> tuple[ThreadedServer, ThreadedServer]:
    """One whose events have one token each, and one whose events have up to six."""
    return start(simulated(info, 0)), start(simulated(info, 5))


def respond(call, server, route, body):
    status, _, response = call(server, "POST", route, body)
    assert status == 200, response
    response = json.loads(response)
    assert response["usage"]["completion_tokens"] > 0
    return response["choices"], response["usage"]


def stream(call, server, route, body):
    """Text, log-probabilities, finish reasons and usage of a stream, as its chunks bring them."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    status, _, response = call(server, "POST", route, body)
    assert status == 200, response
    chunks = [json.loads(line[6:]) for line in response.decode().splitlines() if line.startswith("data: {")]
    choices = sorted((choice for chunk in chunks for choice in chunk["choices"]), key=lambda choice: choice["index"])
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    logprobs = [entry for choice in choices if choice.get("logprobs") for entry in flat(choice["logprobs"])]
    return (
        text,
        logprobs,
        [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        chunks[-1]["usage"],
    )


def flat(logprobs):
    if "content" in logprobs:
        return logprobs["content"]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in names), strict=True))


def check_alike(call, servers, route, body) -> None:
    plain, several = servers
    assert respond(call, several, route, body) == respond(call, plain, route, body)
    assert stream(call, several, route, body) == stream(call, plain, route, body)


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 60])
def test_completions_and_their_log_probabilities_are_alike(servers, call, max_tokens, logprobs):
    body = {"prompt": "The capital of France", "max_tokens": max_tokens, "logprobs": logprobs}
    check_alike(call, servers, "/v1/completions", body)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("begin", [3, 4, 5, 6, 20, 33])
def test_stop_strings_end_a_response_at_the_same_place(servers, call, begin, length):
    """Wherever in an event the string begins or ends, also over several tokens."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "logprobs": 1}
    (whole,), _ = respond(call, servers[0], "/v1/completions", body)
    stop = whole["text"][begin : begin + length]
    for stops in ([stop], [stop, "never said"], [stop, whole["text"][begin + 1 : begin + 3]]):
        check_alike(call, servers, "/v1/completions", {**body, "stop": stops})
    (ended,), _ = respond(call, servers[1], "/v1/completions", {**body, "stop": [stop]})
    assert ended["finish_reason"] == "stop"
    assert ended["text"] == whole["text"][: whole["text"].index(stop)]


def test_stop_tokens_and_choices_are_alike(servers, call, info):
    every_fifth = list(range(0, info.num_token_ids, 5))
    body = {"prompt": "a stone", "max_tokens": 80, "stop_token_ids": every_fifth, "min_tokens": 9, "n": 2}
    check_alike(call, servers, "/v1/completions", body)


def test_chat_responses_are_alike(servers, call):
    turns = [{"role": "user", "content": "Is Paris in Italy?"}]
    body = {"messages": turns, "max_tokens": 50, "logprobs": True, "top_logprobs": 2}
    check_alike(call, servers, "/v1/chat/completions", body)


def test_events_did_bring_several_tokens(servers, call):
    respond(call, servers[1], "/v1/completions", {"prompt": "Paris", "max_tokens": 60})
    metrics = call(servers[1], "GET", "/metrics")[2].decode()
    accepted = next(line for line in metrics.splitlines() if "num_accepted_tokens_total{" in line)
    assert float(accepted.rsplit(" ", 1)[1]) > 10
