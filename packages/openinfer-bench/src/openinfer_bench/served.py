"""Our server in a process of its own, for benchmarks: started, waited for, ended."""

import contextlib
import http.client
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from openinfer.start_report import StartReport
from openinfer_bench.http_client import unverified
from openinfer_core import EngineClosed

OPENINFER = (sys.executable, "-P", "-m", "openinfer.commands.main")
_END_S = 60.0
_ADDRESS = re.compile(r" on (?P<scheme>https?)://\S+:(?P<port>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running server."""

    host: str
    port: int
    pid: int
    ready_s: float
    """From starting the process until `/ready` answered 200."""
    report: StartReport
    """The phases of its start, as it measured them itself."""


@contextlib.contextmanager
def served(
    flags: Sequence[str],
    *,
    command: Sequence[str] = OPENINFER,
    max_open_files: int | None = None,
    log: IO[bytes] | None = None,
) -> Generator[Served]:
    """`openinfer serve FLAGS` on a free port; drained and ended at the end.

    Args:
        flags: of `serve`.
        command: another installation's `openinfer`.
        max_open_files: what `ulimit -n` is for it.
        log: takes its standard error; by default it is this process's.

    Raises:
        EngineClosed: it ended before it served; why stands in its log, on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="openinfer-bench-") as folder:
        report = Path(folder) / "start.json"
        limited = () if max_open_files is None else ("sh", "-c", f'ulimit -n {max_open_files}; exec "$0" "$@"')
        command = [*limited, *command, "serve", *flags]
        command += ["--host", "127.0.0.1", "--port", "0", "--start-report", str(report)]
        began_s = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:  # noqa: S603
            try:
                line = process.stdout.readline().strip() if process.stdout is not None else ""
                if not (told := _ADDRESS.search(line)):
                    raise EngineClosed(f"the server ended with code {process.wait()} before it served")
                scheme, port = told["scheme"], int(told["port"])
                _require_ready(port, is_tls=scheme == "https")
                yield Served(
                    host="127.0.0.1",
                    port=port,
                    pid=process.pid,
                    ready_s=time.monotonic() - began_s,
                    report=msgspec.json.decode(report.read_bytes(), type=StartReport),
                )
            finally:
                process.terminate()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _require_ready(port: int, *, is_tls: bool) -> None:
    if is_tls:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=_END_S, context=unverified())
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_END_S)
    with contextlib.closing(connection):
        connection.request("GET", "/ready")
        status = connection.getresponse().status
    if status != 200:
        raise EngineClosed(f"the server says it serves, and /ready answers {status}")
