"""Engines whose ranks join over TCP, for tests; run as a program it is what `openinfer rank` is.

The engine's start waits for its ranks, and ranks for their engine, so each is begun in a thread or process of its own.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from openinfer_core import Failed, GenerateRequest, RequestId, SamplingParams, TokenEvent, Tokens, find_plugin
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.ranks.command import run as run_command
from openinfer_engine.worker.process_group import start_workers

FAMILY: Any = find_plugin("openinfer.models", "qwen3").load()()
MODEL_DIR: Path = find_plugin("openinfer.checkpoints", "tiny").load()()
WAIT_S = 120


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]


def make_token(folder: Path, name: str = "token") -> Path:
    path = folder / name
    path.write_text(f"a secret of the tests, {name}")
    return path


def options_of(rank_host: str | None, ranks: int, **options: Any) -> EngineOptions:
    defaults: dict[str, Any] = {"num_blocks": 40, "max_num_seqs": 4, "max_step_tokens": 32}
    return EngineOptions(**(defaults | options), tensor_parallel_size=ranks, rank_host=rank_host)


def make_loop(rank_host: str | None, ranks: int, model_dir: Path = MODEL_DIR, **options: Any) -> StepLoop:
    """As an engine's process makes it."""
    given = options_of(rank_host, ranks, **options)
    processes = start_workers(EngineSpec.of(FAMILY.definition, model_dir, given), given)
    try:
        placement = None if processes is None else processes.placement
        engine_plan = resolve(FAMILY.definition, model_dir, given, placement=placement)
    except BaseException:
        if processes is not None:
            processes.close(deadline_s=0)
        raise
    return build_loop(engine_plan, processes)


@contextlib.contextmanager
def starting(rank_host: str | None, ranks: int, **options: Any) -> Generator["Future[StepLoop]"]:
    """An engine that starts while its ranks do; it is closed at the end, if it has come to be."""
    with ThreadPoolExecutor(1) as threads:
        loop = threads.submit(make_loop, rank_host, ranks, **options)
        yield loop
        if loop.exception(WAIT_S) is None:
            loop.result().close()


def copy_of_model(folder: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, folder / "another-path", ignore=shutil.ignore_patterns("__pycache__")))


class Joiner:
    """`openinfer rank` in a process of its own, with its output.

    Args:
        arguments: of the command.
        within: a command that runs another one: `ip netns exec NAME`.
    """

    def __init__(self, *arguments: str, within: Sequence[str] = ()) -> None:
        command = [*within, sys.executable, "-P", __file__, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self._lines.extend(lines)

    def wait(self) -> tuple[int, str]:
        """Its exit code and all that it and its ranks said."""
        code = self.process.wait(WAIT_S)
        self._reading.join(WAIT_S)
        return code, "".join(self._lines)

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(each) for each in path.read_text().split()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *further: object) -> None:
        for process_id in self.ranks() if self.process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self._reading.join(WAIT_S)


def make_request(index: int, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **sampling})
    prompt = tuple((7 * index + 3 * place) % 250 for place in range(5 + 9 * index))
    return GenerateRequest(request_id=RequestId(index), prompt_token_ids=prompt, sampling=params)


REQUESTS = [
    make_request(0, logprobs=2),
    make_request(1, temperature=0.8, seed=5),
    make_request(2, prompt_logprobs=0),
    make_request(3, temperature=1.0, seed=1, max_tokens=20),
]


def tokens_of(loop: StepLoop, requests: Sequence[GenerateRequest] = REQUESTS) -> dict[int, list[TokenEvent]]:
    """What the engine answers, whole events: ids and log-probabilities, bit for bit; the loop is not closed."""
    said: dict[int, list[TokenEvent]] = {request.request_id: [] for request in requests}
    events = [event for request in requests for event in loop.submit(request)]
    while loop.busy:
        events += loop.step()
    for event in events:
        assert not isinstance(event, Failed), event
        if isinstance(event, Tokens):
            said[event.request_id].append(event)
    return said


if __name__ == "__main__":
    raise SystemExit(run_command(sys.argv[1:]))
