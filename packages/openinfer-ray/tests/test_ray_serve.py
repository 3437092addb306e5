"""The command with real Ray: replicas that are placed, killed under load, replaced, drained and ended."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="replicas on Ray need Linux")

COMMAND = [sys.executable, "-m", "openinfer.commands.main", "ray"]
GIVE_UP_S = 900.0  # of the whole test, which took 90 to 190 s on two cores with loads of 8 to 25


class Server:
    """`openinfer ray serve` in a process, with a cluster of its own.

    Attributes:
        process: the command.
        url: where it serves.
    """

    def __init__(self, log: Path, *, replicas: int = 2, flags: Sequence[str] = ()) -> None:
        self._log = log
        given = ["--ray-address", "local", "--replicas", str(replicas), "--replica-health-period-s", "0.5"]
        given += ["--drain-deadline-s", "240", "--replica-timeout-s", "120"]  # however slow the machine is
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", "tiny", *given, *(flags if "--port" in flags else [*flags, "--port", "0"])],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._watchdog = threading.Timer(GIVE_UP_S, self.process.kill)
        self._watchdog.start()
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.fullmatch(
            rf"openinfer: serving tiny on (http\S+), {replicas} replicas (and \d servers )?on Ray\n", said
        )
        assert found is not None, (said, self.log)
        self.url = found[1]

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", errors="replace")

    @property
    def engines(self) -> dict[int, psutil.Process]:
        """The processes of engines, by their ids."""
        return {each.pid: each for each in self.children if "openinfer_engine.child" in _command_line(each)}

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stream(self, max_tokens: int, begun: threading.Semaphore) -> str:
        """How a stream ended: `done`, `error` or `cut`; `begun` is released at its first event, or its end."""
        body = {"model": "tiny", "prompt": "Where is Paris?", "max_tokens": max_tokens, "stream": True}
        body |= {"ignore_eos": True}
        ended, has_begun = "cut", False
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=GIVE_UP_S) as answer:
                if answer.status_code != 200:
                    return "error" if answer.status_code == 503 else f"status {answer.status_code}"
                for line in answer.iter_lines():
                    if not has_begun and line:
                        has_begun = True
                        begun.release()
                    if line == "data: [DONE]":
                        ended = "done" if ended == "cut" else ended
                    elif line.startswith("data: ") and "error" in json.loads(line.removeprefix("data: ")):
                        ended = "error"
        finally:
            if not has_begun:
                begun.release()
        return ended

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def end(self) -> None:
        """What is left of it, also after a failed test."""
        self._watchdog.cancel()
        left = self.children if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for each in left:
            if each.is_running():
                each.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    # The cluster sends no reports, and leaves no token in the user's home.
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("OPENINFER_LOG_LEVEL", "info")


@pytest.fixture
def server(tmp_path: Path, of_ray: None) -> Iterator[Server]:
    started = Server(tmp_path / "log")
    try:
        yield started
    finally:
        started.end()


def test_a_replica_is_killed_under_load_and_replaced_and_a_deleted_application_drains(server: Server) -> None:
    before = server.engines
    assert len(before) == 2
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(16) as clients:
        streams = [clients.submit(server.stream, 200, begun) for _ in range(16)]
        for _ in streams:
            begun.acquire()
        victim = next(iter(before.values()))
        replica = victim.parent()
        assert replica is not None
        replica.kill()  # its engine ends by itself
        assert {stream.result() for stream in streams} <= {"done", "error"}

    _wait(server, lambda: victim.pid not in server.engines and len(server.engines) == 2)
    _wait(server, lambda: " is there" in server.log)
    with ThreadPoolExecutor(8) as clients:
        assert {*clients.map(lambda _: server.stream(8, begun), range(8))} == {"done"}

    address = re.search(r"Ray \S+ at (\S+)", server.log)
    assert address is not None
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as clients:
        streams = [clients.submit(server.stream, 200, begun) for _ in range(8)]
        for _ in streams:
            begun.acquire()
        deleting = subprocess.run([*COMMAND, "delete", "--ray-address", address[1]], check=False)
        assert {stream.result() for stream in streams} == {"done"}
    assert deleting.returncode == 0
    assert server.engines == {}
    refused = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a"}, timeout=GIVE_UP_S)
    assert refused.status_code == 503
    children = server.children
    assert server.stop() == 0
    assert psutil.wait_procs(children, timeout=GIVE_UP_S)[1] == []


def test_servers_that_ray_serve_places_answer_through_its_proxies(tmp_path: Path, of_ray: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = Server(tmp_path / "log", replicas=1, flags=["--ray-servers", "2", "--port", str(port)])
    try:
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(8) as clients:
            assert {*clients.map(lambda _: server.stream(8, begun), range(8))} == {"done"}
        assert httpx.get(f"{server.url}/v1/models", timeout=GIVE_UP_S).json()["data"][0]["id"] == "tiny"
        assert server.stop() == 0
    finally:
        server.end()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _wait(server: Server, is_so: Callable[[], bool]) -> None:
    while not is_so():
        assert server.process.poll() is None, server.log  # the watchdog ends what would never come
        time.sleep(0.1)
