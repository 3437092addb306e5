"""The OpenAPI document: valid, complete, and no promise that is not kept."""

import json

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from openinfer_server.api_types import ChatRequest, CompletionRequest
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
    "GET /v1/responses/{response_id}": "user",
    "DELETE /v1/responses/{response_id}": "user",
    "POST /v1/responses/{response_id}/cancel": "user",
    "GET /v1/responses/{response_id}/input_items": "user",
    "POST /v1/messages": "user",
    "POST /v1/messages/count_tokens": "user",
    "POST /inference/v1/generate": "user",
    "POST /tokenize": "user",
    "POST /detokenize": "user",
    "POST /v1/load_lora_adapter": "admin",
    "POST /v1/unload_lora_adapter": "admin",
    "GET /v1/models": "user",
    "GET /v1/models/{model}": "user",
    "GET /health": "public",
    "GET /ready": "public",
    "GET /metrics": "public",
    "GET /version": "public",
    "GET /openapi.json": "public",
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
def test_refused_fields_take_null_alone_and_say_why(document, kind):
    properties = document["components"]["schemas"][kind.__name__]["properties"]
    assert set(properties) == set(kind.__struct_fields__)
    for name, why in kind.REFUSED.items():
        assert properties[name] == {"type": "null", "description": f"Refused: {why}."}
    for name, why in kind.IGNORED.items():
        assert properties[name]["description"] == f"Changes nothing: {why}."
