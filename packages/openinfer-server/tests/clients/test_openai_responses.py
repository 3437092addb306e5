"""`client.responses` of the official SDK, every call of it that makes sense for text."""

import asyncio

import openai
import pytest

from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop, wait_until

LONG = {"extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(every_way, connect) -> openai.OpenAI:
    return connect(every_way[0])


@pytest.fixture
def prompt_text(every_way, tokenizer):
    def text() -> str:
        ids = every_way[0].engine.submitted[-1].prompt_token_ids
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return text


def test_text_is_answered_with_a_message(client, prompt_text):
    response = client.responses.create(
        model="parrot", input="naïve 🙂?", instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=300
    )
    assert prompt_text() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nnaïve 🙂?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    assert response.output_text == "system\nBe brief."  # the parrot meets <|im_end|>, which ends a text
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.content[0].annotations == []
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be brief.", {"a": "b"}, 300)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens == response.usage.input_tokens // 2
    assert response.completed_at >= response.created_at


def test_length_makes_a_response_incomplete(client):
    response = client.responses.create(model="parrot", input="stone", max_output_tokens=3, **LONG)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 3


def test_stream_tells_what_the_whole_response_is(client):
    ask = {"model": "parrot", "input": "naïve 🙂🙃 東京", "max_output_tokens": 60, "store": False, **LONG}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if not event.type.endswith(".delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert (last.status, last.usage) == (whole.status, whole.usage)
    assert events[0].response.status == "in_progress"
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}


def test_sdks_stream_helper_puts_the_response_together(client):
    with client.responses.stream(model="parrot", input="stone", max_output_tokens=300) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "user\nstone"
    assert final.status == "completed"


def test_items_become_turns(client, prompt_text):
    client.responses.create(
        model="parrot",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": "Let me see."},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":  "Paris"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"role": "user", "content": "And now?"},
        ],
        max_output_tokens=1,
    )
    assert prompt_text() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        '<|im_start|>assistant\nLet me see.<call>{"city": "Paris"}</call><|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_conversation_is_continued(client, prompt_text):
    first = client.responses.create(model="parrot", input="stone", instructions="Once.", max_output_tokens=300)
    second = client.responses.create(
        model="parrot", input="mountain", previous_response_id=first.id, max_output_tokens=300
    )
    assert second.previous_response_id == first.id
    assert prompt_text() == (  # instructions are not carried over
        "<|im_start|>user\nstone<|im_end|>\n<|im_start|>assistant\nsystem\nOnce.<|im_end|>\n"
        "<|im_start|>user\nmountain<|im_end|>\n<|im_start|>assistant\n"
    )
    client.responses.delete(first.id)
    client.responses.create(model="parrot", input="?", previous_response_id=second.id, max_output_tokens=1)
    assert prompt_text().count("<|im_start|>user") == 3  # what was said is part of the second response


def test_retrieve_delete_and_input_items(client):
    made = client.responses.create(model="parrot", input="stone", max_output_tokens=300)
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    (item,) = client.responses.input_items.list(made.id).data
    assert (item.role, item.content[0].text) == ("user", "stone")
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)


def test_input_items_are_paged(client):
    turns = [{"role": "user", "content": str(number)} for number in range(5)]
    made = client.responses.create(model="parrot", input=turns, max_output_tokens=1)
    newest_first = [item.content[0].text for item in client.responses.input_items.list(made.id, limit=2)]
    assert newest_first == ["4", "3", "2", "1", "0"]
    page = client.responses.input_items.list(made.id, limit=2, order="asc")
    assert ([item.content[0].text for item in page.data], page.has_more) == (["0", "1"], True)


