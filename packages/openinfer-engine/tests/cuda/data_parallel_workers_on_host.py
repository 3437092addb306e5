"""Data-parallel ranks whose `CudaWorker`s run in host memory: the script that `test_data_parallel_workers.py` runs."""

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import emulated_cuda
import numpy as np
from drafted_worker_on_host import PaddedModel

from openinfer_core import GenerateRequest, RequestId, SamplingParams, find_plugin
from openinfer_engine.cpu.backend import CpuBackend
from openinfer_engine.cuda.worker import CudaWorker
from openinfer_engine.data_parallel.launch import build_data_parallel_loop
from openinfer_engine.data_parallel.loop import DataParallelLoop
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.engine_plan import resolve
from openinfer_engine.model import KvLayers, Model
from openinfer_engine.options import EngineOptions, LoadFormat
from openinfer_engine.testing.answers import Answer, run_at_once, run_together
from openinfer_engine.worker.paged_tensors import make_pool
from openinfer_kernels import Array, AttentionBatch, Ops
from openinfer_kernels.cpu import BatchInvariantCpuOps
from openinfer_kernels.cuda.common import graphs

VOCAB, RANKS, MAX_MODEL_TOKENS, BLOCK = 97, 2, 112, 4
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "max_position_embeddings": MAX_MODEL_TOKENS,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "v_head_dim": 8,
    "vocab_size": VOCAB,
}
RANDOM_TRAFFIC = 2
"""The way that aborts requests, of which some tokens are computed for nothing."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128)


class Seen(NamedTuple):
    """What forward passes had."""

    sizes: Counter[int]
    """How often so many rows, padding among them."""
    tokens: Counter[int]
    """Of each rank, without padding."""


class SharedPaddedModel(PaddedModel):
    """A model of the CPU without the rows that are padding, in a step that has as many places all the same."""

    def __init__(self, model: Model, communicator: DataParallelCommunicator, seen: "Seen") -> None:
        super().__init__(model, num_token_ids=VOCAB, hidden_size=CONFIG["hidden_size"])
        self._shared, self._joining, self._seen = communicator, model, seen

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        counts = list(self._shared.counts)
        if len(set(counts)) == 1 and counts[0] == len(token_ids):
            self._seen.sizes[len(token_ids)] += 1  # padded, or every rank has so many
        rows = np.flatnonzero((np.diff(batch.query_starts) > 0) & (batch.context_lens > 0))
        rank, num_tokens = self._shared.data_parallel_rank, int(batch.query_starts[rows[-1] + 1]) if len(rows) else 0
        counts[rank] = num_tokens
        self._seen.tokens[rank] += num_tokens
        # The places stay those of the graph: the other rank has so many, as it is told here.
        counts[1 - rank] = max(self._shared.counts)
        self._shared.begin_step(counts)
        if not len(rows):
            self.join_step()
        return super().forward(token_ids, batch=batch, kv_cache=kv_cache)

    def forward_last_tokens(self, *_: Any, **__: Any) -> Array:
        raise AssertionError("the other rank does not know how many rows a last layer of chosen tokens has")

    def join_step(self) -> None:
        model: Any = self._joining
        model.join_step()


class EmulatedBackend(CpuBackend):
    """A CPU's, but for the workers."""

    def __init__(self, options: EngineOptions, kernels: emulated_cuda.Kernels, *, capture: bool) -> None:
        super().__init__(options)
        self.seen = Seen(Counter(), Counter())
        self._kernels, self._capture = kernels, capture

    def make_ops(self) -> Ops:
        return emulated_cuda.emulated_ops(BatchInvariantCpuOps(), self._kernels)

    def make_worker(self, model: Model, **given: Any) -> Any:
        ops, communicator = given["ops"], given["communicator"]
        worker = CudaWorker(
            SharedPaddedModel(model, communicator, self.seen),
            kv_pool=make_pool(given["layout"], num_blocks=given["num_blocks"], ops=ops),
            ops=ops,
            communicator=communicator,
            limits=given["limits"],
        )
        if self._capture:
            worker.warm_up(capture=True, mark=lambda _: None)
        return worker


