"""What clients say of how long prefixes are kept reaches the engine; what it cannot mean is refused by name."""

import json

import pytest

from openinfer_server import ServerOptions
from openinfer_server.request.retention import Retention, marked
from openinfer_server.testing import ParrotLoop

MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
ASK = [{"role": "user", "content": "hello"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOOL = {"name": "find", "input_schema": {"type": "object", "properties": {}}}


def body(path: str, **fields: object) -> dict[str, object]:
    if path == RESPONSES:
        return {"model": "parrot", "input": "hello", "max_output_tokens": 1, **fields}
    return {"model": "parrot", "messages": ASK, "max_tokens": 1, **fields}


@pytest.fixture
def server(start, info):
    return start(ParrotLoop(info))


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("fields", "seconds", "has_key"),
    [
        ({}, None, False),
        ({"prompt_cache_key": "conversation"}, 600.0, True),
        ({"prompt_cache_key": "conversation", "prompt_cache_retention": "24h"}, 86_400.0, True),
        ({"prompt_cache_retention": "in-memory"}, 600.0, False),
        ({"prompt_cache_key": "x" * 10_000, "prompt_cache_retention": "in_memory"}, 600.0, True),
    ],
)
def test_openais_fields_are_told_to_the_engine(server, call, path, fields, seconds, has_key):
    assert call(server, "POST", path, body(path, **fields))[0] == 200
    request = server.engine.submitted[-1]
    assert (request.retain_s, request.cache_key is not None) == (seconds, has_key)
    assert "conversation" not in str(request.cache_key)


def test_keys_are_told_apart(server, call):
    for key in ("one", "two", "one"):
        call(server, "POST", CHAT, body(CHAT, prompt_cache_key=key))
    one, two, again = (request.cache_key for request in server.engine.submitted)
    assert one == again != two


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None),
        ({"cache_control": MARK}, 300.0),
        ({"system": [{"type": "text", "text": "brief", "cache_control": MARK}]}, 300.0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": HOUR}]}]}, 3600.0),
        ({"cache_control": MARK, "system": [{"type": "text", "text": "x", "cache_control": HOUR}]}, 3600.0),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300.0),
        ({"system": [{"type": "text", "text": "brief", "cache_control": None}]}, None),
    ],
)
def test_anthropics_marks_are_told_to_the_engine(server, call, fields, seconds):
    assert call(server, "POST", MESSAGES, body(MESSAGES, **fields))[0] == 200
    assert server.engine.submitted[-1].retain_s == seconds


def test_marks_on_tools_and_openais_fields_count_too():
    tools = [TOOL, {**TOOL, "cache_control": HOUR}]
    assert marked(Retention(), None, tools, None) == Retention(3600.0)
    assert marked(Retention(600.0, "key"), None, tools, "text") == Retention(3600.0, "key")
    assert marked(Retention(86_400.0), tools).seconds == 86_400.0
    assert marked(Retention(), None, "text") == Retention()


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        (RESPONSES, {"prompt_cache_retention": 5}, "prompt_cache_retention"),
        (MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control"),
        (MESSAGES, {"cache_control": {"type": "for ever"}}, "cache_control"),
        (MESSAGES, {"system": [{"type": "text", "text": "x", "cache_control": {"ttl": "1h"}}]}, "cache_control"),
        (MESSAGES, {"tools": [{**TOOL, "cache_control": {**MARK, "ttl": 7}}]}, "cache_control"),
    ],
)
def test_what_it_cannot_mean_is_refused_by_name(server, call, path, fields, named):
    status, _, answer = call(server, "POST", path, body(path, **fields))
    assert status == 400
    assert named in answer.decode()
    assert server.engine.submitted == []


def test_usage_of_marked_prompts_says_what_is_created(start, info, call):
    server = start(ParrotLoop(info), ServerOptions(port=0))
    long = [{"role": "user", "content": "stone mountain " * 20}]
    plain, marked = (
        json.loads(call(server, "POST", MESSAGES, body(MESSAGES, messages=long, **fields))[2])["usage"]
        for fields in ({}, {"cache_control": MARK})
    )
    size = info.block_size_tokens
    whole = plain["input_tokens"] + plain["cache_read_input_tokens"]
    assert plain["cache_creation_input_tokens"] == 0
    assert marked["cache_creation_input_tokens"] == whole // size * size - marked["cache_read_input_tokens"] > 0
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(marked[name] for name in names) == whole
