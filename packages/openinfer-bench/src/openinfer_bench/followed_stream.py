"""Another client's stream, followed by a process of its own: what the measuring client does makes no gap in it.

    python -m openinfer_bench.followed_stream URL

Asks for a stream without an end, says "begun" at its first token, and follows it until standard input ends. For each
line there it prints the seconds between the tokens since the last one, as JSON: few at a time, which takes no time.
"""

import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import IO, cast

import msgspec

from openinfer_bench.http_client import Address
from openinfer_core import EngineClosed

_READ_BYTES = 2**16


@contextmanager
def followed_stream(address: Address) -> Generator[Callable[[], list[float]]]:
    """Follows a stream of a server without TLS meanwhile; what it gives tells the gaps since it was last asked.

    Raises:
        EngineClosed: the server sent no token.
    """
    command = [sys.executable, "-m", "openinfer_bench.followed_stream", address.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        asked, told = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)

        def gaps() -> list[float]:
            asked.write("\n")
            asked.flush()
            return msgspec.json.decode(told.readline(), type=list[float])

        try:
            if told.readline() != "begun\n":
                raise EngineClosed("the stream next to the sessions has no token")
            yield gaps
        finally:
            process.kill()


def main() -> int:
    """Follows one; see the module."""
    address = Address.of(sys.argv[1])
    body = json.dumps({"model": "simulated", "prompt": [1], "max_tokens": 500_000, "stream": True, "ignore_eos": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    gaps: list[float] = []
    before_s: float | None = None
    line = b""
    with socket.create_connection((address.host, address.port)) as stream, selectors.DefaultSelector() as ready:
        stream.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        ready.register(stream, selectors.EVENT_READ)
        ready.register(sys.stdin, selectors.EVENT_READ)
        while True:
            found = {key.fileobj for key, _ in ready.select()}
            if sys.stdin in found:
                if not sys.stdin.readline():
                    return 0
                _say(json.dumps(gaps))
                gaps.clear()
            if stream not in found:
                continue
            data = stream.recv(_READ_BYTES)
            if not data:
                return 1
            now_s = time.monotonic()
            *lines, line = (line + data).split(b"\n")
            for _ in filter(_is_token, lines):  # several that come together have no gap between them
                if before_s is None:
                    _say("begun")
                else:
                    gaps.append(now_s - before_s)
                before_s = now_s


def _is_token(line: bytes) -> bool:
    return line.startswith(b"data: {")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
