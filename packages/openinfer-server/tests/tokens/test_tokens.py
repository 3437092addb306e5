"""`/tokenize`, `/detokenize`, and `/inference/v1/generate`: what clients that work with token ids see."""

import contextlib
import http.client
import json

import pytest

from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop

TEXT = "naïve 🙂 stone"
CHAT = [{"role": "user", "content": "stone"}]


@pytest.fixture
def post(shared, call):
    def ask(path: str, body: object) -> tuple[int, dict]:
        status, _, answer = call(shared, "POST", path, body)
        return status, json.loads(answer)

    return ask


def test_tokenize_and_detokenize_are_each_others_inverse(post, tokenizer, info):
    status, answer = post("/tokenize", {"model": "parrot", "prompt": TEXT})
    assert status == 200
    assert answer["tokens"] == tokenizer.encode(TEXT).ids
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), info.max_model_tokens)
    assert answer["token_strs"] is None
    assert post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": TEXT})


def test_tokenize_shows_tokens_by_themselves(post):
    _, answer = post("/tokenize", {"prompt": "The stone<|im_end|>", "return_token_strs": True})
    assert "".join(answer["token_strs"]) == "The stone<|im_end|>"
    assert answer["token_strs"][-1] == "<|im_end|>"


def test_tokenize_renders_a_chat_as_for_its_answer(post, shared, call, tokenizer):
    _, answer = post("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}})
    text = tokenizer.decode(answer["tokens"], skip_special_tokens=False)
    assert text == "<|im_start|>user\nstone<|im_end|>\n<|im_start|>assistant\n<think></think>"
    call(shared, "POST", "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})
    _, plain = post("/tokenize", {"messages": CHAT})
    assert tuple(plain["tokens"]) == shared.engine.submitted[-1].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {}, None),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 2049}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_malformed_bodies_are_refused_by_name(post, path, body, param):
    status, answer = post(path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_unknown_model_is_404(post, path):
    needed = {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}
    assert post(path, {"model": "eagle", **needed})[0] == 404


GENERATE = "/inference/v1/generate"


def test_generate_answers_with_token_ids(post):
    ids = [5, 6, 7]
    sampling = {"max_tokens": 7, "logprobs": 1, "prompt_logprobs": 0, "detokenize": False}
    status, answer = post(GENERATE, {"token_ids": ids, "sampling_params": sampling, "request_id": "mine"})
    assert status == 200, answer
    assert (answer["request_id"], answer["model"]) == ("mine", "parrot")
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [5, 6, 7, 5, 6, 7, 5]
    assert (choice["finish_reason"], choice["stop_token_id"]) == ("length", None)
    assert choice["logprobs"][0] == {
        "token_id": 5,
        "logprob": -1.5,
        "rank": 2,
        "top": [{"token_id": 6, "logprob": -0.5}],
    }
    assert [entry and entry["token_id"] for entry in answer["prompt_logprobs"]] == [None, 6, 7]
    assert answer["usage"]["total_tokens"] == 10


def test_generate_says_which_token_stopped_it(post):
    sampling = {"max_tokens": 9, "stop_token_ids": [7]}
    _, answer = post(GENERATE, {"token_ids": [5, 6, 7], "sampling_params": sampling})
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_token_id"]) == ([5, 6], "stop", 7)


def test_generate_streams_what_it_answers_whole(shared, call, post):
    body = {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 6, "n": 2, "logprobs": 0}}
    _, whole = post(GENERATE, body)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    status, headers, answer = call(shared, "POST", GENERATE, body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *events, done, empty = answer.decode().split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    *events, last = [json.loads(event.removeprefix("data: ")) for event in events]
    for index, expected in enumerate(whole["choices"]):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [i for piece in mine for i in piece["token_ids"]] == expected["token_ids"]
        assert [entry for piece in mine for entry in piece["logprobs"] or []] == expected["logprobs"]
        assert [piece["finish_reason"] for piece in mine][-2:] == [None, "length"]
    assert last["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": [1] * 3000}, "token_ids"),
        ({"token_ids": [1], "features": {}}, "features"),
        ({"token_ids": [1], "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"token_ids": [1], "request_id": ""}, "request_id"),
        ({"token_ids": [1], "sampling_params": {"stop": ["a"]}}, "sampling_params.stop"),
        ({"token_ids": [1], "sampling_params": {"detokenize": True}}, "sampling_params.detokenize"),
        ({"token_ids": [1], "sampling_params": {"beams": 2}}, "sampling_params.beams"),
        ({"token_ids": [1], "sampling_params": {"n": 1000}}, "n"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [1], "stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"token_ids": [1], "stream": True, "sampling_params": {"prompt_logprobs": 1}},
            "sampling_params.prompt_logprobs",
        ),
    ],
)
def test_generate_refuses_by_name(post, body, param):
    status, answer = post(GENERATE, body)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_lora_is_refused_and_the_message_says_what_to_do(start, info, tmp_path):
    key = "operator-0123456789"
    (tmp_path / "keys.toml").write_text(f'[[keys]]\ntenant = "operators"\nlevel = "admin"\nkey = "{key}"')
    server = start(ParrotLoop(info), ServerOptions(port=0, api_keys_file=str(tmp_path / "keys.toml")))

    def post(path: str, body: object) -> tuple[int, dict]:
        headers = {"content-type": "application/json", "x-api-key": key}
        with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=20)) as connection:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    status, answer = post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"})
    assert (status, answer["error"]["code"]) == (400, "lora_not_supported")
    assert "birds" in answer["error"]["message"]
    assert "merge the adapter" in answer["error"]["message"]
    assert post("/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 404
    assert post("/v1/load_lora_adapter", {"lora_name": "a"})[0] == 400
    assert post("/v1/load_lora_adapter", {"lora_name": "", "lora_path": "/a"})[0] == 400


def test_version_is_the_distributions(shared, call):
    from importlib.metadata import version

    assert json.loads(call(shared, "GET", "/version")[2]) == {"version": version("openinfer-server")}


RENDERED = {
    "plain": {"messages": CHAT},
    "with an effort": {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
    "continued": {
        "messages": [*CHAT, {"role": "assistant", "content": "It is"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "cut": {"messages": CHAT, "truncate_prompt_tokens": 5},
}


@pytest.mark.parametrize("body", RENDERED.values(), ids=RENDERED)
def test_rendered_chat_is_the_prompt_that_the_engine_gets(post, shared, call, body):
    before = len(shared.engine.submitted)
    status, rendered = post("/v1/chat/completions/render", {"model": "parrot", **body})
    assert status == 200
    assert len(shared.engine.submitted) == before  # nothing is generated
    assert rendered["model"] == "parrot"
    assert rendered["request_id"].startswith("chatcmpl-")
    call(shared, "POST", "/v1/chat/completions", {"max_tokens": 1, **body})
    assert tuple(rendered["token_ids"]) == shared.engine.submitted[-1].prompt_token_ids


@pytest.mark.parametrize("prompt", [TEXT, [TEXT, "stone"], [5, 6, 7], [[5, 6], [7]]])
def test_rendered_prompts_are_a_list_of_those_that_the_engine_gets(post, shared, call, prompt):
    status, rendered = post("/v1/completions/render", {"prompt": prompt})
    assert status == 200
    call(shared, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    asked = shared.engine.submitted[-len(rendered) :]
    assert [tuple(each["token_ids"]) for each in rendered] == [request.prompt_token_ids for request in asked]
    assert {each["model"] for each in rendered} == {"parrot"}


def test_rendered_prompt_is_taken_by_generate(post):
    rendered = post("/v1/chat/completions/render", {"messages": CHAT})[1]
    status, answer = post("/inference/v1/generate", {**rendered, "sampling_params": {"max_tokens": 1}})
    assert (status, answer["request_id"]) == (200, rendered["request_id"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions/render", {}, "prompt"),
        ("/v1/completions/render", {"prompt": [1] * 2049}, "prompt"),
        ("/v1/completions/render", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    ],
)
def test_prompts_that_cannot_be_rendered_are_refused_as_for_an_answer(post, path, body, param):
    status, answer = post(path, body)
    assert status == 400
    assert (status, answer) == post(path.removesuffix("/render"), body)
    assert param is None or answer["error"]["param"] == param
