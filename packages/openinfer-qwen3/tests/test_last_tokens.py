"""The last layer is left out for tokens whose logits are not computed, and nothing else changes."""

from pathlib import Path

import numpy as np
import pytest

from openinfer_core import read_config
from openinfer_engine.distributed.communicator import SoloCommunicator
from openinfer_engine.model import KvLayers, LastTokenModel, LogitsIndices
from openinfer_engine.weights.dummy import DummyWeights
from openinfer_kernels import AttentionBatch, PagedCache
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen3.family import Qwen3Definition
from openinfer_qwen3.model import ATTENTION, Qwen3Config, Qwen3Model, load, tensors

BLOCK_TOKENS, NUM_BLOCKS = 4, 16
PIECES = ((0, 7), (0, 3), (0, 10))
"""First position and tokens of each row."""


class CountingOps(CpuOps):
    """Notes how many tokens the MLP sees, layer after layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def linear_swiglu(self, x, gate_up, batch):
        self.tokens.append(len(x))
        return super().linear_swiglu(x, gate_up, batch)


@pytest.fixture
def ops() -> CountingOps:
    return CountingOps()


@pytest.fixture
def config(model_dir: Path) -> Qwen3Config:
    return Qwen3Definition().parse(read_config(model_dir))


@pytest.fixture
def model(config: Qwen3Config, ops: CountingOps) -> Qwen3Model:
    weights = DummyWeights(tensors(config), rank=0, size=1)
    return load(config, weights, ops=ops, communicator=SoloCommunicator(), max_model_tokens=32)


def make_batch(pieces: tuple[tuple[int, int], ...]) -> AttentionBatch:
    tables = np.arange(NUM_BLOCKS, dtype=np.int32).reshape(4, 4)[: len(pieces)]
    positions = np.concatenate([np.arange(start, start + count) for start, count in pieces])
    rows = np.repeat(np.arange(len(pieces)), [count for _, count in pieces])
    contexts = [start + count for start, count in pieces]
    blocks = tables[rows, positions // BLOCK_TOKENS]
    return AttentionBatch(
        positions=positions.astype(np.int32),
        query_starts=np.cumsum([0, *(count for _, count in pieces)]).astype(np.int32),
        context_lens=np.asarray(contexts, np.int32),
        block_tables=(tables,),
        cache_slots=(blocks.astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS,),
        max_query_tokens=max(count for _, count in pieces),
        max_context_tokens=max(contexts),
    )


def make_cache(config: Qwen3Config) -> tuple[np.ndarray, KvLayers]:
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    data = np.full((NUM_BLOCKS, layers, 2, heads, BLOCK_TOKENS, config.head_dim), np.nan, np.float32)
    return data, {ATTENTION: [PagedCache(data=data, layer=layer) for layer in range(layers)]}


def test_selected_tokens_have_the_hidden_states_of_a_whole_step_and_all_have_keys_and_values(
    model: Qwen3Model, config: Qwen3Config, ops: CountingOps
) -> None:
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, 20).astype(np.int32)
    (data, cache), (whole_data, whole_cache) = make_cache(config), make_cache(config)
    whole = model.forward(token_ids, batch=make_batch(PIECES), kv_cache=whole_cache)
    ops.tokens.clear()

    ends = np.asarray([6, 9, 19], np.int32)
    batch = make_batch(tuple((start + count - 1, 1) for start, count in PIECES))
    last = LogitsIndices(tokens=ends, batch=batch)
    hidden = model.forward_last_tokens(token_ids, batch=make_batch(PIECES), kv_cache=cache, last=last)

    np.testing.assert_allclose(hidden, whole[ends], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(data, whole_data)
    assert ops.tokens == [20] * (config.num_hidden_layers - 1) + [3]


def test_nothing_is_computed_behind_the_last_keys_where_nothing_is_selected(
    model: Qwen3Model, config: Qwen3Config, ops: CountingOps
) -> None:
    token_ids = np.arange(20, dtype=np.int32)
    (data, cache), (whole_data, whole_cache) = make_cache(config), make_cache(config)
    model.forward(token_ids, batch=make_batch(PIECES), kv_cache=whole_cache)
    ops.tokens.clear()

    last = LogitsIndices(tokens=np.empty(0, np.int32), batch=make_batch(PIECES))
    hidden = model.forward_last_tokens(token_ids, batch=make_batch(PIECES), kv_cache=cache, last=last)

    assert hidden.shape == (0, config.hidden_size)
    np.testing.assert_array_equal(data, whole_data)
    assert ops.tokens == [20] * (config.num_hidden_layers - 1)


def test_the_engine_sees_that_the_model_is_selective(model: Qwen3Model) -> None:
    assert isinstance(model, LastTokenModel)
