"""The OpenAPI document: valid, complete, and no promise that is not kept."""

import json

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from openinfer_server.openai.types import ChatRequest, CompletionRequest
from openinfer_server.request.rules import Label, Neutral, Refused
from openinfer_server.responses.types import ResponseRequest


@pytest.fixture(scope="module")
def document(shared):
    import urllib.request

    with urllib.request.urlopen(f"{shared.url}/openapi.json") as response:
        assert response.headers["content-type"] == "application/json"
        return json.load(response)


def test_document_is_valid(document):
    OpenAPIV31SpecValidator(document).validate()


def test_document_has_every_route_with_its_level(document):
    operations = {
        f"{method.upper()} {path}": operation["x-openinfer-level"]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert operations == LEVELS


LEVELS = {
    "POST /v1/completions": "user",
    "POST /v1/chat/completions": "user",
    "POST /v1/responses": "user",
    "POST /v1/responses/input_tokens": "user",
    "POST /v1/responses/compact": "user",
    "GET /v1/responses/{response_id}": "user",
    "DELETE /v1/responses/{response_id}": "user",
    "POST /v1/responses/{response_id}/cancel": "user",
    "GET /v1/responses/{response_id}/input_items": "user",
    "POST /v1/messages": "user",
    "POST /v1/messages/count_tokens": "user",
    "POST /inference/v1/generate": "user",
    "POST /tokenize": "user",
    "POST /detokenize": "user",
    "POST /v1/chat/completions/render": "user",
    "POST /v1/completions/render": "user",
    "POST /v1/load_lora_adapter": "admin",
    "POST /v1/unload_lora_adapter": "admin",
    "GET /v1/models": "user",
    "GET /v1/models/{model}": "user",
    "GET /health": "public",
    "GET /ping": "public",
    "POST /ping": "public",
    "GET /ready": "public",
    "GET /load": "user",
    "POST /reset_prefix_cache": "admin",
    "POST /pause": "admin",
    "POST /resume": "admin",
    "POST /sleep": "admin",
    "POST /wake_up": "admin",
    "POST /update_weights": "admin",
    "GET /is_sleeping": "user",
    "GET /is_paused": "user",
    "GET /metrics": "public",
    "GET /version": "public",
    "GET /openapi.json": "public",
    "GET /": "public",
    "GET /page/api.js": "public",
    "GET /page/chat.js": "public",
    "GET /page/chats.js": "public",
    "GET /page/dom.js": "public",
    "GET /page/icon.svg": "public",
    "GET /page/inline.js": "public",
    "GET /page/main.js": "public",
    "GET /page/markdown.js": "public",
    "GET /page/render.js": "public",
    "GET /page/status.js": "public",
    "GET /page/store.js": "public",
    "GET /page/style.css": "public",
    "GET /page/text.css": "public",
    "GET /page/turns.js": "public",
}


def test_operations_have_names_of_their_own(document):
    names = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert len(names) == len(set(names))


def test_every_error_has_a_schema(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert {"400", "500"} <= set(operation["responses"]), (method, path)
            for status, response in operation["responses"].items():
                assert all("schema" in content for content in response["content"].values()), (method, path, status)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, ResponseRequest], ids=lambda kind: kind.__name__)
def test_fields_that_are_not_honoured_say_why_and_what_they_take(document, kind):
    properties = document["components"]["schemas"][kind.__name__]["properties"]
    assert set(properties) == set(kind.__struct_fields__)
    words = {Refused: "Refused", Neutral: "Changes nothing", Label: "Label"}
    for name, rule in kind.RULES.items():
        assert properties[name]["description"] == f"{words[type(rule)]}: {rule.why}."
        if isinstance(rule, Refused):
            assert properties[name]["type"] == "null"
        if isinstance(rule, Neutral) and rule.values:
            assert properties[name]["enum"] == [*rule.values, None]


BASE = {
    "CompletionRequest": ("/v1/completions", {"prompt": "a"}),
    "ChatRequest": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}),
    "ResponseRequest": ("/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"]}),
    "MessagesRequest": ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
}


def beyond(schema):
    """Values just beyond the bounds of a schema."""
    if schema.get("type") == "array":
        items = schema["items"]
        if "maxItems" in schema:
            yield [{"string": "a", "integer": 1}[items["type"]]] * (schema["maxItems"] + 1)
        yield from ([value] for value in beyond(items))
    if schema.get("type") == "string":
        if "minLength" in schema:
            yield ""
        if "maxLength" in schema:
            yield "x" * (schema["maxLength"] + 1)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from ({"1": value} for value in beyond(schema["additionalProperties"]))
    step = 1 if schema.get("type") == "integer" else 0.001
    if "minimum" in schema:
        yield schema["minimum"] - step
    if "maximum" in schema:
        yield schema["maximum"] + step
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"]


