"""Drain, signals, the engine's death, exit codes."""

import asyncio
import contextlib
import gc
import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import openai
import psutil
import pytest

from openinfer_core import EngineClosed
from openinfer_core.process.local import InProcessEngine
from openinfer_core.process.timeline import Timeline
from openinfer_server import CannotListen, ServerOptions, UnusableTokenizer, load_app, run, run_starting
from openinfer_server.server import listen
from openinfer_server.testing import DEADLINE_S, ParrotLoop, wait_until


class Asking(threading.Thread):
    """Streams a completion in the background."""

    def __init__(self, client: openai.OpenAI, **further) -> None:
        super().__init__(daemon=True)
        self.chunks = []
        self.error = None
        self._client, self._further = client, further
        self.start()

    def run(self) -> None:
        try:
            answer = self._client.completions.create(model="parrot", prompt="stone", **self._further)
            for chunk in answer if self._further.get("stream") else [answer]:
                self.chunks.append(chunk)
        except openai.APIError as error:
            self.error = error

    def result(self):
        self.join(DEADLINE_S)
        assert not self.is_alive()
        return self.chunks


@pytest.mark.parametrize("stream", [False, True])
def test_drain_lets_running_requests_finish_and_refuses_new_ones(start, info, connect, call, stream):
    parrot = ParrotLoop(info)
    server = start(parrot)
    parrot.hold()
    kept = http.client.HTTPConnection(*server.address, timeout=DEADLINE_S)
    kept.request("GET", "/ready")
    assert kept.getresponse().read() == b'{"status":"ready"}'
    running = Asking(connect(server), max_tokens=20, stream=stream)
    wait_until(lambda: len(server.engine.submitted) == 1, "submission")
    server.stop()

    def refused() -> bool:
        try:
            call(server, "GET", "/health")
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it stood in the listener's queue when that closed
            return False
        return False

    wait_until(refused, "an end of listening")
    kept.close()
    parrot.go()
    (*_, last) = running.result()
    assert last.choices[0].finish_reason == "length"
    assert server.join() == 0
    assert server.engine.aborted == []


def test_new_requests_are_503_while_draining(start, info, model_dir):
    """The listener closes within a tenth of a second; until then, and on connections it cannot close, this is said."""
    messages = []

    async def post() -> None:
        async def receive():
            return {"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}

        async def send(message):
            messages.append(message)

        engine = InProcessEngine(ParrotLoop(info))
        app = load_app(engine, model_dir, ServerOptions())
        app.service.draining = True
        headers = [(b"content-type", b"application/json")]
        await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive, send)
        await app({"type": "http", "method": "GET", "path": "/ready", "headers": []}, receive, send)
        await app.stop()
        await engine.close()

    asyncio.run(post())
    refusal, _, ready, _ = messages
    assert (refusal["status"], ready["status"]) == (503, 503)
    assert {b"retry-after", b"connection"} <= {name for name, _ in refusal["headers"]}


