"""What clients asked, as `./run clients --capture` has kept it, is answered in the shape that they read."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from openinfer_core.engine import EngineInfo
from openinfer_server import ServerOptions
from openinfer_server.testing import ScriptedLoop, ThreadedServer

CAPTURES = sorted((Path(__file__).parent / "captures").glob("*.json"))
ENDS = {
    "/v1/chat/completions": "data: [DONE]\n\n",
    "/v1/responses": '"type":"response.completed"',
    "/v1/messages": '"type":"message_stop"',
}
SAYS = "A stone."


@pytest.fixture(scope="module")
def url(agent_dir: Path, info: EngineInfo, tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Of a server with a context for the prompts of agents."""
    said = (*tokenizer.encode(SAYS).ids, *info.eos_token_ids)
    loop = ScriptedLoop(msgspec.structs.replace(info, max_model_tokens=2**18, num_blocks=2**14), lambda _: said)
    options = ServerOptions(port=0, model_name=["tiny"])
    with ThreadedServer(loop, agent_dir, options) as server:
        yield server.url


@pytest.mark.parametrize("capture", CAPTURES, ids=[file.stem for file in CAPTURES])
def test_requests_of_a_client_are_answered(url: str, capture: Path) -> None:
    kept = json.loads(capture.read_text("utf-8"))
    for request in kept["requests"]:
        body: dict[str, Any] = request["body"]
        if "tools" in body:
            body = {**body, "tools": kept["tools"][body["tools"]]}
        headers = {"content-type": "application/json", **request["headers"]}
        asked = urllib.request.Request(url + request["path"], json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(asked, timeout=20) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            pytest.fail(f"{kept['client']} {kept['version']}: {error.read().decode()}")
        assert "stone" in text
        if body.get("stream"):
            assert ENDS[request["path"]] in text
