"""One run of the floor or of the server, before the C client."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from openinfer_bench.frontend.answers import ANSWERS, CHAT_TEMPLATE, Answer
from openinfer_bench.frontend.duties import Duties
from openinfer_bench.frontend.instructions import counting
from openinfer_bench.frontend.stamps import (
    NUM_TOKEN_IDS,
    OPEN_CALL,
    OPEN_CALL_TEXT,
    OPEN_REASONING,
    OPEN_REASONING_TEXT,
    STAMPS,
    StampedOptions,
)
from openinfer_core import EngineClosed

_START_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run."""

    streams: int
    tokens: int
    wall_s: float
    cpu_s: float
    """User and system time of the streaming process."""
    event_bytes: int
    """Bytes per token on the wire, chunk framing included."""
    instructions_per_token: int | None
    """Of the server, user's and kernel's together; None where `perf` cannot count them, and for the floor."""
    lag_p50_ms: float
    lag_p99_ms: float

    @property
    def cpu_s_per_100k(self) -> float:
        """CPU-seconds per 100,000 tokens."""
        return self.cpu_s * 100_000 / self.tokens

    @property
    def tokens_per_s(self) -> float:
        """What the client received."""
        return self.tokens / self.wall_s

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Bench:
    """The compiled programs and the model folder.

    Args:
        folder: an empty folder that lives as long as the benchmark.
        floor: the compiled floor.
        client: the compiled client.
        duties: what the server does beside streaming.
    """

    def __init__(self, folder: Path, *, floor: Path, client: Path, duties: Duties) -> None:
        self._folder = folder
        self._floor = floor
        self._client = client
        self._duties = duties
        self._model_dir = folder / "stamped"
        _write_model(self._model_dir)

    def run_floor(self, *, streams: int, steps: int, step_s: float, event_bytes: int) -> Sample:
        """The C program streams; its CPU time is its own `getrusage`."""
        port_file = self._folder / "port"
        port_file.unlink(missing_ok=True)
        command = [str(self._floor), str(port_file), str(streams), str(steps), str(step_s * 1e6), str(event_bytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as floor:  # noqa: S603
            answer = self._run_client(_wait_for_port(port_file), streams, self._write_request(ANSWERS["text"], steps))
            output, _ = floor.communicate(timeout=_START_DEADLINE_S)
        spent = json.loads(output)
        return _sample(streams, answer, spent["cpu_s"], event_bytes)

    def run_server(self, answer: Answer, *, streams: int, steps: int, step_s: float) -> Sample:
        """The real server streams; its CPU time is that of its process, without the engine's."""
        options = StampedOptions(
            tpot_s=step_s,
            rows_per_step=max(streams, 1),
            num_token_ids=NUM_TOKEN_IDS,
            max_waiting=65536,
            opening_token_id=answer.opening_token_id,
        )
        with self._server(options) as (port, pid), self._duties.while_serving(port):
            warm = self._write_request(answer, 8)
            self._run_client(port, min(streams, 8), warm)  # first requests fill tables
            request = self._write_request(answer, steps)
            with counting(pid) as instructions:
                before_s = _cpu_s(pid)
                told = self._run_client(port, streams, request)
                cpu_s = _cpu_s(pid) - before_s
        event_bytes = round(told["bytes"] / told["tokens"])
        return _sample(streams, told, cpu_s, event_bytes, instructions=instructions.value)

    def _run_client(self, port: int, streams: int, request: Path) -> dict[str, Any]:
        command = [str(self._client), str(port), str(streams), str(request)]
        answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)  # noqa: S603
        if answer["finished"] != streams:
            raise EngineClosed(f"only {answer['finished']} of {streams} streams ended with [DONE]")
        return answer

    def _write_request(self, answer: Answer, steps: int) -> Path:
        path = self._folder / "request"
        path.write_bytes(answer.request(steps, self._duties.headers))
        return path

    @contextlib.contextmanager
    def _server(self, options: StampedOptions) -> Generator[tuple[int, int]]:
        specs = [msgspec.json.encode(each).decode() for each in (options, {"port": 0, **self._duties.options})]
        command = [sys.executable, "-P", "-m", "openinfer_bench.frontend.server", str(self._model_dir), *specs]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603
            try:
                if process.stdout is None or not (line := process.stdout.readline().decode().strip()):
                    raise EngineClosed(f"the server ended with code {process.wait()} before it served")
                yield int(line.rsplit(":", 1)[1]), process.pid
            finally:
                process.terminate()
                process.wait(_START_DEADLINE_S)


def _sample(
    streams: int, answer: dict[str, Any], cpu_s: float, event_bytes: int, *, instructions: int | None = None
) -> Sample:
    return Sample(
        streams=streams,
        tokens=answer["tokens"],
        wall_s=answer["wall_s"],
        cpu_s=cpu_s,
        event_bytes=event_bytes,
        instructions_per_token=None if instructions is None else round(instructions / answer["tokens"]),
        lag_p50_ms=answer["lag_ms"]["p50"],
        lag_p99_ms=answer["lag_ms"]["p99"],
    )


def _cpu_s(pid: int) -> float:
    """User and system time of a process and its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_for_port(port_file: Path) -> int:
    deadline_s = time.monotonic() + _START_DEADLINE_S
    while time.monotonic() < deadline_s:
        if port_file.exists() and (text := port_file.read_text()).endswith("\n"):
            return int(text)
        time.sleep(0.01)
    raise EngineClosed("the floor did not start")


def _write_model(folder: Path) -> None:
    """A folder with a tokenizer whose token `i` reads as a space and four digits."""
    vocab = {f"\u0120{i:04d}": i for i in range(STAMPS)}
    model: dict[str, Any] = {"type": "BPE", "vocab": vocab, "merges": [], "fuse_unk": False, "byte_fallback": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    folder.mkdir()
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [_added(OPEN_CALL, OPEN_CALL_TEXT), _added(OPEN_REASONING, OPEN_REASONING_TEXT)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": model | {"ignore_merges": True},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "config.json").write_text("{}")


def _added(token_id: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": text, **flags}
