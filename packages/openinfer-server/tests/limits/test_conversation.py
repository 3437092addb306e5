"""How many pieces a conversation may have, and how deep the JSON in one of them may be."""

import json

import pytest

from openinfer_server.http.api_errors import ApiError
from openinfer_server.limits.conversation import MAX_DEPTH, MAX_ENTRIES, check_depth, check_num_entries

EMPTY = {"role": "user", "content": ""}


def nested(depth: int, *, brackets: bool = False):
    value: object = 1
    for _ in range(depth):
        value = [value] if brackets else {"a": value}
    return value


@pytest.mark.parametrize("brackets", [False, True])
def test_depth_is_counted_to_the_bound(brackets):
    check_depth(nested(MAX_DEPTH - 1, brackets=brackets), "x")
    with pytest.raises(ApiError, match="x is nested more than 64 deep"):
        check_depth(nested(MAX_DEPTH, brackets=brackets), "x")
    check_depth({"a": [1] * 1000, "b": None}, "x")


def test_parts_are_pieces():
    assert check_num_entries([EMPTY, {"content": [1, 2]}, {"output": [3]}, {"output": "text"}], "input") == 4 + 3
    with pytest.raises(ApiError, match="at most 16384"):
        check_num_entries([{"content": [None] * MAX_ENTRIES}], "input")


BODIES = {
    "/v1/chat/completions": lambda schema: {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
    },
    "/v1/responses": lambda schema: {
        "input": "a",
        "tools": [{"type": "function", "name": "f", "strict": False, "parameters": schema}],
    },
    "/v1/messages": lambda schema: {
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"name": "f", "input_schema": schema}],
    },
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("depth", [64, 900, 960, 975, 980, 985, 990, 995, 2000, 100_000])
def test_deep_schema_is_refused_whatever_the_depth(shared, call, path, depth):
    body = json.dumps(BODIES[path]("deep")).replace('"deep"', '{"a":' * depth + "1" + "}" * depth).encode()
    status, _, answer = call(shared, "POST", path, body)
    assert status == 400
    assert b"nested" in answer


@pytest.mark.parametrize(
    ("path", "field", "beside"),
    [
        ("/v1/chat/completions", "messages", {}),
        ("/v1/responses", "input", {}),
        ("/v1/messages", "messages", {"max_tokens": 1}),
    ],
)
def test_too_many_turns_are_refused(shared, call, path, field, beside):
    status, _, answer = call(shared, "POST", path, {**beside, field: [EMPTY] * (MAX_ENTRIES + 1)})
    assert status == 400
    assert f"{field} has 16385 entries" in json.loads(answer)["error"]["message"]


def test_long_conversation_is_read_in_a_thread(shared, call):
    turns = [EMPTY, {"role": "assistant", "content": ""}] * 150
    status, _, answer = call(shared, "POST", "/v1/responses", {"input": [*turns, EMPTY], "max_output_tokens": 1})
    assert status == 400
    assert b"context holds 2048" in answer
