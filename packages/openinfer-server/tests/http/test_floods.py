"""A server that may have 256 files open, before 1,100 connections that each hold one in another way.

Its probes are answered all the while, its log stays short, and afterwards it serves as before.
"""

import contextlib
import importlib.util
import json
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from openinfer_core.process.descriptors import open_descriptors, raise_descriptor_limit
from openinfer_server.options import EventLoop
from openinfer_server.testing import DEADLINE_S, wait_until

NUM_CONNECTIONS = 1100
LIMIT = 256
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
STREAM = json.dumps({"prompt": [1] * 400, "max_tokens": 15_000, "stream": True}).encode()
FLOODS = {
    "idle": b"",
    "half heads": b"POST /v1/completions HTTP/1.1\r\nhost: loc",
    "half bodies": HEAD % 1000 + b"{",
    "slow readers": HEAD % len(STREAM) + STREAM,
}


class Flooded:
    """A server's process."""

    def __init__(
        self, model_dir: Path, log: Path, certificate: str = "", event_loop: EventLoop = EventLoop.ASYNCIO
    ) -> None:
        self.log = log
        script = str(Path(__file__).with_name("flooded_server.py"))
        command = [sys.executable, script, str(model_dir), str(LIMIT), event_loop]
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*command, certificate], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self.url = self._line()
        self._context = ssl.create_default_context(cafile=certificate) if certificate else None
        if self._context is not None:
            self._context.check_hostname = False

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.partition("://")[2].rsplit(":", 1)
        return host, int(port)

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=DEADLINE_S, context=self._context) as response:
            return response.read()

    def complete(self) -> dict[str, object]:
        body = json.dumps({"prompt": "stone", "max_tokens": 2}).encode()
        asked = urllib.request.Request(self.url + "/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=DEADLINE_S, context=self._context) as response:
            return json.loads(response.read())

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._line() == "done"

    def end(self) -> None:
        with self._process:
            self._process.terminate()
            try:
                self._process.communicate(timeout=DEADLINE_S)
            finally:
                self._process.kill()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def flooded(model_dir, tmp_path) -> Iterator[Flooded]:
    server = Flooded(model_dir, tmp_path / "log")
    yield server
    server.end()


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may hold the other ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = raise_descriptor_limit() or 0
    if limit < open_descriptors() + NUM_CONNECTIONS + 50:
        pytest.skip(f"this process may have {limit} files open")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_all(server: Flooded, sent: bytes, stack: contextlib.ExitStack) -> None:
    """Connections that have each sent so much, and read nothing; probes come in between."""
    for number in range(NUM_CONNECTIONS):
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(DEADLINE_S)
        connection.connect(server.address)
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        if number % 100 == 99:
            assert b'"ok"' in server.get("/health")


def check_afterwards(server: Flooded) -> None:
    assert server.complete()["object"] == "text_completion"
    assert len(server.log.read_bytes()) < 20_000


@pytest.mark.parametrize("flood", FLOODS)
def test_probes_are_answered_while_connections_are_held(flood, flooded, many_files):
    with contextlib.ExitStack() as stack:
        open_all(flooded, FLOODS[flood], stack)
        for _ in range(5):
            assert b'"ok"' in flooded.get("/health")
            assert b"openinfer_budget_limit" in flooded.get("/metrics")
        if flood in ("idle", "half heads"):  # they hold nothing that a request needs
            assert flooded.complete()["object"] == "text_completion"
    check_afterwards(flooded)


def test_probes_are_answered_while_handshakes_are_held(model_dir, tmp_path, many_files):
    certificate = tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    if shutil.which(command[0]) is None:
        pytest.skip("there is no openssl command to make a certificate with")
    parts = [tmp_path / name for name in ("key", "cert")]
    command += ["-subj", "/CN=localhost", "-keyout", str(parts[0]), "-out", str(parts[1])]
    subprocess.run(command, check=True, capture_output=True)
    certificate.write_text("".join(part.read_text() for part in parts))
    server = Flooded(model_dir, tmp_path / "log", str(certificate))
    try:
        with contextlib.ExitStack() as stack:
            open_all(server, b"\x16\x03\x01\x02\x00\x01", stack)
            assert b"openinfer_budget_limit" in server.get("/metrics")
            assert server.complete()["object"] == "text_completion"
        check_afterwards(server)
    finally:
        server.end()


@pytest.mark.skipif(importlib.util.find_spec("uvloop") is None, reason="uvloop is not installed")
def test_probes_are_answered_by_uvloop_too(model_dir, tmp_path, many_files):
    server = Flooded(model_dir, tmp_path / "log", event_loop=EventLoop.UVLOOP)
    try:
        with contextlib.ExitStack() as stack:
            open_all(server, b"", stack)
            assert b"openinfer_budget_limit" in server.get("/metrics")
            assert server.complete()["object"] == "text_completion"
        check_afterwards(server)
    finally:
        server.end()


def test_server_without_descriptors_says_so_once_and_recovers(flooded):
    def times_said() -> int:
        return flooded.log.read_text().count("no descriptor for a new connection")

    with contextlib.ExitStack() as stack:
        flooded.tell("open 3")
        for _ in range(50):
            stack.enter_context(socket.create_connection(flooded.address, timeout=DEADLINE_S))
        wait_until(lambda: times_said() > 0, "a line of the log")
        flooded.tell("close")
        assert b'"ok"' in flooded.get("/health")
    assert times_said() == 1
    check_afterwards(flooded)
