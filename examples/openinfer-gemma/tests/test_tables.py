"""The engine's worker with a block table for each piece of the layers, against one table that keeps everything.

Blocks that a window has left are filled with NaN and become another sequence's at once. Both runs have the same
batches, so answers and log-probabilities are equal bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from openinfer_core import read_config
from openinfer_engine.cpu.worker import CpuWorker, WorkerLimits
from openinfer_engine.distributed.communicator import SoloCommunicator
from openinfer_engine.testing.windowed_steps import WindowedAnswer, WindowedSteps
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.worker.paged_tensors import KvPool, make_pool
from openinfer_gemma.family import GemmaDefinition
from openinfer_gemma.model import PAGED_GROUPS
from openinfer_kernels.cpu import CpuOps
from openinfer_kv_cache import KvDtype, KvLayout

BLOCK, NUM_SLOTS, MAX_MODEL_TOKENS, MAX_TOKENS = 8, 3, 160, 24
FULL, SLIDING = PAGED_GROUPS.values()


def unchanged(pool: KvPool) -> KvPool:
    return pool


def run(
    model_dir: Path,
    *,
    windows: bool,
    num_blocks: int = 400,
    change: Callable[[KvPool], KvPool] = unchanged,
    given_back_early: int = 0,
) -> tuple[KvLayout, list[WindowedAnswer]]:
    """Greedy answers to prompts shorter and longer than the windows, and the layout that they were made with."""
    definition, ops = GemmaDefinition(), CpuOps()
    config = definition.parse(read_config(model_dir))
    solo = SoloCommunicator()
    with Checkpoint.open(model_dir) as checkpoint:
        weights = RankWeights(checkpoint, rank=0, size=1)
        model = definition.load(config, weights, ops=ops, communicator=solo, max_model_tokens=MAX_MODEL_TOKENS)
    dtypes = {"kv_dtype": KvDtype.FLOAT32, "state_dtype": KvDtype.FLOAT32}
    spec = definition.kv_spec(config, model_tag="test", **dtypes, num_ranks=1, rank_index=0)
    layout = KvLayout.from_spec(spec if windows else spec.without_windows(), block_size_tokens=BLOCK)
    pool = make_pool(layout, num_blocks=num_blocks, ops=ops)
    pool.blocks.fill(np.nan)
    limits = WorkerLimits(
        max_num_seqs=NUM_SLOTS,
        max_model_tokens=MAX_MODEL_TOKENS,
        block_size_tokens=BLOCK,
        num_tables=layout.num_tables,
        num_token_ids=config.vocab_size,
        vocab_size=config.vocab_size,
    )
    worker = CpuWorker(model, kv_pool=change(pool), ops=ops, communicator=solo, limits=limits)
    given_back = [window and window - given_back_early for window in layout.table_windows]
    steps = WindowedSteps(worker, pool, table_windows=given_back, block_tokens=BLOCK)
    rng = np.random.default_rng(0)
    prompts: Sequence[list[int]] = [rng.integers(0, config.vocab_size, size).tolist() for size in (5, 41, 110, 70, 1)]
    return layout, steps.run(prompts, max_tokens=MAX_TOKENS, max_num_seqs=NUM_SLOTS)


def swapped(pool: KvPool) -> KvPool:
    """The first layers of both kinds are found by each other's table."""
    full, sliding = pool.layers[FULL], pool.layers[SLIDING]
    layers = {
        FULL: (replace(full[0], table=sliding[0].table), *full[1:]),
        SLIDING: (replace(sliding[0], table=full[0].table), *sliding[1:]),
    }
    return replace(pool, layers=layers)


@pytest.fixture(scope="module", params=["gemma2", "gemma3"])
def folder(request: pytest.FixtureRequest, fixtures: Path) -> Path:
    return fixtures / request.param


def test_tables_with_windows_give_the_same_bits_as_one_table(folder: Path) -> None:
    one, right = run(folder, windows=False)
    several, found = run(folder, windows=True)
    assert one.num_tables == 1
    assert {*several.table_windows} == {None, GemmaDefinition().parse(read_config(folder)).sliding_window}
    assert found == right
    assert [len(each.logprobs) for each in right] == [size - 1 + MAX_TOKENS for size in (5, 41, 110, 70, 1)]


def test_a_block_given_back_too_early_is_noticed(folder: Path) -> None:
    with pytest.raises(AssertionError, match="rows failed"):
        run(folder, windows=True, given_back_early=BLOCK)


def test_layers_found_by_another_table_are_noticed(folder: Path) -> None:
    with pytest.raises(AssertionError, match="rows failed"):
        run(folder, windows=True, change=swapped)


def test_windows_leave_room_that_one_table_has_not(folder: Path) -> None:
    layouts = [run(folder, windows=windows)[0] for windows in (False, True)]
    one, several = (layout.blocks_for_context(110 + MAX_TOKENS) * layout.block_bytes for layout in layouts)
    assert several < one