@pytest.mark.parametrize("name", BASE)
def test_every_bound_is_kept(document, shared, call, name):
    path, needed = BASE[name]
    num_bounds = 0
    for field, schema in document["components"]["schemas"][name]["properties"].items():
        for kind in schema.get("anyOf", [schema]):
            for value in beyond(kind):
                status, _, answer = call(shared, "POST", path, {**needed, field: value})
                assert status == 400, (field, value, answer)
                num_bounds += 1
    assert num_bounds > 25


def integers(document, schema, path=(), seen=()):
    """The integers of a schema: where each is, names with `[]` for an element and `{}` for a value, and its schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in seen:
            return
        seen, schema = (*seen, name), document["components"]["schemas"][name]
    if schema.get("type") == "integer" and "enum" not in schema:
        yield path, schema
    for kind in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from integers(document, kind, path, seen)
    for name, field in schema.get("properties", {}).items():
        yield from integers(document, field, (*path, name), seen)
    for mark, key in (("[]", "items"), ("{}", "additionalProperties")):
        if isinstance(schema.get(key), dict):
            yield from integers(document, schema[key], (*path, mark), seen)


def requested_integers(document):
    """Every integer that a client can send: method, path, where it is, its schema."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for parameter in operation["parameters"]:
                for where, schema in integers(document, parameter["schema"]):
                    yield method.upper(), path, ("?", parameter["name"], *where), schema
            content = operation.get("requestBody", {}).get("content", {"": {"schema": {}}})
            for each in content.values():
                yield from ((method.upper(), path, *found) for found in integers(document, each["schema"]))


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# What stands around an integer that is not a field of the body itself, nor in a list that is one.
AROUND = {
    ("messages", "[]", "tool_calls", "[]", "index"): lambda value: {
        "messages": [{"role": "assistant", "tool_calls": [{**CALL, "index": value}]}, {"role": "user", "content": "a"}]
    },
    ("thinking", "budget_tokens"): lambda value: {"thinking": {"type": "enabled", "budget_tokens": value}},
    ("kv_transfer_params", "openinfer", "tokens"): lambda value: {
        "kv_transfer_params": {"openinfer": {"tokens": value}}
    },
}
BODIES = {
    **dict(BASE.values()),
    "/v1/completions/render": {"prompt": "a"},
    "/v1/chat/completions/render": BASE["ChatRequest"][1],
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
    "/tokenize": {"messages": [{"role": "user", "content": "a"}]},
    "/detokenize": {"tokens": [1]},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}


def with_integer(where, value):
    """Fields of a body with `value` at a place."""
    if where in AROUND:
        return AROUND[where](value)
    for name in reversed(where):
        value = [value] if name == "[]" else {name: value}
    return value


def test_every_integer_of_every_route_has_two_bounds(document):
    unbounded = [
        (method, path, where)
        for method, path, where, schema in requested_integers(document)
        if not {"minimum", "maximum"} <= schema.keys()
    ]
    assert not unbounded


def test_no_integer_beyond_its_bounds_is_taken(document, shared, call):
    _, _, kept = call(shared, "POST", "/v1/responses", {**BODIES["/v1/responses"], "max_output_tokens": 1})
    num_posted = 0
    for method, path, where, schema in requested_integers(document):
        values = [schema["minimum"] - 1, schema["maximum"] + 1, 10**23, -(10**23)]
        if path.endswith("/render"):  # nothing is sampled there: only the decoder looks at how to
            values = [] if where[0] in ("seed", "stop_token_ids", "allowed_token_ids") else values[2:]
        expected = 403 if path == "/v1/unload_lora_adapter" else 400  # before it is read: the server has no keys
        for value in values:
            if where[0] == "?":
                filled = path.replace("{response_id}", json.loads(kept)["id"])
                query = f"{where[1]}={value}" + "&stream=true" * (where[1] == "starting_after")
                status, _, answer = call(shared, method, f"{filled}?{query}")
            else:
                status, _, answer = call(shared, method, path, {**BODIES[path], **with_integer(where, value)})
            assert status == expected, (method, path, where, value, answer)
            num_posted += 1
    assert num_posted > 300
