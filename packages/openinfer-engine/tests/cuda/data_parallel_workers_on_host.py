"""Data-parallel ranks whose `CudaWorker`s run in host memory: the script that `test_data_parallel_workers.py` runs."""

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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

VOCAB, RANKS, MAX_MODEL_TOKENS = 97, 2, 112
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
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128)


class SharedPaddedModel(PaddedModel):
    """A model of the CPU without the rows that are padding, in a step that has as many places all the same."""

    def __init__(self, model: Model, communicator: DataParallelCommunicator, sizes: Counter[int]) -> None:
        super().__init__(model, num_token_ids=VOCAB, hidden_size=CONFIG["hidden_size"])
        self._shared, self._joining, self._sizes = communicator, model, sizes

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        counts = list(self._shared.counts)
        if len(set(counts)) == 1 and counts[0] == len(token_ids):
            self._sizes[len(token_ids)] += 1  # padded, or every rank has so many
        rows = np.flatnonzero((np.diff(batch.query_starts) > 0) & (batch.context_lens > 0))
        counts[self._shared.data_parallel_rank] = int(batch.query_starts[rows[-1] + 1]) if len(rows) else 0
        # The places stay those of the graph: the other rank has so many, as it is told here.
        counts[1 - self._shared.data_parallel_rank] = max(self._shared.counts)
        self._shared.begin_step(counts)
        if not len(rows):
            self.join_step()
        return super().forward(token_ids, batch=batch, kv_cache=kv_cache)

    def join_step(self) -> None:
        model: Any = self._joining
        model.join_step()


class EmulatedBackend(CpuBackend):
    """A CPU's, but for the workers."""

    def __init__(self, options: EngineOptions, kernels: emulated_cuda.Kernels, *, capture: bool) -> None:
        super().__init__(options)
        self.sizes = Counter[int]()
        self._kernels, self._capture = kernels, capture

    def make_ops(self) -> Ops:
        return emulated_cuda.emulated_ops(BatchInvariantCpuOps(), self._kernels)

    def make_worker(self, model: Model, **given: Any) -> Any:
        ops, communicator = given["ops"], given["communicator"]
        worker = CudaWorker(
            SharedPaddedModel(model, communicator, self.sizes),
            kv_pool=make_pool(given["layout"], num_blocks=given["num_blocks"], ops=ops),
            ops=ops,
            communicator=communicator,
            limits=given["limits"],
        )
        if self._capture:
            worker.warm_up(capture=True, mark=lambda _: None)
        self.sizes.clear()
        return worker


@contextlib.contextmanager
def serving(
    folder: Path, kernels: emulated_cuda.Kernels, *, capture: bool | None, **options: Any
) -> Iterator[tuple[DataParallelLoop, Counter[int]]]:
    """An engine, and how often a forward pass had how many rows; `capture` None: a CPU's."""
    chosen = EngineOptions(
        load_format=LoadFormat.DUMMY,
        batch_invariant=True,
        data_parallel_size=RANKS,
        **{"max_num_seqs": 5, "num_blocks": 100, "block_size_tokens": 4, "max_step_tokens": 40, **options},
    )
    definition: Any = find_plugin("openinfer.models", "deepseek_v2").load()().definition
    emulated = EmulatedBackend(chosen, kernels, capture=bool(capture))
    backend = CpuBackend(chosen) if capture is None else emulated
    loop = build_data_parallel_loop(resolve(definition, folder, chosen, backend=backend))
    try:
        yield loop, emulated.sizes
    finally:
        loop.close()


def requests(count: int) -> list[GenerateRequest]:
    rng = np.random.default_rng(4)
    return [
        GenerateRequest(
            request_id=RequestId(i),
            prompt_token_ids=tuple(rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist()),
            sampling=SamplingParams(
                max_tokens=int(rng.integers(1, 30)),
                temperature=float(i % 3 > 1),
                seed=i,
                logprobs=1 if i % 2 else None,
                prompt_logprobs=0 if i % 4 == 0 else None,
            ),
        )
        for i in range(count)
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


def check(folder: Path, kernels: emulated_cuda.Kernels) -> None:
    """At once, alone, in random traffic, and with a pool that preempts: what ranks on a CPU say."""
    asked = requests(14)
    ways: Sequence[Any] = (
        lambda loop: run_at_once(loop, asked),
        lambda loop: run_at_once(loop, asked[:1]),  # the other rank has no rows in any step
        lambda loop: run_together(loop, asked, seed=7),
    )
    for index, run in enumerate(ways):
        for options in ({}, {"num_blocks": 30}):
            with serving(folder, kernels, capture=None, **options) as (loop, _):
                right = said(run(loop))
            for capture in (False, True):
                with serving(folder, kernels, capture=capture, **options) as (loop, sizes):
                    found = said(run(loop))
                assert found == right, (index, options, capture)
                if capture:
                    assert sizes, "no step was replayed"
                    assert set(sizes) <= set(BUCKETS), sizes


if __name__ == "__main__":
    graphs.Stream.capture = emulated_cuda.capture
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        check(folder, emulated_cuda.Kernels(folder))
    sys.stdout.write("equal\n")
