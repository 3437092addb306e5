"""The rest of OpenAI's official SDK: completions, chats, models, raw and streaming responses, errors and retries."""

import asyncio

import msgspec
import openai
import pytest

from openinfer_server.testing import ParrotLoop

TURNS = [{"role": "user", "content": "naïve 🙂?"}]


def test_completion_of_every_form_of_prompt(agent, says):
    says("A stone.")
    complete = agent.openai.completions.create
    assert complete(model="parrot", prompt="stone").choices[0].text == "A stone."
    assert complete(model="parrot", prompt=[5, 6]).usage.prompt_tokens == 2
    assert [c.index for c in complete(model="parrot", prompt=["a", "b"], n=2).choices] == [0, 1, 2, 3]
    assert complete(model="parrot", prompt=[[5], [6, 7]]).usage.prompt_tokens == 3


def test_completion_streams(agent, says):
    says("A stone.")
    chunks = list(agent.openai.completions.create(model="parrot", prompt="stone", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "A stone."
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_is_answered_and_streamed(agent, says):
    says("A stone.")
    answer = agent.openai.chat.completions.create(model="parrot", messages=TURNS)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("A stone.", "stop")
    with agent.openai.chat.completions.stream(model="parrot", messages=TURNS) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == "A stone."


def test_raw_and_streaming_responses(agent, says):
    says("A stone.")
    raw = agent.openai.chat.completions.with_raw_response.create(model="parrot", messages=TURNS)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == "A stone."
    with agent.openai.chat.completions.with_streaming_response.create(
        model="parrot", messages=TURNS, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert lines[-1] == "data: [DONE]"


def test_models(agent):
    assert [model.id for model in agent.openai.models.list()] == ["parrot", "bird"]
    assert agent.openai.models.retrieve("bird").object == "model"
    with pytest.raises(openai.NotFoundError):
        agent.openai.models.retrieve("eagle")
    with pytest.raises(openai.APIStatusError) as error:
        agent.openai.models.delete("parrot")
    assert error.value.status_code == 405


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.chat.completions.retrieve("chatcmpl-1"),
        lambda client: client.embeddings.create(model="parrot", input="a"),
        lambda client: client.files.list(),
        lambda client: client.conversations.create(),
    ],
)
def test_what_is_not_here_is_404_with_the_path(agent, ask):
    with pytest.raises(openai.NotFoundError, match=r"there is no route /v1/"):
        ask(agent.openai)


def test_errors_have_the_sdks_classes(agent):
    with pytest.raises(openai.BadRequestError) as error:
        agent.openai.chat.completions.create(model="parrot", messages=[])
    assert (error.value.param, error.value.code, error.value.type) == (
        "messages",
        "invalid_value",
        "invalid_request_error",
    )


def test_sdk_retries_when_the_queue_is_full(start, info, agent_dir):
    server = start(ParrotLoop(msgspec.structs.replace(info, max_waiting=0)), folder=agent_dir)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1, timeout=20) as client:
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model="parrot", input="a")
        assert len(server.engine.submitted) == 2
        stream = client.responses.create(model="parrot", input="a", background=True, stream=True)
        last = list(stream)[-1]
    assert (last.type, last.response.status, last.response.error.code) == (
        "response.failed",
        "failed",
        "rate_limit_exceeded",
    )


def test_failure_in_a_streamed_response_is_an_event(start, info, agent_dir):
    loop = ParrotLoop(info, step_s=0.002)
    server = start(loop, folder=agent_dir)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        ask = {"model": "parrot", "input": "a", "stream": True, "extra_body": {"ignore_eos": True}}
        stream = client.responses.create(**ask)
        next(iter(stream))
        loop.die()
        last = list(stream)[-1]
    assert (last.type, last.response.error.code) == ("response.failed", "server_error")


def test_client_that_leaves_a_response_is_aborted(start, info, agent_dir):
    from openinfer_server.testing import wait_until

    loop = ParrotLoop(info, step_s=0.001)
    server = start(loop, folder=agent_dir)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        ask = {"model": "parrot", "input": "a", "stream": True, "extra_body": {"ignore_eos": True}}
        stream = client.responses.create(**ask)
        next(iter(stream))
        stream.close()
        wait_until(lambda: len(server.engine.aborted) == 1, "the abort")


def test_asynchronous_client(agent, says):
    says("A stone.")

    async def ask_all() -> list[str]:
        url = f"{agent.server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            answers = await asyncio.gather(
                *[client.chat.completions.create(model="parrot", messages=TURNS) for _ in range(4)]
            )
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(ask_all()) == ["A stone."] * 4


def test_requests_have_an_id_that_both_sdks_show(agent, says, call):
    says("A stone.")
    mine = {"x-request-id": "trace-1.a:b"}
    answer = agent.openai.chat.completions.create(model="parrot", messages=TURNS, extra_headers=mine)
    assert answer._request_id == "trace-1.a:b"  # noqa: SLF001 - the SDK documents it
    assert agent.openai.models.list()._request_id.startswith("req_")  # noqa: SLF001
    with pytest.raises(openai.BadRequestError) as error:
        agent.openai.chat.completions.create(model="parrot", messages=[], extra_headers={"x-request-id": "x" * 129})
    assert error.value.request_id.startswith("req_")
    message = agent.anthropic.messages.create(model="parrot", max_tokens=9, messages=TURNS)
    assert message._request_id.startswith("req_")  # noqa: SLF001
    raw = agent.openai.chat.completions.with_raw_response.create(model="parrot", messages=TURNS, stream=True)
    assert raw.headers["x-request-id"].startswith("req_")
    raw.parse().close()
