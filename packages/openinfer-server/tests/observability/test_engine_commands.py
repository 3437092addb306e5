"""Routes that stop an engine for a while: who may call them, what the engine is told, and what is answered."""

import contextlib
import http.client
import json

import msgspec
import pytest

from openinfer_core.control import InFlight, Pause, Resume, Sleep, UpdateWeights, Wake
from openinfer_core.engine import EngineCapability, EngineState
from openinfer_core.errors import Refused
from openinfer_core.events import Failed, FailureKind
from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop

KEY = "operator-0123456789"
CAPABILITIES = (EngineCapability.PAUSE, EngineCapability.SLEEP, EngineCapability.UPDATE_WEIGHTS)
COMMANDS = ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights")


class Stoppable(ParrotLoop):
    """Notes what it is told, and is in the state that follows; `refusal` is raised instead, in state `after`."""

    def __init__(self, info):
        super().__init__(msgspec.structs.replace(info, capabilities=CAPABILITIES))
        self.commands = []
        self.state = EngineState.SERVING
        self.refusal = None
        self.after = EngineState.SERVING

    def control(self, command):
        self.commands.append(command)
        if self.refusal is not None:
            self.state = self.after
            raise Refused(self.refusal)
        states = {Pause: EngineState.PAUSED, Sleep: EngineState.ASLEEP}
        self.state = states.get(type(command), EngineState.SERVING)
        return []

    def submit(self, request):
        if self.state is EngineState.ASLEEP:
            return [Failed(request.request_id, FailureKind.UNAVAILABLE, "the engine is asleep; wake it first")]
        return super().submit(request)

    def stats(self):
        return msgspec.structs.replace(super().stats(), state=self.state, weights_version="content abc")


@pytest.fixture
def loop(info):
    return Stoppable(info)


@pytest.fixture
def server(start, loop, tmp_path):
    keys = [("operators", "admin", KEY), ("users", "user", "user-0123456789ab")]
    text = "".join(f'[[keys]]\ntenant = "{tenant}"\nlevel = "{level}"\nkey = "{key}"\n' for tenant, level, key in keys)
    (tmp_path / "keys.toml").write_text(text)
    return start(loop, ServerOptions(port=0, api_keys_file=str(tmp_path / "keys.toml")))


def ask(server, path, *, method="POST", body=None, key=KEY):
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=20)) as connection:
        headers = {"x-api-key": key} | ({"content-type": "application/json"} if body is not None else {})
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read()), dict(response.getheaders())


def test_commands_are_for_operators(server, loop):
    for path in COMMANDS:
        assert ask(server, path, body={"path": "x"}, key="user-0123456789ab")[0] == 403
        assert ask(server, path, body={"path": "x"}, key="another-0123456789")[0] == 401
    assert loop.commands == []


@pytest.mark.parametrize(
    ("path", "body", "command", "state"),
    [
        ("/pause", None, Pause(), "paused"),
        ("/pause?mode=abort", None, Pause(InFlight.ABORT), "paused"),
        ("/resume", None, Resume(), "serving"),
        ("/sleep", None, Sleep(), "asleep"),
        ("/sleep?level=2&mode=abort", None, Sleep(False, InFlight.ABORT), "asleep"),
        ("/wake_up", None, Wake(), "serving"),
        ("/update_weights", {"path": "step-1"}, UpdateWeights(path="step-1"), "serving"),
        (
            "/update_weights",
            {"path": "step-1", "content_hash": "ab" * 32, "mode": "abort", "drafter_path": "drafter-1"},
            UpdateWeights(path="step-1", content_hash="ab" * 32, requests=InFlight.ABORT, drafter_path="drafter-1"),
            "serving",
        ),
    ],
)
def test_engine_is_told_what_was_asked(server, loop, path, body, command, state):
    status, answer, _ = ask(server, path, body=body)
    assert (status, answer) == (200, {"status": "done", "state": state, "weights_version": "content abc"})
    assert loop.commands == [command]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause?mode=wait", None),
        ("/sleep?level=3", None),
        ("/sleep?tags=weights", None),
        ("/wake_up?tags=weights", None),
        ("/update_weights", {"path": ""}),
        ("/update_weights", {"path": "x" * 5000}),
        ("/update_weights", {"path": "x", "content_hash": "not hexadecimal"}),
        ("/update_weights", {"path": "x", "drafter_path": "x" * 4097}),
        ("/update_weights", {"path": "x", "segments": ["y"]}),
        ("/update_weights", {}),
    ],
)
def test_what_means_nothing_is_refused_before_the_engine_is_told(server, loop, path, body):
    assert ask(server, path, body=body)[0] == 400
    assert loop.commands == []


def test_engine_that_is_asleep_is_well_and_not_ready(server, loop):
    assert ask(server, "/sleep")[0] == 200
    status, health, _ = ask(server, "/health", method="GET")
    assert (status, health["status"], health["state"]) == (200, "ok", "asleep")
    assert ask(server, "/ready", method="GET")[:2] == (503, {"status": "asleep"})
    assert ask(server, "/is_sleeping", method="GET")[1] == {"is_sleeping": True}
    status, answer, headers = ask(server, "/v1/completions", body={"prompt": "a"})
    assert (status, "asleep" in answer["error"]["message"]) == (503, True)
    assert int(headers["retry-after"]) > 0
    assert ask(server, "/wake_up")[0] == 200
    assert ask(server, "/is_sleeping", method="GET")[1] == {"is_sleeping": False}
    assert ask(server, "/ready", method="GET")[0] == 200
    assert ask(server, "/v1/completions", body={"prompt": "a"})[0] == 200


def test_paused_is_said(server):
    assert ask(server, "/is_paused", method="GET")[1] == {"is_paused": False}
    ask(server, "/pause")
    assert ask(server, "/is_paused", method="GET", key="user-0123456789ab")[1] == {"is_paused": True}
    assert ask(server, "/ready", method="GET")[:2] == (503, {"status": "paused"})


@pytest.mark.parametrize(
    ("path", "after", "status"),
    [
        ("/update_weights", EngineState.SERVING, 400),
        ("/update_weights", EngineState.ASLEEP, 409),
        ("/update_weights", EngineState.WITHOUT_WEIGHTS, 503),
        ("/wake_up", EngineState.ASLEEP, 503),
        ("/sleep", EngineState.SERVING, 409),
    ],
)
def test_status_says_whether_the_engine_serves_on(server, loop, path, after, status):
    loop.refusal, loop.after = "because of this", after
    answered, answer, _ = ask(server, path, body={"path": "x"} if path == "/update_weights" else None)
    assert (answered, answer["error"]["message"]) == (status, "because of this")


def test_engine_that_cannot_is_named(start, info, tmp_path):
    (tmp_path / "keys.toml").write_text(f'[[keys]]\ntenant = "operators"\nlevel = "admin"\nkey = "{KEY}"')
    server = start(ParrotLoop(info), ServerOptions(port=0, api_keys_file=str(tmp_path / "keys.toml")))
    for path in COMMANDS:
        status, answer, _ = ask(server, path, body={"path": "x"})
        assert (status, answer["error"]["code"]) == (400, "not_supported")
