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
