"""Ollama's official client: chats, tools, thinking, formats, prompts, the model, errors."""

import json
import socket

import ollama
import pytest

from openinfer_core.sampling import GrammarKind
from openinfer_server import ServerOptions
from openinfer_server.testing import ScriptedLoop, ThreadedServer, wait_until
from openinfer_tiny_model import model_dir

TURNS = [{"role": "user", "content": "What is the capital of France?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: where.

    Returns:
        It, in words.
    """
    return f"rain in {city}"


def test_chat_is_answered_whole(bench, says):
    says("Paris.")
    answer = bench.client.chat("parrot", TURNS)
    assert (answer.model, answer.message.role, answer.message.content) == ("parrot", "assistant", "Paris.")
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count == len(bench.asked.prompt_token_ids)
    assert answer.eval_count > 1
    durations = (answer.prompt_eval_duration, answer.eval_duration, answer.load_duration)
    assert min(durations) >= 0
    assert answer.total_duration >= sum(durations)
    assert "<|im_start|>user\nWhat is the capital of France?<|im_end|>" in bench.prompt


def test_streamed_chat_is_the_whole_one_and_ends_with_its_counts(bench, says):
    says("<think>\nFrance?\n</think>\n\nParis, of course.")
    whole = bench.client.chat("parrot", TURNS)
    *pieces, last = bench.client.chat("parrot", TURNS, stream=True)
    assert len(pieces) > 2
    assert not any(piece.done for piece in pieces)
    assert "".join(piece.message.content for piece in [*pieces, last]) == whole.message.content == "Paris, of course."
    assert "".join(piece.message.thinking or "" for piece in pieces) == whole.message.thinking == "France?"
    assert (last.done, last.done_reason, last.eval_count) == (True, "stop", whole.eval_count)


@pytest.mark.parametrize("think", [True, "high"])
def test_thinking_is_told_from_the_answer(bench, says, think):
    says("<think>\nhm\n</think>\n\nParis.")
    answer = bench.client.chat("parrot", TURNS, think=think)
    assert (answer.message.thinking, answer.message.content) == ("hm", "Paris.")
    assert "<think>" not in bench.prompt


def test_thinking_is_turned_off_in_the_prompt(bench, says):
    says("Paris.")
    answer = bench.client.chat("parrot", TURNS, think=False)
    assert (answer.message.thinking, answer.message.content) == (None, "Paris.")
    assert bench.prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_three_turns_with_a_tool(bench, says, stream):
    turns = list(TURNS)
    says("Let me see.\n" + CALL)
    answer = bench.client.chat("parrot", turns, tools=[weather], stream=stream)
    pieces = list(answer) if stream else [answer]
    (call,) = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    assert pieces[-1].done_reason == "stop"
    assert '"description": "Tells the weather."' in bench.prompt
    content = "".join(piece.message.content for piece in pieces)
    turns.append(ollama.Message(role="assistant", content=content, tool_calls=[call]))
    turns.append({"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)})
    says("It rains.")
    assert bench.client.chat("parrot", turns, tools=[weather]).message.content == "It rains."
    assert "Let me see.\n" + CALL in bench.prompt
    assert "<tool_response>\nrain in Paris\n</tool_response>" in bench.prompt


def test_call_that_was_cut_off_is_an_object_with_its_text(bench, says):
    says('<tool_call>\n{"name": "weather", "arguments": {"city": "Par')
    answer = bench.client.chat("parrot", TURNS, tools=[weather])
    (call,) = answer.message.tool_calls
    assert call.function.arguments == {"arguments": '{"city": "Par'}


def test_format_constrains_the_answer(bench, says):
    says("{}")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    bench.client.chat("parrot", TURNS, format=schema)
    grammar = bench.asked.sampling.grammar
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    assert '"city"' in grammar.text
    bench.client.chat("parrot", TURNS, format="json")
    assert bench.asked.sampling.grammar.text == '{"type":"object"}'
    bench.client.generate("parrot", "x", format="json", raw=True)
    assert bench.asked.sampling.grammar.text == '{"type":"object"}'


def test_prompt_is_a_turn_of_a_chat_unless_it_is_raw(bench, says):
    says(" is Paris.")
    answer = bench.client.generate("parrot", "The capital", system="Be brief.", think=False)
    assert (answer.response, answer.done_reason) == (" is Paris.", "stop")
    assert bench.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nThe capital<|im_end|>")
    answer = bench.client.generate("parrot", "The capital", raw=True)
    assert (answer.response, bench.prompt) == (" is Paris.", "The capital")


def test_streamed_prompt_is_the_whole_one(bench, says):
    says("<think>\nhm\n</think>\n\nParis.")
    *pieces, last = bench.client.generate("parrot", "The capital?", stream=True)
    assert "".join(piece.response for piece in pieces) == "Paris."
    assert "".join(piece.thinking or "" for piece in pieces) == "hm"
    assert (last.done, last.response) == (True, "")


def test_options_reach_the_engine(bench, says):
    says("Paris is a city.")
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "num_predict": 9}
    options |= {"repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "stop": [" a"]}
    answer = bench.client.chat("parrot", TURNS, options=options)
    sampling = bench.asked.sampling
    for ours, theirs in {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}.items():
        assert getattr(sampling, ours) == options[theirs]
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty"):
        assert getattr(sampling, name) == options[name]
    assert answer.message.content == "Paris is"


def test_answer_ends_with_the_context_it_was_given(bench, says):
    says("Paris is a city. " * 20)
    for options in ({"num_ctx": 40}, {"num_ctx": 40, "num_predict": 1000}, {"num_ctx": 40, "num_predict": -1}):
        answer = bench.client.chat("parrot", TURNS, options=options)
        assert answer.prompt_eval_count + answer.eval_count == 40
        assert answer.done_reason == "length"


def test_penalties_are_off_where_they_count_no_token(bench, says):
    says("x")
    bench.client.chat("parrot", TURNS, options={"repeat_last_n": 0, "repeat_penalty": 1.3, "presence_penalty": 1})
    sampling = bench.asked.sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1, 0)


def test_model_is_described(bench):
    assert [model.model for model in bench.client.list().models] == ["parrot", "birds/parrot:7b"]
    (running, _) = bench.client.ps().models
    assert (running.model, running.size, running.context_length) == ("parrot", 123_456, 512)
    shown = bench.client.show("birds/parrot:7b")
    assert shown.modelinfo["birds.context_length"] == 512
    assert shown.details.family == "birds"
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert "<|im_start|>" in shown.template


def test_name_without_a_tag_is_the_latest(bench, says):
    says("Paris.")
    assert bench.client.chat("parrot:latest", TURNS).model == "parrot:latest"
    with pytest.raises(ollama.ResponseError, match="eagle") as caught:
        bench.client.chat("eagle", TURNS)
    assert caught.value.status_code == 404


def test_model_is_loaded_without_a_prompt_and_never_unloaded(bench):
    assert bench.client.generate("parrot").done_reason == "load"
    assert bench.client.chat("parrot", keep_alive="5m").done_reason == "load"
    for at_once in (0, "0s"):
        with pytest.raises(ollama.ResponseError, match="stays loaded"):
            bench.client.generate("parrot", keep_alive=at_once)


def test_what_is_not_here_is_refused_in_one_sentence(bench):
    client = bench.client
    for ask in (
        lambda: client.pull("parrot"),
        lambda: client.push("parrot"),
        lambda: client.create("mine", from_="parrot"),
        lambda: client.copy("parrot", "mine"),
        lambda: client.delete("parrot"),
        lambda: client.embed("parrot", "text"),
        lambda: client.embeddings("parrot", "text"),
    ):
        with pytest.raises(ollama.ResponseError, match="this server") as caught:
            ask()
        assert caught.value.status_code == 400


def test_client_that_leaves_its_stream_is_aborted(bench, says):
    says("stone " * 200)
    bench.loop.hold(after_steps=8)
    try:
        stream = bench.client.chat("parrot", TURNS, stream=True)
        assert next(stream).message.content
        stream.close()
        wait_until(lambda: bench.asked.request_id in bench.server.engine.aborted, "the abort")
    finally:
        bench.loop.go()


def test_client_that_half_closes_reads_each_line_whatever_is_probed(bench, says):
    """A server cannot tell whether a client that sends no more reads on: it writes space ahead of the next line."""
    says("stone")
    body = json.dumps({"model": "parrot", "messages": TURNS, "options": {"num_predict": 9}}).encode()
    head = (
        b"POST /api/chat HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
    )
    bench.loop.hold()
    try:
        with socket.create_connection(bench.server.address, timeout=20) as connection:
            connection.sendall(head + body)
            connection.shutdown(socket.SHUT_WR)
            said = b""
            while said.count(b"\r\n1\r\n \r\n") < 2:
                piece = connection.recv(4096)
                assert piece, said
                said += piece
            bench.loop.go()
            while piece := connection.recv(4096):
                said += piece
    finally:
        bench.loop.go()
    (_, _, chunks) = said.partition(b"transfer-encoding: chunked")[2].partition(b"\r\n\r\n")
    lines = b"".join(dechunked(chunks)).decode().splitlines()
    assert [json.loads(line)["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(json.loads(line)["message"]["content"] for line in lines).startswith("stone")


def dechunked(chunks: bytes) -> list[bytes]:
    found: list[bytes] = []
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        found.append(rest[: int(size, 16)])
        chunks = rest[int(size, 16) + 2 :]
    return found


def test_engine_that_fails_ends_the_stream_with_an_error(info):
    loop = ScriptedLoop(info, lambda request: list(range(100, 140)))
    loop.hold(after_steps=8)
    with (
        ThreadedServer(loop, model_dir(), ServerOptions(port=0, endpoints=("ollama",))) as server,
        ollama.Client(host=server.url, timeout=20) as client,
    ):
        stream = client.generate("parrot", "x", raw=True, stream=True)
        next(stream)
        loop.die()
        with pytest.raises(ollama.ResponseError, match="engine"):
            list(stream)
