"""`null` is absence in every object of the API's own, on every route with a body; in the client's own it is a value."""

import contextlib
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openinfer_core.engine import EngineInfo
from openinfer_server import ServerOptions
from openinfer_server.http.nulls import without_nulls
from openinfer_server.request.fields import RequestFields
from openinfer_server.testing import ParrotLoop, ThreadedServer

KEY = "an-admin-key-of-this-test"


class Own(dict[str, Any]):
    """An object of the client's own."""


SCHEMA = Own(type="object", properties={"city": {"enum": [None, "Rome"], "default": None}})
FUNCTION = {"name": "weather", "description": "d", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": Own(city=None)}}
ASK = {"role": "user", "content": [{"type": "text", "text": "stone"}]}
TURNS = [ASK, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "x"}, ASK]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "stone"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": Own(city=None)},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]
BLOCKS = [
    ASK,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": Own(city=None)}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]}],
    },
]
CLIENT_TOOL = {"name": "weather", "input_schema": SCHEMA}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "stone", **STREAM, "structured_outputs": {"json": SCHEMA}},
    "/v1/chat/completions": {
        "messages": TURNS,
        "chat_template_kwargs": Own(enable_thinking=False),
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    "/v1/completions/render": {"prompt": "stone"},
    "/v1/chat/completions/render": {"messages": TURNS, "chat_template_kwargs": Own(enable_thinking=False)},
    "/v1/responses": {
        "input": ITEMS,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "reasoning": {"effort": "none"},
        "metadata": Own(a="b"),
        "client_metadata": Own(a="b"),
    },
    "/v1/responses/input_tokens": {"input": ITEMS},
    "/v1/messages": {
        "messages": BLOCKS,
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "metadata": Own(user_id="u"),
    },
    "/v1/messages/count_tokens": {"messages": BLOCKS},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"n": 2, "logit_bias": Own({"5": 1})}, **STREAM},
    "/tokenize": {"messages": TURNS},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/update_weights": {"path": "b"},
}
NOT_SERVED = ("lora", "update_weights")
"""Words by which the engine of these tests refuses what it cannot do."""


def names() -> list[str]:
    """Every field of every object of a request, and one of a later release."""
    kinds = [*RequestFields.__subclasses__()]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return sorted({"later", *(name for kind in kinds for name in kind.__struct_encode_fields__)})


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths to the API's own objects in a body."""
    if isinstance(value, Own):
        return
    if isinstance(value, dict):
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, field in inside:
        yield from places(field, (*path, name))


def with_nulls(value: Any, nulls: Mapping[tuple[str | int, ...], list[str]], path: tuple[str | int, ...] = ()) -> Any:
    """A copy of a body with nulls in objects, for names that these do not have."""
    if isinstance(value, list):
        return [with_nulls(element, nulls, (*path, index)) for index, element in enumerate(value)]
    if not isinstance(value, dict) or isinstance(value, Own):
        return value
    fields = {name: with_nulls(field, nulls, (*path, name)) for name, field in value.items()}
    return {**dict.fromkeys(nulls.get(path, ())), **fields}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir, info: EngineInfo) -> Iterator[ThreadedServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'[[keys]]\ntenant = "operators"\nkey = "{KEY}"\nlevel = "admin"\n')
    keys.chmod(0o600)
    with ThreadedServer(ParrotLoop(info), model_dir, ServerOptions(port=0, api_keys_file=str(keys))) as server:
        yield server


def told(server: ThreadedServer, path: str, body: Any) -> tuple[int, list[str], list[Any]]:
    """What comes of a body: status, answer without ids, and what the engine is asked.

    Which of two choices has its event first is the engine's thread's matter: lines are compared in one order.
    """
    before = len(server.engine.submitted)
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=20)) as connection:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection.request("POST", path, body=json.dumps(body).encode(), headers=headers)
        response = connection.getresponse()
        answer = re.sub(r'"(?:\w*id|created\w*|completed_at)":(?:"[^"]*"|\d+)', "", response.read().decode())
    asked = [msgspec.structs.replace(each, request_id=0) for each in server.engine.submitted[before:]]
    return response.status, sorted(answer.splitlines()), asked


@pytest.mark.parametrize("path", BODIES)
def test_nulls_in_the_apis_own_objects_change_nothing(server, path):
    body = BODIES[path]
    plain = told(server, path, body)
    assert plain[0] == 200 or any(word in plain[1][0] for word in NOT_SERVED), plain
    fields = st.lists(st.sampled_from(names()), max_size=4, unique=True)

    @settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(nulls=st.dictionaries(st.sampled_from([*places(body)]), fields))
    def check(nulls: dict[tuple[str | int, ...], list[str]]) -> None:
        assert told(server, path, with_nulls(body, nulls)) == plain

    check()
    everywhere = {place: [name for name in names() if name != "type"] for place in places(body)}
    assert told(server, path, with_nulls(body, everywhere)) == plain


def test_every_route_with_a_body_has_one_here(server, call):
    document = json.loads(call(server, "GET", "/openapi.json")[2])
    with_body = {path for path, methods in document["paths"].items() if "requestBody" in methods.get("post", {})}
    assert with_body == set(BODIES)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_nulls_in_schemas_reach_the_compiler(server, path):
    body = BODIES[path]
    for nulls in ({}, {(): ["later"]}):
        _, _, asked = told(server, path, with_nulls(body, nulls))
        assert json.loads(asked[0].sampling.grammar.text) == SCHEMA


@pytest.mark.parametrize("name", ["metadata", "client_metadata"])
def test_nulls_in_labels_are_values_and_refused(server, name):
    for path in ("/v1/chat/completions", "/v1/responses"):
        status, answer, _ = told(server, path, {**BODIES[path], name: {"a": None}, "later": None})
        assert (status, json.loads(answer[0])["error"]["param"]) == (400, f"{name}[...]"), answer


def test_what_is_the_clients_own_is_copied_as_it_is():
    body = {
        "a": None,
        "tools": [{"b": None, "input_schema": SCHEMA}],
        "messages": BLOCKS,
        "client_metadata": {"x": None},
    }
    assert without_nulls(body) == {
        "tools": [{"input_schema": SCHEMA}],
        "messages": BLOCKS,
        "client_metadata": {"x": None},
    }
