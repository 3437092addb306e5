"""A server of the tiny model in processes of its own, and clients that stream from it."""

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from openinfer.models import find_model_dir

OPERATOR, USER = "operator-0123456789", "user-0123456789abcd"
DEADLINE_S = 300.0
"""Of whatever is waited for: no test's outcome depends on it."""


class Served:
    """`openinfer serve`, with a key for an operator and one for a user.

    Args:
        folder: for its key file, and for a copy of the model, which a test may change.
        flags: of `openinfer serve`.
    """

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self.model_dir = folder / "model"
        shutil.copytree(find_model_dir("tiny"), self.model_dir)
        keys = folder / "keys.toml"
        keys.touch(mode=0o600)
        keys.write_text(
            f'[[keys]]\ntenant = "o"\nlevel = "admin"\nkey = "{OPERATOR}"\n[[keys]]\ntenant = "u"\nkey = "{USER}"\n'
        )
        command = [sys.executable, "-m", "openinfer.commands.main", "serve", str(self.model_dir), "--port", "0"]
        command += ["--api-keys-file", str(keys), "--grammar-compiler", "none", "--model-name", "tiny", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert " on http://" in said, said
        self.address = said.split(" on http://")[1].split(" ")[0]

    def ask(self, method: str, path: str, body: object = None, *, key: str = OPERATOR) -> tuple[int, Any]:
        """Over a connection of its own, which any API worker may take."""
        status, _, answer = self.ask_whole(method, path, body, key=key)
        return status, answer

    def ask_whole(
        self, method: str, path: str, body: object = None, *, key: str = OPERATOR, padding: int = 0
    ) -> tuple[int, dict[str, str], Any]:
        """The same, with the response's headers; so much white space makes a large request of the body."""
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=DEADLINE_S)) as connection:
            headers = {"x-api-key": key, "content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body) + " " * padding, headers)
            response = connection.getresponse()
            data = response.read()
            is_json = "json" in (response.getheader("content-type") or "")
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, headers, json.loads(data) if is_json else data.decode()

    def complete(self, prompt: str = "The capital of France", **fields: object) -> tuple[int, Any]:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return self.ask("POST", "/v1/completions", body, key=USER)

    def said(self, prompt: str = "The capital of France", **fields: object) -> str:
        status, answer = self.complete(prompt, **fields)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    def process_of(self, module: str) -> int:
        """The first process that runs this module."""
        return next(pid for pid, command in self.processes() if f"-m {module} " in command)

    def metrics(self) -> dict[str, float]:
        """By name, summed over labels."""
        found: dict[str, float] = {}
        for line in self.ask("GET", "/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
        return found

    def processes(self) -> list[tuple[int, str]]:
        """All below the server's, with their command lines."""
        found: list[tuple[int, str]] = []
        left = [self.process.pid]
        while left:
            pid = left.pop()
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                for child in map(int, children.read_text().split()):
                    left.append(child)
                    found.append((child, Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()))
        return found

    def end(self) -> int:
        self.process.terminate()
        code = self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Stream:
    """A completion that is read by a thread, piece by piece."""

    def __init__(self, served: Served, **fields: object) -> None:
        self.status = 0
        self.text = ""
        self.finish_reason: str | None = None
        self.error: object = None
        self.is_whole = False
        self.has_begun = threading.Event()
        self._connection = http.client.HTTPConnection(served.address, timeout=DEADLINE_S)
        self._body = {"prompt": "Once", "temperature": 0, "ignore_eos": True, "stream": True, **fields}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        headers = {"x-api-key": USER, "content-type": "application/json"}
        try:
            with contextlib.closing(self._connection):
                self._connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
                response = self._connection.getresponse()
                self.status = response.status
                if response.status != 200:
                    self.error = json.loads(response.read())
                    return
                for line in response:
                    self._take(line)
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            self.has_begun.set()

    def _take(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        if line.strip() == b"data: [DONE]":
            self.is_whole = True
            return
        event = json.loads(line[6:])
        self.error = event.get("error", self.error)
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.has_begun.set()

    def begun(self) -> "Stream":
        """After its first piece."""
        assert self.has_begun.wait(DEADLINE_S)
        return self

    def leave(self) -> None:
        """As a client whose process ends."""
        assert self._connection.sock is not None
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self.end()

    def end(self) -> "Stream":
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self


def wait_until(holds: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < until_s, f"waited in vain for {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """Ends with the server, which must end by itself."""
    served = Served(folder, flags)
    try:
        yield served
        assert served.end() == 0
    finally:
        served.process.kill()
        served.process.wait()