def test_response_that_is_not_stored_is_not_found(client):
    made = client.responses.create(model="parrot", input="stone", store=False, max_output_tokens=1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(model="parrot", input="stone", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"


def test_log_probabilities_come_with_the_text(client):
    ask = {
        "model": "parrot",
        "input": "stone",
        "max_output_tokens": 8,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        **LONG,
    }
    logprobs = client.responses.create(**ask).output[0].content[0].logprobs
    assert len(logprobs) == 7 or len(logprobs) == 8  # the first token, <|im_start|>, shows no text of its own
    assert all(entry.logprob == -1.5 and len(entry.top_logprobs) == 2 for entry in logprobs)
    events = list(client.responses.create(**ask, stream=True))
    streamed = [entry.to_dict() for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert streamed == [entry.to_dict() for entry in logprobs]


def test_input_tokens_are_counted(client):
    made = client.responses.create(model="parrot", input="stone", instructions="Be brief.", max_output_tokens=1)
    counted = client.responses.input_tokens.count(model="parrot", input="stone", instructions="Be brief.")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)


def test_background_response_is_polled(client):
    made = client.responses.create(model="parrot", input="stone", background=True, max_output_tokens=300)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed", "the response")
    assert client.responses.retrieve(made.id).output_text == "user\nstone"


def test_background_response_is_cancelled(client, every_way):
    server, parrot = every_way
    parrot.hold()
    try:
        made = client.responses.create(model="parrot", input="stone", background=True, **LONG)
        request_id = server.engine.submitted[-1].request_id
        assert client.responses.cancel(made.id).status == "cancelled"
        wait_until(lambda: request_id in server.engine.aborted, "the abort")
    finally:
        parrot.go()
    assert client.responses.retrieve(made.id).status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.responses.create(model="parrot", input="?", previous_response_id=made.id)


def test_background_stream_is_taken_up_again(client, every_way):
    _, parrot = every_way
    parrot.hold()
    ask = {"model": "parrot", "input": "stone", "background": True, "max_output_tokens": 20, **LONG}
    try:
        stream = client.responses.create(**ask, stream=True)
        first = next(iter(stream))
        assert first.type == "response.created"
        stream.close()
    finally:
        parrot.go()
    response_id = first.response.id
    wait_until(lambda: client.responses.retrieve(response_id).status == "incomplete", "the response")
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=first.sequence_number))
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    assert [rest[0].type, rest[1].type, rest[-1].type] == [
        "response.queued",
        "response.in_progress",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in rest if event.type == "response.output_text.delta")
    assert text == client.responses.retrieve(response_id).output_text
    again = client.responses.retrieve(response_id, stream=True)
    assert [event.sequence_number for event in again] == list(range(len(rest) + 1))


def test_only_background_responses_are_cancelled_or_streamed_again(client):
    made = client.responses.create(model="parrot", input="stone", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background=true can be cancelled"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="background=true and stream=true"):
        client.responses.retrieve(made.id, stream=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "include": ["web_search_call.results"]}, "include"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "a", "background": True, "store": False}, "background"),
        ({"input": "a", "metadata": {"k" * 65: "v"}}, "metadata"),
        ({"input": "a", "max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "a", "tools": [{"type": "file_search"}]}, "tools[0].type"),
        (
            {"input": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": [{"id": "msg_1", "type": "item_reference"}]}, "input[0]"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c1", "output": "sunny"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "a", "colour": 1}]}, "input[0].colour"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/responses", body={"model": "parrot", **fields}, cast_to=object)
    assert error.value.param == param, error.value
    assert error.value.body["message"]


def test_compaction_is_refused_with_what_to_do(client):
    with pytest.raises(openai.BadRequestError, match="send what is to be kept"):
        client.responses.compact(model="parrot", input="stone")


def test_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(model="eagle", input="a")
    assert error.value.code == "model_not_found"


def test_asynchronous_client_streams_many(every_way):
    async def ask(client: openai.AsyncOpenAI, word: str) -> str:
        stream = await client.responses.create(model="parrot", input=word, stream=True, max_output_tokens=300)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def ask_all() -> list[str]:
        url = f"{every_way[0].url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            return await asyncio.gather(*[ask(client, f"stone {number}") for number in range(8)])

    assert asyncio.run(ask_all()) == [f"user\nstone {number}" for number in range(8)]


def test_background_response_ends_before_the_server_does(start, info, connect):
    server = start(ParrotLoop(info, step_s=0.005))
    connect(server).responses.create(model="parrot", input="stone", background=True, max_output_tokens=40, **LONG)
    server.stop()
    assert server.join() == 0
    assert server.engine.aborted == []


def test_background_response_is_given_up_at_the_drains_deadline(start, info, connect):
    parrot = ParrotLoop(info)
    server = start(parrot, ServerOptions(port=0, drain_deadline_s=0.1))
    parrot.hold()
    connect(server).responses.create(model="parrot", input="stone", background=True)
    server.stop()
    assert server.join() == 0
    assert len(server.engine.aborted) == 1
