"""`CudaWorker` with several block tables, in host memory: the script that `test_windowed_worker.py` runs."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import emulated_cuda
import numpy as np

emulated_cuda.install()

# ruff: noqa: E402 - CuPy's stand-in first
from openinfer_engine import SoloCommunicator
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.cuda.worker import CudaWorker
from openinfer_engine.testing.windowed_steps import SeenModel, WindowedSteps, windowed_layout
from openinfer_engine.worker.paged_tensors import make_pool
from openinfer_kernels import Array
from openinfer_kernels.cpu import BatchInvariantCpuOps
from openinfer_kernels.cuda.common import graphs
from openinfer_kv_cache import KvDtype

VOCAB, BLOCK, NUM_SLOTS, MAX_MODEL_TOKENS, NUM_BLOCKS = 97, 4, 5, 100, 300
MAX_TOKENS = 20


class OnDevice(SeenModel):
    """Answers in arrays that have addresses."""

    def forward(self, token_ids: Array, **given: Any) -> Array:
        return emulated_cuda.array(super().forward(token_ids, **given))

    def logits(self, hidden: Array) -> Array:
        return emulated_cuda.array(super().logits(hidden))


def check(kernels: emulated_cuda.Kernels, windows: tuple[int | None, ...], *, capture: bool) -> None:
    """Sequences whose blocks others get once the windows have left them are answered as from their tokens alone."""
    layout = windowed_layout(windows, dtype=KvDtype.FLOAT32, block_tokens=BLOCK)
    ops = emulated_cuda.emulated_ops(BatchInvariantCpuOps(), kernels)
    pool = make_pool(layout, num_blocks=NUM_BLOCKS, ops=ops)
    pool.blocks.fill(np.nan)
    limits = WorkerLimits(
        max_num_seqs=NUM_SLOTS,
        max_model_tokens=MAX_MODEL_TOKENS,
        block_size_tokens=BLOCK,
        num_tables=layout.num_tables,
        num_token_ids=VOCAB,
        vocab_size=VOCAB,
    )
    model = OnDevice(np, windows, vocab_size=VOCAB)
    worker = CudaWorker(model, kv_pool=pool, ops=ops, communicator=SoloCommunicator(), limits=limits)
    if capture:
        worker.warm_up(capture=True, mark=lambda _: None)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB, size).tolist() for size in (1, 40, 70, 3, 64, 17, 33)]
    steps = WindowedSteps(worker, pool, table_windows=layout.table_windows, block_tokens=BLOCK)
    answers = steps.run(prompts, max_tokens=MAX_TOKENS, max_num_seqs=NUM_SLOTS)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(prompt)
        for _ in range(MAX_TOKENS):
            tokens.append(model.right_token(tokens))
        assert answer.token_ids == tokens[len(prompt) :], (windows, capture)


if __name__ == "__main__":
    graphs.Stream.capture = emulated_cuda.capture
    with tempfile.TemporaryDirectory() as folder:
        kernels = emulated_cuda.Kernels(Path(folder))
        for windows in ((None, 9), (7,), (None, 30, 4, None)):
            for capture in (False, True):
                check(kernels, windows, capture=capture)
    sys.stdout.write("equal\n")
