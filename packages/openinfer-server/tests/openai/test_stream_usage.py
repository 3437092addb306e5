"""`stream_options.continuous_usage_stats`: each event says the tokens so far, on the routes that stream choices."""

import json
from typing import Any

import pytest

TURNS = [{"role": "user", "content": "How is the weather in Paris?"}]
ROUTES = {
    "/v1/completions": {"prompt": "The weather in Paris", "n": 2, "max_tokens": 9},
    "/v1/chat/completions": {"messages": TURNS, "n": 2, "max_tokens": 9, "logprobs": True},
    "/inference/v1/generate": {"token_ids": [5, 6, 7, 8], "sampling_params": {"n": 2, "max_tokens": 9}},
}


@pytest.fixture
def streamed(shared, call):
    def stream(path: str, **options: bool) -> list[dict[str, Any]]:
        body = {**ROUTES[path], "stream": True, "stream_options": options}
        status, _, answer = call(shared, "POST", path, body)
        assert status == 200, answer
        *events, done, _ = answer.decode().split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    return stream


@pytest.mark.parametrize("path", ROUTES)
def test_every_event_has_the_usage_so_far(streamed, shared, call, path):
    *events, last = streamed(path, include_usage=True, continuous_usage_stats=True)
    whole = json.loads(call(shared, "POST", path, ROUTES[path])[2])["usage"]
    assert (last["choices"], last["usage"]) == ([], whole)
    usages = [event["usage"] for event in events]
    assert {usage["prompt_tokens"] for usage in usages} == {whole["prompt_tokens"]}
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert set(counts) - {0} == set(range(1, whole["completion_tokens"] + 1))
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)


@pytest.mark.parametrize("path", ROUTES)
def test_events_are_otherwise_those_of_a_stream_without(streamed, path):
    with_usage, without = streamed(path, continuous_usage_stats=True), streamed(path)
    texts = [
        [[event["choices"][0] for event in events if event["choices"][0]["index"] == index] for index in range(2)]
        for events in (with_usage, without)
    ]
    assert texts[0] == texts[1]
    assert all(event.get("usage") is None for event in without)
