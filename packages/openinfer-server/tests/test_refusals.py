"""What a client may not ask, and what it is told: status, parameter, code; and that the server goes on."""

import json

import pytest

from openinfer_core import Failed, FailureKind
from openinfer_core.engine import EngineInfo
from openinfer_server import ServerOptions
from openinfer_server.openai.types import ChatRequest, CompletionRequest
from openinfer_server.request.rules import Refused
from openinfer_server.testing import ParrotLoop

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "prompt"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "one of the two"),
        ({"prompt": [[1], "a"]}, "prompt", "one of the two"),
        ({"prompt": [-1]}, "prompt", "outside"),
        ({"prompt": [405]}, "prompt", "outside 0 .. 404"),
        ({"prompt": [10**30]}, "prompt", "outside"),
        ({"prompt": [1] * 2048}, "prompt", "context holds 2048"),
        ({"prompt": [[1]] * 129}, "prompt", "128 choices"),
        ({"prompt": [1] * 2000, "max_tokens": 49}, "max_tokens", "together they exceed"),
        ({"prompt": "a " * 200_000}, "prompt", "at least"),
        ({"prompt": [1.5]}, "prompt[0]", "Expected"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 10**9}, "n", "exceed 128 choices"),
        ({"prompt": ["a"] * 65, "n": 2}, "n", "65 prompts x n=2"),
        ({"n": 2, "best_of": 3}, "best_of", "choose yourself"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"logprobs": -1}, "logprobs", "between 0 and 20"),
        ({"max_tokens": 0}, "max_tokens", "nothing to do"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens", "exceed"),
        ({"min_tokens": 17}, "min_tokens", "between 0 and 16"),
        ({"temperature": -0.1}, "temperature", "between"),
        ({"temperature": "hot"}, "temperature", "Expected `float"),
        ({"top_p": 0}, "top_p", "top_p"),
        ({"top_p": 1.1}, "top_p", "between"),
        ({"top_k": -2}, "top_k", "between"),
        ({"presence_penalty": 3}, "presence_penalty", "between"),
        ({"seed": 2**64}, "seed", "64 bits"),
        ({"seed": True}, "seed", "got `bool`"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "1 to 256"),
        ({"stop": "x" * 257}, "stop", "1 to 256"),
        ({"stop_token_ids": [405]}, "stop_token_ids", "outside"),
        ({"stop_token_ids": list(range(257))}, "stop_token_ids", "at most 256"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"405": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
        ({"cache_salt": "x" * 513}, "cache_salt", "512"),
        ({"priority": 2**40}, "priority", "between"),
        ({"deadline_s": 0}, "deadline_s", "above 0"),
        ({"deadline_s": 1e9}, "deadline_s", "at most 2592000"),
        ({"deadline_s": "1"}, "deadline_s", "Expected"),
        ({"hints": {"a": 1}}, "hints[...]", "Expected"),
        ({"hints": {"a": "x" * 257}}, "hints", "at most 256"),
        ({"hints": {str(index): "" for index in range(17)}}, "hints", "at most 16"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "not",
        ),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "unknown field"),
        ({"stream": "yes"}, "stream", "Expected"),
        ({"foo": 1}, "foo", "unknown field: foo"),
        ({"": 1}, "", "unknown field: ''"),
        ({"a`b": 1}, "a`b", "unknown field: a`b"),
        ({"stream": True, "stream_options": {"": 1}}, "stream_options.", "unknown field"),
        ({"max_completion_tokens": 9999}, "max_completion_tokens", "max_completion_tokens is 9999"),
        (
            {"max_completion_tokens": 9999, "truncate_prompt_tokens": -1},
            "max_completion_tokens",
            "max_completion_tokens is 9999",
        ),
        ({"messages": []}, "messages", "unknown field"),
    ],
)
def test_completion_out_of_bounds_is_refused_by_name(post_error, fields, param, word):
    status, error = post_error(COMPLETIONS, {"model": "parrot", "prompt": "a", **fields})
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert word in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "Invalid value"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "role"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo", "unknown field"),
        ({"messages": [{"role": "user", "content": "x", "": 1}]}, "messages[0].", "unknown field"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {}}]}, "messages[0].audio", "not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio", "text": "x"}]}]},
            "messages[0].content[0].type",
            "audio",
        ),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        ({"messages": HELLO, "logprobs": 5}, "logprobs", "Expected `bool"),
        ({"messages": HELLO, "store": True}, "store", "stores no completions"),
        ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type", "Invalid value 'xml'"),
        (
            {"messages": HELLO, "response_format": {"type": "json_object"}, "guided_regex": "a"},
            "response_format",
            "guided_regex and response_format both say",
        ),
        ({"messages": HELLO, "guided_json": "{"}, "guided_json", "text that is not JSON"),
        ({"messages": HELLO, "guided_json": "[]"}, "guided_json", "one is an object"),
        ({"messages": HELLO, "guided_choice": []}, "guided_choice", "1 to 4096"),
        ({"messages": HELLO, "guided_choice": ["a"] * 4097}, "guided_choice", "1 to 4096"),
        ({"messages": HELLO, "guided_regex": "a" * 2**20 + "a"}, "guided_regex", "at most 1048576"),
        ({"messages": HELLO, "guided_regex": "a" * 2**20, "n": 5}, "n", "each of 5 choices"),
        (
            {"messages": HELLO, "structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "strict",
        ),
        (
            {"messages": HELLO, "structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "give one",
        ),
        ({"messages": HELLO, "guided_json": json.loads('{"items":' * 70 + "{}" + "}" * 70)}, "guided_json", "64 deep"),
        (
            {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs.tokenize",
            "enable_thinking",
        ),
        ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template", "unknown field"),
        (
            {"messages": HELLO, "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
            "contradict",
        ),
        ({"messages": HELLO, "service_tier": "flex"}, "service_tier", "there is one tier"),
        ({"messages": HELLO, "modalities": ["audio"]}, "modalities", "text only"),
        ({"messages": HELLO, "echo": True}, "echo", "an answer has no prompt"),
        ({"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1"),
        ({"messages": HELLO, "max_completion_tokens": 9999}, "max_completion_tokens", "max_completion_tokens is 9999"),
        ({"messages": HELLO, "max_tokens": 9999}, "max_tokens", "max_tokens is 9999"),
        (
            {"messages": HELLO, "max_completion_tokens": 9999, "truncate_prompt_tokens": -1},
            "max_completion_tokens",
            "max_completion_tokens is 9999",
        ),
        ({"messages": [{"role": "user", "content": "x " * 300_000}]}, "messages", "at least"),
    ],
)
def test_chat_out_of_bounds_is_refused_by_name(post_error, fields, param, word):
    status, error = post_error(CHAT, {"model": "parrot", **fields})
    assert (status, error["param"]) == (400, param), error
    assert word in error["message"]


def _refusals():
    for path, kind, needed in (
        (COMPLETIONS, CompletionRequest, {"prompt": "a"}),
        (CHAT, ChatRequest, {"messages": HELLO}),
    ):
        for name in sorted(name for name, rule in kind.RULES.items() if isinstance(rule, Refused)):
            yield pytest.param(path, needed, name, id=f"{path}-{name}")


@pytest.mark.parametrize(("path", "needed", "name"), list(_refusals()))
def test_field_that_cannot_be_honoured_is_refused_by_name(post_error, path, needed, name):
    status, error = post_error(path, {**needed, name: [{"x": 1}]})
    assert (status, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert error["message"].startswith(f"{name} is not supported: ")


def test_every_field_of_the_sdk_is_known():
    """A field the SDK can send is a field of ours: honoured, or refused with a reason, never by accident."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    for theirs, ours in (
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (chat_create_params.CompletionCreateParamsBase, ChatRequest),
    ):
        assert set(theirs.__annotations__) - set(ours.__struct_fields__) == set()


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "Expected `object`"),
        (b'{"prompt": "a"} x', "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\\udc00x"}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
        (b'{"prompt": "a", "suffix": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"prompt": ' + b"[" * 10_000, "Expected"),
        (b'{"foo": ' + b'{"a":' * 5_000, "unknown field"),
        (b'{"prompt": ' + b"[" * 200_000, "nested too deeply"),  # large ones are looked through before they are typed
        (b'{"foo": ' + b'{"a":' * 200_000, "nested too deeply"),
    ],
)
def test_body_that_is_not_json_of_the_route_is_refused(post_error, body, word):
    status, error = post_error(COMPLETIONS, body)
    assert status == 400
    assert word in error["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_other_content_types_are_refused(post_error, content_type):
    status, error = post_error(COMPLETIONS, b'{"prompt": "a"}', content_type=content_type)
    assert (status, error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(("encoding", "expected"), [("gzip", 415), ("identity, br", 415), (" Identity ", 200)])
def test_encoded_bodies_are_refused_by_name(shared, call, encoding, expected):
    body = b'{"prompt": "a"}'
    status, _, answer = call(shared, "POST", COMPLETIONS, body, further_headers={"content-encoding": encoding})
    assert (status, b"without a content-encoding" in answer) == (expected, expected == 415)


def test_content_type_may_have_parameters(shared, call):
    status, _, _ = call(shared, "POST", COMPLETIONS, b'{"prompt": "a"}', "application/json; charset=utf-8")
    assert status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_unknown_model_is_404(post_error, path):
    status, error = post_error(
        path, {"model": "eagle", "prompt": "a"} if path == COMPLETIONS else {"model": "eagle", "messages": HELLO}
    )
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")


def test_unknown_route_is_404(post_error):
    status, error = post_error("/v1/embeddings", {"input": "a"})
    assert (status, error["code"]) == (404, "unknown_url")


def test_wrong_method_is_405_and_names_the_right_ones(shared, call):
    status, headers, _ = call(shared, "GET", COMPLETIONS)
    assert (status, headers["allow"]) == (405, "POST")
    status, headers, _ = call(shared, "POST", "/health", {})
    assert (status, headers["allow"]) == (405, "GET")


def test_body_beyond_the_bound_is_413_declared_or_counted(start, call, info):
    server = start(ParrotLoop(info), ServerOptions(port=0, max_body_bytes=1000))
    status, _, _ = call(server, "POST", COMPLETIONS, b" " * 1001)
    assert status == 413

    def chunks():
        yield from [b" " * 400] * 3

    import http.client

    connection = http.client.HTTPConnection(*server.address, timeout=20)
    connection.request(
        "POST", COMPLETIONS, body=chunks(), headers={"content-type": "application/json"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413
    connection.close()
    status, _, _ = call(server, "POST", COMPLETIONS, {"prompt": "a"})
    assert status == 200


def test_logprobs_beyond_the_budget_are_refused_before_anything_is_asked(start, call, info):
    server = start(ParrotLoop(info), ServerOptions(port=0, max_logprob_entries=1000))
    status, _, body = call(server, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 100, "logprobs": 20, "n": 4})
    assert status == 400
    assert b"8400 log-probabilities" in body
    assert server.engine.submitted == []


def test_prompt_tokens_beyond_the_budget_are_refused(start, call, info):
    server = start(ParrotLoop(info), ServerOptions(port=0, max_request_tokens=1000))
    for body in ({"prompt": [1] * 501, "n": 2}, {"prompt": [[1] * 501, [1] * 500]}):
        status, _, answer = call(server, "POST", COMPLETIONS, body)
        assert status == 400
        assert b"prompt tokens over all choices exceed 1000" in answer
    assert server.engine.submitted == []


def test_full_queue_is_429_with_retry_after(start, call, info: EngineInfo):
    import msgspec

    server = start(ParrotLoop(msgspec.structs.replace(info, max_waiting=2)))
    for stream in (False, True):
        body = {"prompt": "a", "n": 3, "stream": stream}
        status, headers, answer = call(server, "POST", COMPLETIONS, body)
        assert status == 429, answer
        assert int(headers["retry-after"]) >= 1
        assert b"rate_limit_error" in answer
    status, _, _ = call(server, "POST", COMPLETIONS, {"prompt": "a", "n": 2})
    assert status == 200


class Faulty(ParrotLoop):
    """Something that its requests need is not there at the moment."""

    def submit(self, request):
        return [Failed(request.request_id, FailureKind.UNAVAILABLE, "it was not there; try again")]


@pytest.mark.parametrize("stream", [False, True])
def test_fault_that_passes_is_503_with_retry_after(stream, start, call, info):
    status, headers, answer = call(start(Faulty(info)), "POST", COMPLETIONS, {"prompt": "a", "stream": stream})
    assert (status, json.loads(answer)["error"]["type"]) == (503, "server_error")
    assert int(headers["retry-after"]) >= 1


def test_model_without_a_chat_template_refuses_chats(start, call, info, model_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    server = start(ParrotLoop(info), folder=tmp_path)
    status, _, body = call(server, "POST", CHAT, {"messages": HELLO})
    assert status == 400
    assert b"no chat template" in body
