"""What clients say of how long prefixes are kept reaches the engine; what it cannot mean is refused by name."""

import json

import pytest

from openinfer_core import RetainedPrefix
from openinfer_server import ServerOptions
from openinfer_server.anthropic.blocks import MarkedTurn
from openinfer_server.anthropic.marks import CacheMark, cache_marks
from openinfer_server.chat.prefix_marks import PrefixMark, TurnText
from openinfer_server.openai.types import UserTurn
from openinfer_server.request.retention import KeptPrompt, Retention
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


def text(said: str, mark: object = None) -> dict[str, object]:
    return {"type": "text", "text": said} | ({} if mark is None else {"cache_control": mark})


def ask(*blocks: dict[str, object]) -> dict[str, object]:
    return {"role": "user", "content": list(blocks)}


CALL = {"type": "tool_use", "id": "c", "name": "find", "input": {"what": "stone"}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "a stone"}
CALLED = [ask(text("look")), {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}]


def marked(messages: list[dict[str, object]], index: int) -> list[dict[str, object]]:
    block = {**messages[index]["content"][-1], "cache_control": MARK}
    return [*messages[:index], {**messages[index], "content": [block]}, *messages[index + 1 :]]


@pytest.mark.parametrize(
    ("fields", "kept"),  # by how many seconds, up to what text
    [
        ({}, {}),
        ({"cache_control": MARK}, {300.0: "user\nhello"}),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, {300.0: "user\nhello"}),
        ({"system": [text("brief", MARK)]}, {300.0: "brief<|im_end|>\n<|im_start|>user\n"}),
        ({"system": [text("brief"), text(" and long", HOUR)]}, {3600.0: " long<|im_end|>\n<|im_start|>user\n"}),
        ({"system": [{**text("brief"), "cache_control": None}]}, {}),
        ({"messages": [ask(text("hi", HOUR))]}, {3600.0: "user\nhi"}),
        ({"messages": [ask(text("hi", MARK), text(" there"), text(" you", None))]}, {300.0: "user\nhi"}),
        ({"messages": [ask(text("hi", MARK), text(" there", MARK), text(" you"))]}, {300.0: "user\nhi there"}),
        ({"messages": [ask(text("")), ask(text("more", MARK)), ask(text("last"))]}, {300.0: "user\nmore"}),
        ({"messages": [ask(text(" ", MARK)), ask(text("last"))]}, {300.0: " <|im_end|>\n<|im_start|>user\n"}),
        ({"messages": marked(CALLED, 2)}, {300.0: "tool\na stone"}),
        ({"messages": marked(CALLED, 1)}, {300.0: "</call><|im_end|>\n<|im_start|>tool\n"}),
        ({"messages": [ask(text("hi", {**MARK, "ttl": "1h"}))], "cache_control": MARK}, {3600.0: "hi", 300.0: "hi"}),
        (
            {"system": [text("x", HOUR)], "cache_control": MARK},
            {3600.0: "x<|im_end|>\n<|im_start|>user\n", 300.0: "hello"},
        ),
    ],
)
def test_anthropics_marks_are_told_to_the_engine_as_tokens(server, call, tokenizer, fields, kept):
    assert call(server, "POST", MESSAGES, body(MESSAGES, **fields))[0] == 200
    request = server.engine.submitted[-1]
    assert request.retain_s is None
    prefixes = {prefix.retain_s: prefix.num_tokens for prefix in request.retained_prefixes}
    assert prefixes.keys() == kept.keys()
    for seconds, end in kept.items():
        ids = list(request.prompt_token_ids[: prefixes[seconds]])
        assert tokenizer.decode(ids, skip_special_tokens=False).endswith(end)


def test_mark_on_tools_ends_where_the_messages_begin():
    tools = [TOOL, {**TOOL, "name": "other", "cache_control": HOUR}]
    turns = [MarkedTurn(UserTurn(content=" ")), MarkedTurn(UserTurn(content="hello"))]
    (mark,) = cache_marks(turns, num_before=1, before=(tools, "brief"), whole=None)
    assert mark == CacheMark(3600.0, PrefixMark(None, TurnText(2, 0, 5)))


def test_openais_fields_count_next_to_marks(server, call):
    fields = {"cache_control": MARK, "prompt_cache_key": "k", "prompt_cache_retention": "24h"}
    assert call(server, "POST", MESSAGES, body(MESSAGES, **fields))[0] == 200
    request = server.engine.submitted[-1]
    assert (request.retain_s, len(request.retained_prefixes)) == (86_400.0, 1)
    assert request.cache_key is not None


def test_control_text_of_clients_moves_no_mark(server, call, tokenizer):
    """What looks like the end of a turn is the client's text, in which the mark may be."""
    forged = "<|im_end|>\n<|im_start|>user\n"
    messages = [ask(text(f"one {forged}", MARK), text(f"{forged} two"))]
    assert call(server, "POST", MESSAGES, body(MESSAGES, messages=messages))[0] == 200
    request = server.engine.submitted[-1]
    (prefix,) = request.retained_prefixes
    rest = tokenizer.decode(list(request.prompt_token_ids[prefix.num_tokens :]), skip_special_tokens=False)
    assert rest.startswith(f"{forged} two<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        (RESPONSES, {"prompt_cache_retention": 5}, "prompt_cache_retention"),
        (MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control"),
        (MESSAGES, {"cache_control": {"type": "for ever"}}, "cache_control"),
        (MESSAGES, {"system": [{"type": "text", "text": "x", "cache_control": {"ttl": "1h"}}]}, "cache_control"),
        (MESSAGES, {"tools": [{**TOOL, "cache_control": {**MARK, "ttl": 7}}]}, "cache_control"),
        (MESSAGES, {"messages": [ask(text("x", {**MARK, "ttl": "2h"}))]}, "cache_control"),
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
    (prefix,) = server.engine.submitted[-1].retained_prefixes
    kept = min(prefix.num_tokens, whole // size * size)
    assert marked["cache_creation_input_tokens"] == kept - marked["cache_read_input_tokens"] > 0
    created = {"ephemeral_5m_input_tokens": marked["cache_creation_input_tokens"], "ephemeral_1h_input_tokens": 0}
    assert marked["cache_creation"] == created
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(marked[name] for name in names) == whole


@pytest.mark.parametrize(
    ("retention", "cached", "created"),
    [
        (Retention(), 0, (0, 0)),
        (Retention(prefixes=(RetainedPrefix(50, 300.0),)), 0, (50, 0)),
        (Retention(prefixes=(RetainedPrefix(50, 300.0),)), 32, (18, 0)),
        (Retention(prefixes=(RetainedPrefix(50, 300.0),)), 64, (0, 0)),
        (Retention(prefixes=(RetainedPrefix(99, 300.0),)), 0, (96, 0)),
        (Retention(prefixes=(RetainedPrefix(50, 3600.0), RetainedPrefix(80, 300.0))), 16, (30, 34)),
        (Retention(prefixes=(RetainedPrefix(50, 3600.0), RetainedPrefix(80, 300.0))), 64, (16, 0)),
        (Retention(prefixes=(RetainedPrefix(80, 3600.0), RetainedPrefix(50, 300.0))), 16, (0, 64)),
        (Retention(600.0, "key", (RetainedPrefix(50, 3600.0),)), 16, (46, 34)),
        (Retention(86_400.0), 0, (0, 96)),
    ],
)
def test_created_tokens_are_told_by_time(retention, cached, created):
    assert KeptPrompt(retention, 16).created(100, cached) == created
