"""What vLLM's clients ask about tokens and stops: over both routes, whole and streamed, with several choices."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openinfer_core.simulated import SimulatedLoop, SimulatedOptions
from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop, ThreadedServer

PROMPT = "The capital of France is Paris."

Ask = Callable[..., Any]


@pytest.fixture
def ask(every_way, call) -> Ask:
    """Posts to a route; returns the whole answer, or all events of a stream."""
    return asking(every_way[0], call)


def asking(server: ThreadedServer, call) -> Ask:
    def post(route: str, status: int = 200, **body: Any) -> Any:
        answered, _, answer = call(server, "POST", f"/v1/{route}", body)
        assert answered == status, answer
        if status != 200 or not body.get("stream"):
            return json.loads(answer)
        frames = answer.decode().split("\n\n")
        return [json.loads(frame.removeprefix("data: ")) for frame in frames if frame and "[DONE]" not in frame]

    return post


def said(prompt: str | list[int], route: str) -> dict[str, Any]:
    if route == "completions":
        return {"prompt": prompt}
    return {"messages": [{"role": "user", "content": prompt}]}


def choices_of(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = choices_of(chunks, index)
    return "".join(each["text"] if "text" in each else each["delta"].get("content", "") for each in choices)


BOTH = pytest.mark.parametrize("route", ["completions", "chat/completions"])


# --- what ended it --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("fields", "stop_reason"),
    [
        ({"stop": ["Rome", "France"]}, "France"),
        ({"max_tokens": 3}, None),
        ({"max_tokens": 3, "stop": "nowhere"}, None),
    ],
)
def test_stop_reason_is_the_stop_string(ask: Ask, route: str, fields: dict[str, Any], stop_reason: str | None) -> None:
    body = {**said(PROMPT, route), "max_tokens": 90, "n": 2, **fields}
    assert [choice["stop_reason"] for choice in ask(route, **body)["choices"]] == [stop_reason] * 2
    chunks = ask(route, **body, stream=True)
    for index in range(2):
        *before, last = choices_of(chunks, index)
        assert not any("stop_reason" in choice for choice in before)
        assert last["stop_reason"] == stop_reason


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reason_is_the_stop_token_that_the_request_names(ask: Ask, tokenizer, *, stream: bool) -> None:
    ids, end = tokenizer.encode(PROMPT).ids, tokenizer.token_to_id("<|im_end|>")

    def reason(prompt: list[int], **fields: Any) -> Any:
        answer = ask("completions", prompt=prompt, max_tokens=90, stream=stream, **fields)
        choice = answer[-1]["choices"][0] if stream else answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        return choice["stop_reason"]

    assert reason(ids, stop_token_ids=[ids[2], 1]) == ids[2]
    assert reason(ids, stop_token_ids=[ids[2]], stop="nowhere") == ids[2]
    assert reason([*ids, end]) is None
    assert reason([*ids, end], stop_token_ids=[end]) is None
    assert reason([*ids, end], stop_token_ids=[end], ignore_eos=True) == end


@BOTH
@pytest.mark.parametrize("stop", ["France", "e capital of F", ["Rome", "Paris", " is P"]])
def test_the_stop_string_is_shown_if_asked(ask: Ask, route: str, stop: Any) -> None:
    body = {**said(PROMPT, route), "max_tokens": 90, "n": 2, "stop": stop}
    without = [text_of(choice) for choice in ask(route, **body)["choices"]]
    whole = ask(route, **body, include_stop_str_in_output=True)["choices"]
    assert [text_of(choice) for choice in whole] == [
        text + choice["stop_reason"] for text, choice in zip(without, whole, strict=True)
    ]
    chunks = ask(route, **body, include_stop_str_in_output=True, stream=True)
    assert [streamed_text(chunks, index) for index in range(2)] == [text_of(choice) for choice in whole]


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_a_stop_token_is_shown_if_asked_and_that_of_a_special_one_is_not(
    ask: Ask, tokenizer, *, stream: bool
) -> None:
    ids, end = tokenizer.encode(PROMPT).ids, tokenizer.token_to_id("<|im_end|>")

    def text(prompt: list[int], **fields: Any) -> str:
        answer = ask(
            "completions", prompt=prompt, max_tokens=90, stream=stream, include_stop_str_in_output=True, **fields
        )
        return streamed_text(answer) if stream else answer["choices"][0]["text"]

    assert text(ids, stop_token_ids=[ids[2]]) == tokenizer.decode(ids[:3])
    assert text([*ids, end]) == PROMPT


# --- token ids ------------------------------------------------------------------------------------------


@BOTH
def test_token_ids_are_those_that_usage_counts(ask: Ask, every_way, tokenizer, route: str) -> None:
    body = {**said(PROMPT, route), "max_tokens": 9, "n": 2, "return_token_ids": True}
    whole = ask(route, **body)
    prompt = list(every_way[0].engine.submitted[-1].prompt_token_ids)
    said_ids = [prompt[place % len(prompt)] for place in range(9)]
    assert [choice["token_ids"] for choice in whole["choices"]] == [said_ids] * 2
    holders = whole["choices"] if route == "completions" else [whole]
    assert [holder["prompt_token_ids"] for holder in holders] == [prompt] * len(holders)

    chunks = ask(route, **body, stream=True)
    for index in range(2):
        mine = choices_of(chunks, index)
        assert [token_id for choice in mine for token_id in choice.get("token_ids", [])] == said_ids
        holders = mine if route == "completions" else [c for c in chunks if c["choices"][0]["index"] == index]
        assert holders[0]["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in holder for holder in holders[1:])
        assert streamed_text(chunks, index) == text_of(whole["choices"][index])


@pytest.mark.parametrize("fields", [{"stop": "France"}, {"stop_token_ids": [5]}, {"stop": "France", "logprobs": 1}, {}])
def test_token_ids_end_with_what_ended_the_text(start, info, call, tokenizer, fields: dict[str, Any]) -> None:
    ask = asking(start(ParrotLoop(info, tokens_per_event=3)), call)
    ids = [*tokenizer.encode(PROMPT).ids, 5, tokenizer.token_to_id("<|im_end|>")]
    body = {"prompt": ids, "max_tokens": 90, "return_token_ids": True, **fields}
    answer = ask("completions", **body)
    told = answer["choices"][0]["token_ids"]
    assert len(told) == answer["usage"]["completion_tokens"]
    assert told == ids[: len(told)]
    if "stop" in fields:
        assert tokenizer.decode(told).endswith("France")
    else:
        assert told[-1] == (5 if fields else ids[-1])
    choices = choices_of(ask("completions", **body, stream=True), 0)
    assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == told


@BOTH
def test_token_ids_are_absent_unless_asked(ask: Ask, route: str) -> None:
    for fields in ({}, {"return_token_ids": False}):
        whole = ask(route, **said(PROMPT, route), max_tokens=2, **fields)
        chunks = ask(route, **said(PROMPT, route), max_tokens=2, stream=True, **fields)
        assert "token_ids" not in json.dumps([whole, chunks])


# --- the prompt -----------------------------------------------------------------------------------------


@BOTH
def test_prompt_logprobs_have_vllms_shape(ask: Ask, every_way, tokenizer, route: str) -> None:
    whole = ask(route, **said(PROMPT, route), max_tokens=2, n=2, prompt_logprobs=2)
    prompt = every_way[0].engine.submitted[-1].prompt_token_ids
    holders = whole["choices"] if route == "completions" else [whole]
    for holder in holders:
        first, *others = holder["prompt_logprobs"]
        assert first is None
        assert len(others) == len(prompt) - 1
        for token_id, entry in zip(prompt[1:], others, strict=True):
            likeliest = (token_id + 1) % tokenizer.get_vocab_size()  # as the parrot has it
            assert {name: (each["logprob"], each["rank"]) for name, each in entry.items()} == {
                str(token_id): (-1.5, 2),
                str(likeliest): (-0.5, 1),
            }
    letter = tokenizer.token_to_id("P")
    (_, entry) = ask("completions", prompt=[letter, letter], max_tokens=1, prompt_logprobs=0)["choices"][0][
        "prompt_logprobs"
    ]
    assert entry == {str(letter): {"logprob": -1.5, "rank": 2, "decoded_token": "P"}}


def test_echo_and_prompt_logprobs_have_their_own_alternatives(ask: Ask) -> None:
    def shown(**fields: Any) -> tuple[list[int], list[int]]:
        body = {"prompt": [5, 6, 7], "max_tokens": 1, "echo": True, **fields}
        (choice,) = ask("completions", **body)["choices"]
        return (
            [len(each) for each in choice["logprobs"]["top_logprobs"][1:3]],
            [len(each) for each in choice.get("prompt_logprobs", [])[1:]],
        )

    assert shown(logprobs=4) == ([4, 4], [])
    assert shown(logprobs=4, prompt_logprobs=0) == ([4, 4], [1, 1])
    assert shown(logprobs=2, prompt_logprobs=5) == ([2, 2], [5, 5])


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2049}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 65_537}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 60_000, "n": 5}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": ["\x00" * 256] * 256, "n": 9}, "bad_words"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(ask: Ask, route: str, fields: dict[str, Any], param: str) -> None:
    assert refusal(ask, route, {**said(PROMPT, route), "max_tokens": 2, **fields})["param"] == param


def refusal(ask: Ask, route: str, body: dict[str, Any]) -> dict[str, Any]:
    return ask(route, 400, **body)["error"]


def test_prompt_logprobs_draw_on_the_budget_of_log_probabilities(start, info, call) -> None:
    server = start(ParrotLoop(info), ServerOptions(port=0, max_logprob_entries=30))
    body = {"prompt": [5] * 10, "max_tokens": 1}
    assert asking(server, call)("completions", **body, prompt_logprobs=2)["choices"][0]["prompt_logprobs"][0] is None
    error = refusal(asking(server, call), "completions", {**body, "prompt_logprobs": 3})
    assert error["param"] == "prompt_logprobs"


@pytest.mark.parametrize("kept", [1, 4, 2000])
@pytest.mark.parametrize("as_ids", [False, True])
def test_the_end_of_a_prompt_is_kept(ask: Ask, every_way, tokenizer, kept: int, *, as_ids: bool) -> None:
    ids = tokenizer.encode(PROMPT).ids
    prompt = ids if as_ids else PROMPT
    answer = ask("completions", prompt=prompt, max_tokens=2, truncate_prompt_tokens=kept, echo=True)
    assert list(every_way[0].engine.submitted[-1].prompt_token_ids) == ids[-kept:]
    assert answer["usage"]["prompt_tokens"] == len(ids[-kept:])
    assert answer["choices"][0]["text"].startswith(tokenizer.decode(ids[-kept:], skip_special_tokens=False))


def test_minus_one_keeps_what_fits_beside_the_answer(ask: Ask, every_way, info) -> None:
    long = "stone " * 5000
    asked = every_way[0].engine.submitted
    ask("completions", prompt=long, max_tokens=7, truncate_prompt_tokens=-1)
    assert len(asked[-1].prompt_token_ids) == info.max_model_tokens - 7
    ask("completions", prompt=long, truncate_prompt_tokens=-1)
    assert len(asked[-1].prompt_token_ids) == info.max_model_tokens - 16
    ask("chat/completions", **said(long, "chat/completions"), truncate_prompt_tokens=-1)
    assert len(asked[-1].prompt_token_ids) == info.max_model_tokens - 1
    assert refusal(ask, "completions", {"prompt": long, "max_tokens": 7})["code"] == "context_length_exceeded"


def test_the_end_of_a_chat_is_kept(ask: Ask, every_way) -> None:
    body = said(PROMPT, "chat/completions")
    asked = every_way[0].engine.submitted
    ask("chat/completions", **body, max_tokens=1)
    whole = asked[-1].prompt_token_ids
    ask("chat/completions", **body, max_tokens=1, truncate_prompt_tokens=5)
    assert asked[-1].prompt_token_ids == whole[-5:]


# --- restrictions ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated(model_dir, tokenizer) -> Iterator[ThreadedServer]:
    options = SimulatedOptions(num_token_ids=tokenizer.get_vocab_size(), max_model_tokens=2048)
    with ThreadedServer(SimulatedLoop(options), model_dir, ServerOptions(port=0)) as server:
        yield server


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_only_allowed_tokens_are_said(simulated: ThreadedServer, call, route: str, *, stream: bool) -> None:
    ask, allowed = asking(simulated, call), {40, 41, 300}
    body = {**said(PROMPT, route), "max_tokens": 60, "n": 3, "return_token_ids": True, "stream": stream}
    answer = ask(route, **body, allowed_token_ids=sorted(allowed))
    for index in range(3):
        choices = choices_of(answer, index) if stream else [answer["choices"][index]]
        assert {token_id for choice in choices for token_id in choice.get("token_ids", [])} == allowed


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_bad_words_are_not_said(simulated: ThreadedServer, call, tokenizer, route: str, *, stream: bool) -> None:
    ask = asking(simulated, call)
    letters = [tokenizer.token_to_id(letter) for letter in "abĠ"]  # few enough that each word would come
    body = {**said(PROMPT, route), "max_tokens": 200, "n": 2, "stream": stream, "allowed_token_ids": letters}

    def texts(**fields: Any) -> list[str]:
        answer = ask(route, **body, **fields)
        return [streamed_text(answer, index) if stream else text_of(answer["choices"][index]) for index in range(2)]

    for text in texts():
        assert "aab" in text
        assert " a" in text
    for text in texts(bad_words=["aab"]):
        assert "aab" not in text
        assert "ab" in text
    for text in texts(bad_words=["bad", "a"]):
        assert "a" not in text


def test_words_become_tokens_at_a_beginning_and_after_a_space(ask: Ask, every_way, tokenizer) -> None:
    ask("completions", prompt="a", max_tokens=1, bad_words=["stone", "  stone", "東"])
    words = every_way[0].engine.submitted[-1].sampling.bad_words
    texts = ("stone", " stone", "東", " 東")
    assert words == tuple(tuple(tokenizer.encode(text).ids) for text in texts)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "bad_words": ["stone"], "allowed_token_ids": [7]}),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 2,
                "bad_words": ["stone"],
                "allowed_token_ids": [7],
            },
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"max_tokens": 2, "allowed_token_ids": [7]}},
        ),
    ],
)
def test_restrictions_reach_the_engine_on_every_route(every_way, call, path: str, body: dict[str, Any]) -> None:
    server = every_way[0]
    assert call(server, "POST", path, body)[0] == 200
    sampling = server.engine.submitted[-1].sampling
    assert sampling.allowed_token_ids == (7,)
    assert bool(sampling.bad_words) is ("bad_words" in body)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_the_stop_string_is_shown_on_the_other_routes_that_make_text(every_way, call, path: str) -> None:
    body = {"max_tokens": 50, "messages": [{"role": "user", "content": PROMPT}], "stop_sequences": ["France"]}
    if path == "/v1/responses":
        body = {"max_output_tokens": 50, "input": PROMPT, "stop": "France"}
    for shown in (False, True):
        status, _, answer = call(every_way[0], "POST", path, {**body, "include_stop_str_in_output": shown})
        assert status == 200
        assert (b"France" in json.dumps(_output(json.loads(answer))).encode()) is shown


def _output(answer: dict[str, Any]) -> Any:
    return answer["output"] if "output" in answer else answer["content"]