@contextlib.contextmanager
def serving(
    folder: Path, kernels: emulated_cuda.Kernels, *, capture: bool | None, **options: Any
) -> Iterator[tuple[DataParallelLoop, Seen]]:
    """An engine, and what its forward passes had since it started; `capture` None: a CPU's."""
    chosen = EngineOptions(
        load_format=LoadFormat.DUMMY,
        batch_invariant=True,
        data_parallel_size=RANKS,
        **{"max_num_seqs": 5, "num_blocks": 100, "block_size_tokens": BLOCK, "max_step_tokens": 40, **options},
    )
    definition: Any = find_plugin("openinfer.models", "deepseek_v2").load()().definition
    emulated = EmulatedBackend(chosen, kernels, capture=bool(capture))
    backend = CpuBackend(chosen) if capture is None else emulated
    loop = build_data_parallel_loop(resolve(definition, folder, chosen, backend=backend))
    emulated.seen.sizes.clear()
    emulated.seen.tokens.clear()
    try:
        yield loop, emulated.seen
    finally:
        loop.close()


def requests(count: int) -> list[GenerateRequest]:
    """Whose last KV fills a block, which a later turn finds."""
    rng = np.random.default_rng(4)
    lengths = [int(length) for length in rng.integers(1, 60, count)]
    return [
        GenerateRequest(
            request_id=RequestId(i),
            prompt_token_ids=tuple(rng.integers(0, VOCAB, length).tolist()),
            sampling=SamplingParams(
                max_tokens=BLOCK * int(rng.integers(1, 8)) + 1 - length % BLOCK,
                temperature=float(i % 3 > 1),
                seed=i,
                logprobs=1 if i % 2 else None,
                prompt_logprobs=0 if i % 4 == 0 else None,
            ),
        )
        for i, length in enumerate(lengths)
    ]


def said(answers: dict[int, Answer]) -> dict[int, tuple[list[int], list[float], list[float]]]:
    """Tokens, and log-probabilities to six digits: rows that are padded change the order of no sum."""
    return {
        request_id: (
            each.token_ids,
            [round(one.logprob, 5) for one in each.logprobs],
            [round(one.logprob, 5) for one in each.prompt_logprobs],
        )
        for request_id, each in answers.items()
    }


def in_two_turns(loop: DataParallelLoop, asked: Sequence[GenerateRequest]) -> dict[int, Answer]:
    """A second turn finds what the first has left in the cache: a rank that joins steps must write nothing there."""
    first = run_at_once(loop, asked)
    later = [
        GenerateRequest(
            request_id=RequestId(100 + each.request_id),
            prompt_token_ids=(*each.prompt_token_ids, *first[each.request_id].token_ids, 5),
            sampling=SamplingParams(max_tokens=5, temperature=0.0, logprobs=0),
        )
        for each in asked
    ]
    return first | run_at_once(loop, later)


def check(folder: Path, kernels: emulated_cuda.Kernels) -> None:
    """In turns, alone, in random traffic, and with a pool that preempts: what ranks on a CPU say."""
    asked = requests(14)
    ways: Sequence[Any] = (
        lambda loop: in_two_turns(loop, asked),
        lambda loop: run_at_once(loop, asked[:1]),  # the other rank has no rows in any step
        lambda loop: run_together(loop, asked, seed=7),
    )
    for index, run in enumerate(ways):
        for options in ({}, {"num_blocks": 30}):
            with serving(folder, kernels, capture=None, **options) as (loop, _):
                right = said(run(loop))
            for capture in (False, True):
                with serving(folder, kernels, capture=capture, **options) as (loop, seen):
                    found = said(run(loop))
                    stats = loop.stats()
                assert found == right, (index, options, capture)
                if capture:
                    assert seen.sizes, "no step was replayed"
                    assert set(seen.sizes) <= set(BUCKETS), seen
                if not stats.preemptions and index < RANDOM_TRAFFIC:
                    # A request's last token is no input. More inputs would be rows that a rank had in an earlier step.
                    inputs = stats.prompt_tokens + stats.generated_tokens - len(found)
                    assert seen.tokens.total() == inputs, (index, options, capture)


if __name__ == "__main__":
    graphs.Stream.capture = emulated_cuda.capture
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        check(folder, emulated_cuda.Kernels(folder))
    sys.stdout.write("equal\n")
