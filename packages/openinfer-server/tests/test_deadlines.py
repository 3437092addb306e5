"""`deadline_s`: a request that is not done in time is answered 504, in each API's shape, and in a stream."""

import json
from typing import Any

import pytest

from openinfer_server.testing import ParrotLoop

PROMPT = "stone stone"
LATE = {"deadline_s": 0.05, "max_tokens": 8}
MESSAGES = [{"role": "user", "content": PROMPT}]
TOLD = "the request was not done within its deadline_s of 0.05"


@pytest.fixture
def loop(info: Any) -> ParrotLoop:
    """It gives no token."""
    parrot = ParrotLoop(info)
    parrot.hold()
    return parrot


@pytest.fixture
def held(start: Any, loop: ParrotLoop) -> Any:
    return start(loop)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "deadline_s": 0.05}),
    ],
)
def test_late_request_is_a_504_in_openais_shape(held: Any, call: Any, path: str, body: dict[str, Any]) -> None:
    given = body if "token_ids" in body else {**LATE, **body}
    status, headers, answer = call(held, "POST", path, given)
    assert status == 504
    assert headers["x-should-retry"] == "false"
    assert json.loads(answer)["error"] == {
        "message": TOLD,
        "type": "server_error",
        "param": None,
        "code": "deadline_exceeded",
    }


def test_late_message_is_a_504_in_anthropics_shape(held: Any, call: Any) -> None:
    status, headers, answer = call(held, "POST", "/v1/messages", {**LATE, "model": "parrot", "messages": MESSAGES})
    error = json.loads(answer)["error"]
    assert (status, error["type"], error["message"]) == (504, "timeout_error", TOLD)
    assert headers["x-should-retry"] == "false"


def test_late_request_is_counted_and_the_server_goes_on(held: Any, loop: ParrotLoop, call: Any) -> None:
    call(held, "POST", "/v1/completions", {**LATE, "prompt": PROMPT})
    metrics = call(held, "GET", "/metrics")[2].decode()
    assert 'openinfer_request_failures_total{model_name="parrot",kind="deadline"} 1' in metrics
    loop.go()
    assert call(held, "POST", "/v1/completions", {"prompt": PROMPT, "deadline_s": 100})[0] == 200


class Pausing(ParrotLoop):
    """Gives each request six tokens, and no more."""

    def step(self) -> Any:
        if any(row.produced >= 6 for row in self._rows.values()):
            self.hold()
        return super().step()


@pytest.mark.parametrize(
    ("path", "body", "delta", "kind"),
    [
        ("/v1/completions", {"prompt": PROMPT}, '"text":', '"code":"deadline_exceeded"'),
        ("/v1/chat/completions", {"messages": MESSAGES}, '"content":', '"code":"deadline_exceeded"'),
        ("/v1/messages", {"model": "parrot", "messages": MESSAGES}, "text_delta", '"type":"timeout_error"'),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 64}, "output_text.delta", '"code":"server_error"'),
    ],
)
def test_stream_that_is_late_ends_with_the_error(
    start: Any, info: Any, call: Any, path: str, body: dict[str, Any], delta: str, kind: str
) -> None:
    limit = {} if path == "/v1/responses" else {"max_tokens": 64}
    server = start(Pausing(info))
    status, headers, answer = call(server, "POST", path, {"deadline_s": 0.3, "stream": True, **limit, **body})
    text = answer.decode()
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    assert "not done within its deadline_s of 0.3" in text
    assert kind in text
    # Text came before it.
    assert text.index(delta) < text.index("deadline_s of 0.3")