class ClosedTransport:
    """As of uvloop between the end of a connection and the call that tells of it."""

    def __init__(self, *, is_closing: bool) -> None:
        self.transport = self
        self.is_closing = lambda: is_closing

    async def send(self, _: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")


@pytest.mark.parametrize("path", ["/v1/models", "/nothing"], ids=["answer", "refusal"])
def test_client_that_left_before_its_answer_is_no_fault(info, model_dir, caplog, path):
    """A client could fill the log with tracebacks by asking and closing."""

    async def ask(*, is_closing: bool) -> None:
        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        engine = InProcessEngine(ParrotLoop(info))
        app = load_app(engine, model_dir, ServerOptions())
        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        try:
            await app(scope, receive, ClosedTransport(is_closing=is_closing).send)
            assert [status for _, status in app.service.metrics.responses] == [499]
        finally:
            await app.stop()
            await engine.close()

    asyncio.run(ask(is_closing=True))
    assert not any(record.exc_info for record in caplog.records)
    with pytest.raises(RuntimeError):
        asyncio.run(ask(is_closing=False))


def test_drain_aborts_what_exceeds_the_deadline(start, info, connect):
    server = start(ParrotLoop(info, step_s=0.01), ServerOptions(port=0, drain_deadline_s=0.2))
    client = connect(server)
    streaming = Asking(client, max_tokens=2000, stream=True)
    whole = Asking(client, max_tokens=2000)
    wait_until(lambda: len(server.engine.submitted) == 2 and streaming.chunks, "a beginning")
    server.stop()
    streaming.result()
    whole.result()
    assert isinstance(streaming.error, openai.APIError)
    assert "shutting down" in str(streaming.error)
    assert isinstance(whole.error, openai.InternalServerError)
    assert whole.error.status_code == 503
    assert server.join() == 0
    assert len(server.engine.aborted) == 2


def test_death_of_the_engine_fails_open_requests_and_ends_with_1(start, info, connect):
    parrot = ParrotLoop(info)
    server = start(parrot)
    parrot.hold()
    client = connect(server)
    streaming, whole = Asking(client, max_tokens=9, stream=True), Asking(client, max_tokens=9)
    wait_until(lambda: len(server.engine.submitted) == 2, "submission")
    parrot.die()
    streaming.result()
    whole.result()
    assert streaming.error is not None
    assert whole.error.status_code == 503
    assert server.join() == 1


def test_address_in_use_is_an_error_of_ours():
    with (
        listen(ServerOptions(port=0)) as listener,
        pytest.raises(CannotListen, match=r"cannot listen on .* port"),
    ):
        listen(ServerOptions(port=listener.getsockname()[1]))


CHILD = """
import logging, sys
from pathlib import Path
from openinfer_core.process.local import InProcessEngine
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions, spawn_simulated
from openinfer_server import EventLoop, ServerOptions, run

class Mortal(SimulatedLoop):
    def step(self):
        if self.stats().generated_tokens >= 50:
            raise RuntimeError("worn out")
        return super().step()

logging.basicConfig(level="INFO")
options = SimulatedOptions(num_token_ids=400, tpot_s=0.005, max_model_tokens=16_000)
engines = {
    "immortal": lambda: InProcessEngine(SimulatedLoop(options)),
    "mortal": lambda: InProcessEngine(Mortal(options)),
    "remote": lambda: spawn_simulated(options),
}
server = ServerOptions(port=0, drain_deadline_s=20, event_loop=EventLoop(sys.argv[3]))
sys.exit(run(engines[sys.argv[2]](), Path(sys.argv[1]), server, on_ready=lambda url: print(url, flush=True)))
"""


@pytest.fixture
def child(model_dir):
    """Starts a server in a process of its own; gives the process and the URL."""
    children = []

    def start_child(kind: str, event_loop: str = "asyncio"):
        command = [sys.executable, "-c", CHILD, str(model_dir), kind, event_loop]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        children.append(process)
        return process, process.stdout.readline().strip()

    yield start_child
    for process in children:
        process.kill()
        process.communicate()


def read_events(url: str, max_tokens: int, at_first: Callable[[], None]) -> tuple[list[dict[str, object]], bytes]:
    """Streams a completion; returns its events and the last line."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)) as connection:
        body = json.dumps({"prompt": "stone", "max_tokens": max_tokens, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        lines = [response.readline()]
        at_first()
        lines += response.readlines()
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")], lines[-2].strip()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
@pytest.mark.parametrize(("number", "event_loop"), [(signal.SIGTERM, "uvloop"), (signal.SIGINT, "asyncio")])
@pytest.mark.parametrize("kind", ["immortal", "remote"])
def test_signal_drains_and_the_process_ends_with_0(child, kind, number, event_loop):
    process, url = child(kind, event_loop)
    events, last = read_events(url, 40, lambda: process.send_signal(number))
    assert len(events) == 41
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert last == b"data: [DONE]"
    _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, log
    assert f"serving simulated on {url}" in log
    assert "draining 1 requests" in log
    assert "Traceback" not in log


def test_process_ends_with_1_when_its_engine_dies(child):
    process, url = child("mortal")
    events, last = read_events(url, 500, lambda: None)
    assert len(events) == 51
    assert events[-1]["error"]["code"] == "unavailable"
    assert last == b"data: [DONE]"
    _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, log
    assert "the engine died" in log


def test_process_ends_with_1_when_its_engine_process_is_killed(child):
    process, url = child("remote")
    (engine,) = psutil.Process(process.pid).children()
    events, _ = read_events(url, 15_000, engine.kill)
    assert events[-1]["error"]["code"] == "unavailable"
    _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, log
    assert "the engine died" in log


def test_engine_starts_while_the_text_is_read_and_the_phases_are_told(info, model_dir):
    timeline, reading = Timeline(begin_s=0.0), threading.Event()

    def launch():
        assert reading.wait(DEADLINE_S)  # the text is read although the engine is not there yet
        return InProcessEngine(ParrotLoop(info))

    class Reported(Timeline):
        def mark(self, name: str, *, device_bytes: int = 0) -> None:
            timeline.mark(name, device_bytes=device_bytes)
            reading.set()

    code = run_starting(
        launch,
        model_dir,
        ServerOptions(port=0),
        on_ready=lambda url: signal.raise_signal(signal.SIGTERM),
        timeline=Reported(begin_s=0.0),
    )
    gc.unfreeze()
    assert code == 0
    assert [phase.name for phase in timeline.phases] == ["text", "engine", "http"]


def test_text_that_cannot_be_read_closes_an_engine_that_has_started(info, tmp_path):
    engine = InProcessEngine(ParrotLoop(info))
    with pytest.raises(UnusableTokenizer, match=r"no tokenizer\.json"):
        run(engine, tmp_path, ServerOptions(port=0))
    with pytest.raises(EngineClosed):
        asyncio.run(engine.stats())
