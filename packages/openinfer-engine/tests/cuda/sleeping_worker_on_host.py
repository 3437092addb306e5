"""`CudaWorker` that sleeps and changes its weights, in host memory: the script that `test_sleeping_worker.py` runs."""

import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import emulated_cuda
import numpy as np

emulated_cuda.install()

# ruff: noqa: E402 - CuPy's stand-in first
from openinfer_core import Refused
from openinfer_core.errors import ContractViolation
from openinfer_engine import SoloCommunicator
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.cuda.worker import CudaWorker
from openinfer_engine.testing.windowed_steps import SeenModel, WindowedSteps, windowed_layout
from openinfer_engine.worker.paged_tensors import KvPool, make_pool
from openinfer_kernels import Array, DeviceMemoryStateError, OutOfDeviceMemoryError
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


class Memory:
    """In the place of `MappedMemory`: what it is told, and a pool that holds nothing of use after a sleep."""

    def __init__(self, pool: KvPool) -> None:
        self.told: list[str] = []
        self.fails: BaseException | None = None
        self._pool = pool

    def scratch_pool(self) -> None:
        self.told.append("scratch")

    def drop_weights(self) -> None:
        self.told.append("drop")

    def check_weights(self) -> None:
        self._note("check")

    def keep_weights(self) -> None:
        self._note("keep")

    def give_back(self) -> None:
        self.told.append("give back")
        self._pool.blocks.fill(np.nan)

    def take_back(self) -> None:
        self._note("take back")
        self._pool.blocks.fill(0)

    def close(self) -> None:
        self.told.append("close")

    def _note(self, name: str) -> None:
        self.told.append(name)
        if self.fails is not None:
            raise self.fails


class Sleeping:
    """A worker with its memory, and sequences that it answers."""

    def __init__(self, kernels: emulated_cuda.Kernels) -> None:
        self.layout = windowed_layout((None,), dtype=KvDtype.FLOAT32, block_tokens=BLOCK)
        ops = emulated_cuda.emulated_ops(BatchInvariantCpuOps(), kernels)
        self.pool = make_pool(self.layout, num_blocks=NUM_BLOCKS, ops=ops)
        self.memory: Any = Memory(self.pool)
        limits = WorkerLimits(
            max_num_seqs=NUM_SLOTS,
            max_model_tokens=MAX_MODEL_TOKENS,
            block_size_tokens=BLOCK,
            num_tables=self.layout.num_tables,
            num_token_ids=VOCAB,
            vocab_size=VOCAB,
        )
        self.model = OnDevice(np, (None,), vocab_size=VOCAB)
        self.worker = CudaWorker(
            self.model,
            kv_pool=self.pool,
            ops=ops,
            communicator=SoloCommunicator(),
            limits=limits,
            sleeping_memory=self.memory,
        )
        self.worker.warm_up(capture=True, mark=lambda _: None)

    def check_answers(self) -> None:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(1, VOCAB, size).tolist() for size in (1, 40, 70, 3, 33)]
        steps = WindowedSteps(self.worker, self.pool, table_windows=(None,), block_tokens=BLOCK)
        answers = steps.run(prompts, max_tokens=MAX_TOKENS, max_num_seqs=NUM_SLOTS)
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = list(prompt)
            for _ in range(MAX_TOKENS):
                tokens.append(self.model.right_token(tokens))
            assert answer.token_ids == tokens[len(prompt) :]


def raises(error: type[BaseException], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except error as found:
        assert text in str(found), found  # noqa: PT017 - a script
        return
    raise AssertionError(f"{error.__name__} was not raised")


def main(kernels: emulated_cuda.Kernels) -> None:
    one = Sleeping(kernels)
    worker, memory = one.worker, one.memory
    one.check_answers()
    worker.keep_weights()
    worker.give_back()
    worker.take_back()
    one.check_answers()
    assert memory.told == ["scratch", "keep", "give back", "take back"], memory.told
    memory.told.clear()
    worker.drop_model()
    raises(ContractViolation, "no weights", one.check_answers)
    memory.fails = DeviceMemoryStateError("array 3")
    raises(DeviceMemoryStateError, "array 3", lambda: worker.put_model(one.model, None))
    raises(ContractViolation, "no weights", one.check_answers)
    memory.fails = None
    worker.put_model(one.model, None)
    one.check_answers()
    assert memory.told == ["drop", "check", "check"], memory.told
    memory.fails = MemoryError("70 GiB")
    raises(Refused, "level 2", worker.keep_weights)
    memory.fails = OutOfDeviceMemoryError("the GPU has no 5 GiB")
    raises(Refused, "other processes hold", worker.take_back)
    memory.told.clear()
    with suppress(NotImplementedError):
        worker.close()
    assert memory.told == ["close"]


if __name__ == "__main__":
    graphs.Stream.capture = emulated_cuda.capture
    with tempfile.TemporaryDirectory() as folder:
        main(emulated_cuda.Kernels(Path(folder)))
    sys.stdout.write("equal\n")
