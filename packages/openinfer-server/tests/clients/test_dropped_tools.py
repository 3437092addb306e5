"""Tools that are dropped with notice: said, counted, not shown; refused where named, and by a strict server."""

import json
import re
from typing import Any

import pytest
from anthropic import types as anthropic_types
from openai.types import responses

from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop
from openinfer_server.tools.types import DROPPED_TOOLS

FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
TURNS = [{"role": "user", "content": "stone"}]
SEARCH = {"type": "web_search", "external_web_access": False}
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        {"messages": TURNS},
        {"type": "function", "function": FUNCTION},
        {"type": "web_search"},
    ),
    "/v1/responses": ({"input": "stone"}, {"type": "function", **FUNCTION}, SEARCH),
    "/v1/responses/input_tokens": ({"input": "stone"}, {"type": "function", **FUNCTION}, SEARCH),
    "/v1/messages": (
        {"messages": TURNS, "max_tokens": 9},
        {"name": "weather", "input_schema": {}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ),
    "/v1/messages/count_tokens": (
        {"messages": TURNS},
        {"name": "weather", "input_schema": {}},
        {"type": "web_search_20250305", "name": "web_search"},
    ),
}
"""Path -> a body, a tool that is kept, and one that is dropped."""


def counted(agent, call) -> dict[str, int]:
    """How many tools of each type were dropped so far."""
    _, _, page = call(agent.server, "GET", "/metrics")
    found = re.findall(r'openinfer_dropped_fields_total\{field="tools",type="(\w+)"\} (\d+)', page.decode())
    return {kind: int(count) for kind, count in found}


def without_ids(answer: bytes) -> str:
    return re.sub(r'"(?:\w*id|created|created_at|completed_at)":(?:"[^"]*"|\d+)', "", answer.decode())


@pytest.mark.parametrize(
    ("path", "options"),
    [(path, {}) for path in BODIES] + [(path, {"stream": True}) for path in BODIES if "tokens" not in path],
)
def test_dropped_tool_is_said_counted_and_nowhere_else(agent, says, call, path, options):
    says("A stone.")
    needed, kept, dropped = BODIES[path]
    body = {**needed, **options}
    _, plain_headers, plain = call(agent.server, "POST", path, {**body, "tools": [kept]})
    before = counted(agent, call)
    status, headers, answer = call(agent.server, "POST", path, {**body, "tools": [dropped, kept, dropped]})
    assert status == 200, answer
    kind = dropped["type"]
    assert headers["openinfer-dropped"] == f"tools[0].type={kind}, tools[2].type={kind}"
    assert "openinfer-dropped" not in plain_headers
    assert without_ids(answer) == without_ids(plain)
    assert counted(agent, call) == before | {kind: before[kind] + 2}


@pytest.mark.parametrize("path", BODIES)
def test_refusals_name_the_places_of_tools_as_they_were_sent(agent, call, path):
    body, kept, dropped = BODIES[path]
    status, _, answer = call(agent.server, "POST", path, {**body, "tools": [dropped, kept, kept]})
    assert status == 400
    assert json.loads(answer)["error"]["message"].startswith("two functions are named 'weather'")
    if "messages" not in path:
        assert json.loads(answer)["error"]["param"].startswith("tools[2]")


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        ("/v1/chat/completions", "required"),
        ("/v1/responses", "required"),
        ("/v1/responses", {"type": "web_search"}),
        ("/v1/responses", {"type": "web_search_preview"}),
        ("/v1/responses", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}),
        ("/v1/messages", {"type": "any"}),
        ("/v1/messages", {"type": "tool", "name": "web_search"}),
    ],
)
def test_what_tool_choice_names_is_refused(agent, call, path, choice):
    body, _, dropped = BODIES[path]
    before = len(agent.server.engine.submitted)
    status, _, answer = call(agent.server, "POST", path, {**body, "tools": [dropped], "tool_choice": choice})
    assert status == 400, answer
    assert "tool" in json.loads(answer)["error"]["message"]
    assert len(agent.server.engine.submitted) == before


@pytest.mark.parametrize("path", BODIES)
def test_strict_server_refuses_them(start, call, info, agent_dir, path):
    body, kept, dropped = BODIES[path]
    server = start(ParrotLoop(info), ServerOptions(port=0, strict=True), folder=agent_dir)
    status, headers, answer = call(server, "POST", path, {**body, "tools": [kept, dropped]})
    assert (status, "openinfer-dropped" in headers) == (400, False)
    message = json.loads(answer)["error"]["message"]
    assert message == f"tools[1].type is not supported: no tool {dropped['type']} runs here, and this server is strict"
    status, _, _ = call(server, "POST", path, {**body, "tools": [kept]})
    assert status == 200


def test_other_tools_of_servers_are_refused(agent, call):
    for kind in ("file_search", "web_fetch_20250910", "web_search_9999"):
        for path in ("/v1/responses", "/v1/messages"):
            status, _, answer = call(agent.server, "POST", path, {**BODIES[path][0], "tools": [{"type": kind}]})
            assert (status, json.loads(answer)["error"]["message"][:13]) == (400, "tools[0].type"), answer


def test_the_list_has_what_the_sdks_know():
    names = [name for name in dir(anthropic_types) if re.fullmatch(r"WebSearchTool\d+Param", name)]
    theirs = {f"web_search_{re.search('[0-9]+', name)[0]}" for name in names}
    for kind in (responses.WebSearchTool, responses.WebSearchPreviewTool):
        theirs |= set(kind.model_fields["type"].annotation.__args__)
    assert theirs == DROPPED_TOOLS
