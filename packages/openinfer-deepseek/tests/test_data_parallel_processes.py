"""Data-parallel ranks that are processes: of this machine, or of another node that joins over TCP."""

import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_rank import check_a_killed_rank

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_deepseek import DeepseekV2
from openinfer_deepseek.family import DeepseekV2Definition
from openinfer_engine.data_parallel.loop import DataParallelLoop
from openinfer_engine.engine_plan import resolve
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.launch import build_engine_loop
from openinfer_engine.options import EngineOptions, LoopHost
from openinfer_engine.testing import check_launched
from openinfer_engine.testing.answers import Answer, run_at_once
from openinfer_engine.worker.process_group import ProcessGroup, start_workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks that are processes need a POSIX system")
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_step_tokens": 64, "block_size_tokens": 8, "num_blocks": 200}
MODEL_DIR = Path(__file__).parent / "fixtures" / "groups"
WAIT_S = 120


def start(model_dir: Path, ranks: int, **options: Any) -> tuple[DataParallelLoop, ProcessGroup | None]:
    """As an engine's process makes it."""
    asked = EngineOptions(**{**SIZES, "data_parallel_size": ranks, **options})
    processes = start_workers(EngineSpec.of(DeepseekV2Definition(), model_dir, asked), asked)
    placement = None if processes is None else processes.placement
    loop = build_engine_loop(resolve(DeepseekV2Definition(), model_dir, asked, placement=placement), processes)
    assert isinstance(loop, DataParallelLoop)
    return loop, processes


@contextmanager
def starting(ranks: int, **options: Any) -> Generator[tuple[DataParallelLoop, ProcessGroup | None]]:
    loop, processes = start(MODEL_DIR, ranks, **options)
    try:
        yield loop, processes
    finally:
        loop.close()


def request(index: int, *, num_tokens: int, max_tokens: int, **sampling: Any) -> GenerateRequest:
    rng = np.random.default_rng(index)
    return GenerateRequest(
        request_id=RequestId(index),
        prompt_token_ids=tuple(rng.integers(0, 100, num_tokens).tolist()),
        sampling=SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling}),
    )


def uneven() -> list[GenerateRequest]:
    """Long and short, drawn and greedy, some with log-probabilities: ranks run dry at different times."""
    asked = [request(index, num_tokens=5 + 9 * index, max_tokens=1 + 5 * (index % 9)) for index in range(8)]
    asked += [request(index, num_tokens=20, max_tokens=9, temperature=1.0, seed=index) for index in range(8, 11)]
    return [*asked, request(11, num_tokens=30, max_tokens=6, logprobs=2, prompt_logprobs=0)]


def by_threads(asked: Sequence[GenerateRequest], ranks: int = 2, **options: Any) -> dict[int, Answer]:
    with starting(ranks, **options) as (loop, processes):
        assert processes is None
        return run_at_once(loop, asked)


def test_processes_say_what_threads_say_bit_for_bit() -> None:
    """Whole answers, log-probabilities too, with chunks, cached prefixes and a rank without rows at the end."""
    asked = uneven()
    with starting(2, rank_host="process", batch_invariant=True) as (loop, processes):
        assert processes is not None
        assert len(processes.process_ids) == 1
        found = run_at_once(loop, asked)
        assert all(each.stats().generated_tokens for each in loop.loops)
        again = run_at_once(loop, [request(20 + index, num_tokens=5, max_tokens=2) for index in range(2)])
    assert found == by_threads(asked, batch_invariant=True)
    assert len(again) == 2


def test_a_tight_pool_preempts_on_every_rank() -> None:
    asked = [request(index, num_tokens=40, max_tokens=50) for index in range(4)]
    with starting(2, rank_host="process", num_blocks=17) as (loop, _):
        found = run_at_once(loop, asked)
        assert all(each.stats().preemptions for each in loop.loops)
    assert {number: answer.token_ids for number, answer in found.items()} == {
        number: answer.token_ids for number, answer in by_threads(asked).items()
    }


@pytest.mark.parametrize("host", LoopHost)
def test_launched_it_goes_on_as_recorded(host: LoopHost) -> None:
    options = EngineOptions(**SIZES, data_parallel_size=2, rank_host="process", engine_host=host)
    check_launched(DeepseekV2(), MODEL_DIR, options, tolerance=1e-4)


def test_a_rank_that_is_killed_ends_the_engine_with_its_reason() -> None:
    asked = [request(index, num_tokens=10, max_tokens=4000 // 8) for index in range(2)]
    loop, processes = start(MODEL_DIR, 2, rank_host="process", num_blocks=400)
    assert processes is not None
    try:
        check_a_killed_rank(loop, processes, asked)
    finally:
        loop.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_ranks_of_another_node_join_over_tcp_and_say_the_same(tmp_path: Path) -> None:
    port, token = free_port(), tmp_path / "token"
    token.write_text("a secret of the tests")
    program = "import sys; from openinfer_engine.ranks.command import run; sys.exit(run(sys.argv[1:]))"
    arguments = ["--join", f"127.0.0.1:{port}", "--token-file", str(token), "--node", "b", "--ranks", "2"]
    host = f"join=127.0.0.1:{port},token-file={token},node=a,local=2"
    asked = uneven()
    with (
        subprocess.Popen([sys.executable, "-P", "-c", program, *arguments]) as joiner,
        ThreadPoolExecutor(1) as threads,
    ):
        try:
            starts = threads.submit(start, MODEL_DIR, 4, rank_host=host, batch_invariant=True)
            loop, processes = starts.result(WAIT_S)
            assert processes is not None
            assert len(processes.process_ids) == 1  # the others are the other node's
            assert processes.placement.nodes == (0, 0, 1, 1)
            found = run_at_once(loop, asked)
            assert all(each.stats().generated_tokens for each in loop.loops)
            loop.close()
            assert joiner.wait(WAIT_S) == 0
        finally:
            joiner.kill()
    assert found == by_threads(asked, 4, batch_invariant=True)
