"""`/v1/chat/completions` as the official SDK reads it, over both write paths."""

import asyncio

import openai
import pytest

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 🙂?"}]


@pytest.fixture
def client(every_way, connect) -> openai.OpenAI:
    return connect(every_way[0])


def prompt_text(server, tokenizer) -> str:
    return tokenizer.decode(list(server.engine.submitted[-1].prompt_token_ids), skip_special_tokens=False)


def test_chat_renders_the_template_and_answers(client, every_way, tokenizer):
    answer = client.chat.completions.create(model="parrot", messages=TURNS, max_completion_tokens=300, stop=["?"])
    prompt = prompt_text(every_way[0], tokenizer)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nnaïve 🙂?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "system\nBe brief."  # the parrot meets <|im_end|>, which ends a text
    assert choice.finish_reason == "stop"
    assert choice.message.refusal is None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_begins_with_the_role_and_equals_whole(client):
    ask = {"model": "parrot", "messages": TURNS, "extra_body": {"ignore_eos": True}}
    num_tokens = client.chat.completions.create(**ask, max_tokens=1).usage.prompt_tokens
    ask["max_tokens"] = num_tokens  # the whole prompt: no character is left incomplete
    whole = client.chat.completions.create(**ask)
    first, *chunks = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    *chunks, last, usage = chunks
    assert first.object == "chat.completion.chunk"
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "length")
    assert usage.usage == whole.usage
    assert len(chunks) == num_tokens


def test_chat_n_streams_each_with_its_role(client):
    chunks = list(client.chat.completions.create(model="parrot", messages=TURNS, n=3, max_tokens=4, stream=True))
    assert sorted(c.choices[0].index for c in chunks if c.choices[0].delta.role) == [0, 1, 2]
    assert sorted(c.choices[0].index for c in chunks if c.choices[0].finish_reason) == [0, 1, 2]


def test_chat_without_max_tokens_may_fill_the_context(client, every_way, info):
    client.chat.completions.create(model="parrot", messages=TURNS)
    request = every_way[0].engine.submitted[-1]
    assert request.sampling.max_tokens == info.max_model_tokens - len(request.prompt_token_ids)


def test_max_completion_tokens_wins_over_max_tokens(client, every_way):
    client.chat.completions.create(model="parrot", messages=TURNS, max_tokens=9, max_completion_tokens=2)
    assert every_way[0].engine.submitted[-1].sampling.max_tokens == 2


def test_content_parts_are_one_text(client, every_way, tokenizer):
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "stone"}]
    client.chat.completions.create(model="parrot", messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert "user\nThe stone<|im_end|>" in prompt_text(every_way[0], tokenizer)


def test_developer_is_a_system_turn_for_a_template_that_knows_no_developers(client, every_way, tokenizer):
    turns = [{"role": "developer", "content": "Be brief."}, *TURNS[1:]]
    client.chat.completions.create(model="parrot", messages=turns, max_tokens=1)
    assert prompt_text(every_way[0], tokenizer).startswith("<|im_start|>system\nBe brief.")


def test_tool_calls_of_earlier_turns_are_rendered(client, every_way, tokenizer):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city":  "Paris"}'}}
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    client.chat.completions.create(model="parrot", messages=turns, max_tokens=1)
    prompt = prompt_text(every_way[0], tokenizer)
    assert '<|im_start|>assistant\n<call>{"city": "Paris"}</call><|im_end|>' in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


def test_template_options_are_handed_on(client, every_way, tokenizer):
    for given, expected in ((False, True), (True, False), (None, False)):
        kwargs = {"enable_thinking": given}
        client.chat.completions.create(
            model="parrot", messages=TURNS, max_tokens=1, extra_body={"chat_template_kwargs": kwargs}
        )
        assert prompt_text(every_way[0], tokenizer).endswith("<think></think>") is expected


def test_fields_with_nothing_to_do_are_taken(client):
    answer = client.chat.completions.create(
        model="parrot",
        messages=[{"role": "user", "content": "a", "name": "Ann"}],
        max_tokens=1,
        store=False,
        service_tier="auto",
        response_format={"type": "text"},
        modalities=["text"],
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
    )
    assert answer.choices[0].finish_reason == "length"


def test_chat_logprobs_have_bytes_and_alternatives(client, tokenizer):
    ask = {"model": "parrot", "messages": TURNS, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    ask["extra_body"] = {"ignore_eos": True}
    content = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert len(content) == 20
    shown = b"".join(bytes(entry.bytes) for entry in content)
    assert shown.decode(errors="replace").startswith("<|im_start|>system\nBe brief.<|im_end|>")
    for entry in content:
        assert entry.logprob == -1.5
        assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5, -2.5]
        assert entry.top_logprobs[1].bytes == entry.bytes
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    streamed = client.chat.completions.create(**ask, stream=True)
    again = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert again == content


def test_chat_logprobs_without_alternatives(client):
    content = (
        client.chat.completions.create(model="parrot", messages=TURNS, max_tokens=2, logprobs=True).choices[0].logprobs
    )
    assert [entry.top_logprobs for entry in content.content] == [[], []]


def test_large_chat_is_rendered_and_encoded_in_threads(client, every_way, tokenizer):
    text = "stone " * 1500
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model="parrot", messages=[{"role": "user", "content": text * 4}], max_tokens=1)
    answer = client.chat.completions.create(model="parrot", messages=[{"role": "user", "content": text}], max_tokens=1)
    assert answer.usage.prompt_tokens == len(tokenizer.encode(prompt_text(every_way[0], tokenizer)).ids)


def test_asynchronous_sdk_streams_many_at_once(every_way):
    async def ask(client: openai.AsyncOpenAI, word: str) -> str:
        stream = await client.chat.completions.create(
            model="parrot", messages=[{"role": "user", "content": word}], max_tokens=50, stream=True, stop="<"
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        base_url = f"{every_way[0].url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as client:
            return await asyncio.gather(*[ask(client, f"stone {i}") for i in range(16)])

    assert asyncio.run(ask_all()) == [f"user\nstone {i}" for i in range(16)]
