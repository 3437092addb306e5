"""Of the next turn of a conversation what is new alone is encoded, by every API, and for its sender alone."""

import contextlib
import http.client
import json

import pytest

from openinfer_core import InvalidRequest
from openinfer_server import ServerOptions
from openinfer_server.testing import DEADLINE_S, ParrotLoop

TEXT = "stone mountain river " * 60
KEYS = {name: f"key-of-the-tenant-{name}" for name in ("one", "two")}


def turns(count: int) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": f"{number} {TEXT}"} for number in range(count)]
    answers = [{"role": "assistant", "content": f"answer {number}"} for number in range(count - 1)]
    return [each for pair in zip(asked, [*answers, {}], strict=True) for each in pair if each]


def body(path: str, count: int, **further: object) -> dict[str, object]:
    field = "input" if path == "/v1/responses" else "messages"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {"model": "parrot", field: turns(count), limit: 1, **further}


def counted(server, call) -> tuple[int, int]:
    page = call(server, "GET", "/metrics")[2].decode()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line and line[0] != "#")
    names = ("openinfer_known_prompt_characters_total", "openinfer_encoded_prompt_characters_total")
    known, encoded = (int(values[name]) for name in names)
    return known, encoded


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_next_turn_is_encoded_from_where_it_is_new(start, info, call, path):
    server = start(ParrotLoop(info))
    prompts = []
    for count in (1, 2, 1, 2):
        assert call(server, "POST", path, body(path, count))[0] == 200
        prompts.append(server.engine.submitted[-1].prompt_token_ids)
    known, encoded = counted(server, call)
    assert known > 2 * len(TEXT)  # of the second and the fourth
    assert encoded > 2 * len(TEXT)
    other = start(ParrotLoop(info), ServerOptions(port=0, known_prefix_bytes=0))
    assert call(other, "POST", path, body(path, 2))[0] == 200
    assert prompts[1] == prompts[3] == other.engine.submitted[-1].prompt_token_ids
    assert counted(other, call)[0] == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_another_salt_finds_nothing(start, info, call, path):
    server = start(ParrotLoop(info))
    for salt in ("a", "b", None):
        assert call(server, "POST", path, body(path, 2, cache_salt=salt))[0] == 200
    assert counted(server, call)[0] == 0
    assert call(server, "POST", path, body(path, 2, cache_salt="a"))[0] == 200
    assert counted(server, call)[0] > len(TEXT)


def test_another_tenant_finds_nothing(start, info, call, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[[keys]]\ntenant = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))
    path.chmod(0o600)
    server = start(ParrotLoop(info), ServerOptions(port=0, api_keys_file=str(path)))
    content = json.dumps(body("/v1/chat/completions", 2)).encode()
    for key in KEYS.values():
        with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=DEADLINE_S)) as connection:
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body=content, headers=headers)
            assert connection.getresponse().status == 200
    assert server.service.control_tokens.known_prefixes.known_characters == 0


def test_option_is_checked():
    with pytest.raises(InvalidRequest, match="known_prefix_bytes is -1; it must be between 0 and"):
        ServerOptions(known_prefix_bytes=-1)
