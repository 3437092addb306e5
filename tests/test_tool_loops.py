"""Agents' tool loops as clients sent them, against a real engine: what is cached grows with every turn.

The first turns are recorded traffic (`./run clients --capture`): Codex, Claude Code, openai-agents. The loop then goes
on to ten turns as the client wrote its last one, a call and its result, with new ids and cities. Answers are short, and
what the model says is not looked at: its weights are drawn, the history is the recorded one. One turn is cancelled
while its answer streams, and asked again.
"""

import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openinfer.models import find_family, find_model_dir
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.options import LoadFormat
from openinfer_server import ServerOptions
from openinfer_server.testing import ThreadedServer

CAPTURES = Path(__file__).parents[1] / "packages" / "openinfer-server" / "tests" / "clients" / "captures"
TURNS, CANCELLED_TURN, OUTPUT_TOKENS = 10, 7, 6
BLOCK_TOKENS = 16
END_TOKENS = 64
"""Of a prompt, that the next turn may write otherwise: where the answer is asked for."""
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "max_position_embeddings": 16_384}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    tiny, folder = find_model_dir("tiny"), tmp_path_factory.mktemp("agents")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((tiny / "config.json").read_bytes()) | SMALL))
    options = EngineOptions(
        num_blocks=4096,
        block_size_tokens=BLOCK_TOKENS,
        max_num_seqs=4,
        max_step_tokens=512,
        load_format=LoadFormat.DUMMY,
    )
    family, _ = find_family(folder)
    loop = build_loop(resolve(family.definition, folder, options))
    with ThreadedServer(loop, folder, ServerOptions(port=0, model_name=["tiny"])) as server:
        yield server


def recorded(client: str) -> tuple[list[dict[str, Any]], dict[str, str], str]:
    """Bodies of one loop of a client, its headers, and the path."""
    kept = json.loads((CAPTURES / f"{client}.json").read_bytes())
    requests = [each for each in kept["requests"] if "[openinfer:tools]" in json.dumps(each["body"])]
    longest = max(requests, key=lambda each: len(json.dumps(each["body"])))
    bodies = [{**each["body"], "tools": kept["tools"][each["body"]["tools"]]} for each in requests]
    return bodies, longest["headers"], longest["path"]


def go_on(body: dict[str, Any], turn: int) -> dict[str, Any]:
    """The next turn: what the client wrote last, a call and its result, once more with other ids and another city."""
    field = "input" if "input" in body else "messages"
    items = body[field]
    calls = [index for index, each in enumerate(items) if each.get("type") == "function_call" or is_call(each)]
    step = json.dumps(items[calls[-1] :])
    for each in sorted(ids_of(json.loads(step))):
        step = step.replace(each, f"{each}x{turn}")
    for city in ("Paris", "Rome", "Oslo"):
        step = step.replace(city, f"{city}{turn}")
    return {**body, field: [*items, *json.loads(step)]}


def is_call(item: dict[str, Any]) -> bool:
    content = item.get("content")
    return isinstance(content, list) and any(each.get("type") == "tool_use" for each in content)


def ids_of(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(ids_of, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    own = {text for name, text in value.items() if name in ("id", "call_id", "tool_use_id") and isinstance(text, str)}
    return own.union(*map(ids_of, value.values()))


def ask(server: ThreadedServer, path: str, body: dict[str, Any], headers: dict[str, str], *, leave: bool) -> Any:
    """Prompt tokens, and those that were cached; None where the client leaves at the first event."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fields = {limit: 4000 if leave else OUTPUT_TOKENS, "stream": True, "temperature": 0}
    sent = json.dumps({**body, **fields}).encode()
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    try:
        connection.request("POST", path, sent, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        if response.status != 200:
            pytest.fail(response.read().decode())
        if leave:
            response.readline()
            return None
        lines = response.read().decode().splitlines()
    finally:
        connection.close()
    return usage_of([json.loads(line[5:]) for line in lines if line.startswith(("data:{", "data: {"))])


def usage_of(events: list[dict[str, Any]]) -> tuple[int, int]:
    usages = [
        usage
        for event in events
        for each in (event, event.get("message"), event.get("response"))
        if each and (usage := each.get("usage"))
    ]
    usage = {name: value for each in usages for name, value in each.items()}
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0), cached


@pytest.mark.parametrize("client", ["codex", "claude-code", "openai-agents"])
def test_every_turn_of_a_tool_loop_finds_the_one_before(server: ThreadedServer, client: str) -> None:
    bodies, headers, path = recorded(client)
    before = 0
    for turn in range(TURNS):
        body = bodies[turn] if turn < len(bodies) else go_on(bodies[-1], turn)
        if turn >= len(bodies):
            bodies.append(body)
        if turn == CANCELLED_TURN:
            assert ask(server, path, body, headers, leave=True) is None
        prompt_tokens, cached_tokens = ask(server, path, body, headers, leave=False)
        assert prompt_tokens > before
        if turn:
            assert cached_tokens >= before - END_TOKENS - BLOCK_TOKENS, (turn, prompt_tokens, cached_tokens, before)
        assert cached_tokens < prompt_tokens
        before = prompt_tokens


def test_loop_whose_first_words_change_finds_nothing(server: ThreadedServer) -> None:
    """The other way round: an agent that writes the time at the beginning computes every turn anew."""
    bodies, headers, path = recorded("openai-agents")
    found = []
    for number, body in enumerate(bodies[:3]):
        first = {**body["input"][0], "content": f"{number} o'clock. {body['input'][0]['content']}"}
        changed = {**body, "tools": [], "input": [first, *body["input"][1:]]}
        found.append(ask(server, path, changed, headers, leave=False))
    assert all(cached <= 3 * BLOCK_TOKENS for _, cached in found), found
