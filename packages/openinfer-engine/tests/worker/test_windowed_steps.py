"""A worker with several block tables, whose blocks another sequence gets as soon as a window has left them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from openinfer_engine.cpu.worker import CpuWorker, WorkerLimits
from openinfer_engine.distributed.communicator import SoloCommunicator
from openinfer_engine.testing.windowed_steps import SeenModel, WindowedSteps, windowed_layout
from openinfer_engine.worker.paged_tensors import KvPool, make_pool
from openinfer_kernels.cpu import CpuOps
from openinfer_kv_cache import KvDtype

VOCAB, BLOCK, NUM_SLOTS, MAX_MODEL_TOKENS = 97, 4, 3, 120
WINDOWS = (None, 9, 30, 9, None, 4)
MAX_TOKENS = 25


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB, size).tolist() for size in (1, 40, 90, 3, 64, 17, 33)]


def answers(
    *, table_windows: Sequence[int | None] | None = None, num_blocks: int = 260, swap: tuple[int, int] | None = None
) -> list[list[int]]:
    """What a worker with a table for each window says."""
    layout, ops = windowed_layout(WINDOWS, dtype=KvDtype.FLOAT32, block_tokens=BLOCK), CpuOps()
    pool = make_pool(layout, num_blocks=num_blocks, ops=ops)
    pool.blocks.fill(np.nan)
    limits = WorkerLimits(
        max_num_seqs=NUM_SLOTS,
        max_model_tokens=MAX_MODEL_TOKENS,
        block_size_tokens=BLOCK,
        num_tables=layout.num_tables,
        num_token_ids=VOCAB,
        vocab_size=VOCAB,
    )
    worker = CpuWorker(
        SeenModel(np, WINDOWS, vocab_size=VOCAB),
        kv_pool=pool if swap is None else swapped(pool, *swap),
        ops=ops,
        communicator=SoloCommunicator(),
        limits=limits,
    )
    steps = WindowedSteps(worker, pool, table_windows=table_windows or layout.table_windows, block_tokens=BLOCK)
    return [each.token_ids for each in steps.run(prompts(), max_tokens=MAX_TOKENS, max_num_seqs=NUM_SLOTS)]


def swapped(pool: KvPool, one: int, other: int) -> KvPool:
    """With the layers of two tables found by each other's."""
    tables = {one: other, other: one}
    layers = {
        name: tuple(replace(cache, table=tables.get(cache.table, cache.table)) for cache in caches)
        for name, caches in pool.layers.items()
    }
    return replace(pool, layers=layers)


def right() -> list[list[int]]:
    model, found = SeenModel(np, WINDOWS, vocab_size=VOCAB), []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(MAX_TOKENS):
            tokens.append(model.right_token(tokens))
        found.append(tokens[len(prompt) :])
    return found


def test_every_layer_sees_its_own_tokens_in_blocks_that_are_used_again() -> None:
    layout = windowed_layout(WINDOWS, dtype=KvDtype.FLOAT32, block_tokens=BLOCK)
    assert sorted(each or 0 for each in layout.table_windows) == [0, 0, 4, 9, 9, 30]
    assert answers() == right()


def test_windows_make_room_for_more_sequences_than_one_table_has() -> None:
    assert answers(num_blocks=220) == right()
    with pytest.raises(AssertionError, match="blocks are needed"):
        answers(num_blocks=220, table_windows=(None,) * 6)


def test_a_block_that_is_given_back_too_early_is_noticed() -> None:
    windows = windowed_layout(WINDOWS, dtype=KvDtype.FLOAT32, block_tokens=BLOCK).table_windows
    early = [None if window is None else max(1, window - BLOCK) for window in windows]
    with pytest.raises(AssertionError, match="rows failed"):
        answers(table_windows=early)


def test_tables_that_are_mixed_up_are_noticed() -> None:
    windows = windowed_layout(WINDOWS, dtype=KvDtype.FLOAT32, block_tokens=BLOCK).table_windows
    with pytest.raises(AssertionError, match="rows failed"):
        answers(swap=(windows.index(None), windows.index(4)))
