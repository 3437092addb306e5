"""What a server in use does beside streaming: it asks for keys, makes traces and is asked for its metrics."""

import contextlib
import http.client
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openinfer_core import EngineClosed

DUTIES = {
    "keys": "an API key is asked for and shown",
    "traces": "OpenTelemetry spans of all requests are made and sent to a collector in another process",
    "metrics": "/metrics is read every second",
}
_KEY = "a-key-of-the-benchmark"
_SCRAPE_S = 1.0
_COLLECTOR = "openinfer_bench.frontend.collector"


@dataclass(slots=True)
class Duties:
    """Those of one server.

    Attributes:
        options: fields of `ServerOptions`.
        headers: lines of a request's head.
    """

    scraped: bool
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    headers: str = ""

    @contextlib.contextmanager
    def while_serving(self, port: int) -> Generator[None]:
        """Does what is done from outside until the context is left."""
        if not self.scraped:
            yield
            return
        ended = threading.Event()
        scraper = threading.Thread(target=_scrape, args=(port, ended), name="openinfer-bench-scrape", daemon=True)
        scraper.start()
        try:
            yield
        finally:
            ended.set()
            scraper.join()


@contextlib.contextmanager
def duties(names: Sequence[str], folder: Path) -> Generator[Duties]:
    """Prepares what a server with these duties needs.

    Args:
        names: of `DUTIES`.
        folder: an empty one.
    """
    asked = Duties(scraped="metrics" in names)
    with contextlib.ExitStack() as stack:
        if "keys" in names:
            keys = folder / "keys.toml"
            keys.touch(mode=0o600)
            keys.write_text(f'[[keys]]\ntenant = "bench"\nkey = "{_KEY}"\n')
            asked.options["api_keys_file"] = str(keys)
            asked.headers = f"authorization: Bearer {_KEY}\r\n"
        if "traces" in names:
            asked.options["otlp_traces_endpoint"] = stack.enter_context(_collector())
        yield asked


@contextlib.contextmanager
def _collector() -> Generator[str]:
    command = [sys.executable, "-P", "-m", _COLLECTOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            url = process.stdout.readline().strip() if process.stdout is not None else ""
            if not url:
                raise EngineClosed("the collector of the benchmark did not start")
            yield url
        finally:
            process.terminate()


def _scrape(port: int, ended: threading.Event) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        while not ended.wait(_SCRAPE_S):
            connection.request("GET", "/metrics")
            connection.getresponse().read()
