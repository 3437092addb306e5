"""The recorded models, and a harness that runs one with attention batches made by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_core import read_config
from openinfer_deepseek_v2_lite.definition import DeepseekV2LiteDefinition
from openinfer_deepseek_v2_lite.model import DeepseekV2LiteConfig, DeepseekV2LiteModel
from openinfer_engine.checkpoint import Checkpoint, RankWeights
from openinfer_engine.communicator import Communicator
from openinfer_engine.local_group import LocalGroup
from openinfer_engine.wanted_tokens import WantedTokens
from openinfer_kernels import AttentionBatch
from openinfer_kernels.cpu import CpuOps
from openinfer_kv_cache import KvDtype, KvLayout

FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE_NAMES = sorted(path.name for path in FIXTURES.iterdir())

Logits = NDArray[np.float32]


class ModelHarness:
    """A model on all its ranks, with a KV cache each; the tests say which tokens each step computes.

    Blocks are handed out in shuffled order, and the caches begin full of NaN: nothing may depend on either.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        ranks: int = 1,
        block_tokens: int = 8,
        num_blocks: int = 80,
        change: Mapping[str, Any] | None = None,
    ) -> None:
        definition, ops = DeepseekV2LiteDefinition(), CpuOps()
        self.config: DeepseekV2LiteConfig = definition.parse(read_config(model_dir) | dict(change or {}))
        definition.check_ranks(self.config, ranks)
        self._group = LocalGroup(ranks)
        self._block_tokens = block_tokens
        self._free = np.random.default_rng(0).permutation(num_blocks).tolist()
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        self._models: list[DeepseekV2LiteModel] = []
        self._caches: list[NDArray[Any]] = []
        with Checkpoint.open(model_dir) as checkpoint:
            checkpoint.validate(definition.tensors(self.config), ignorable=definition.ignorable_tensors(self.config))
            for communicator in self._group.communicators:
                rank = communicator.rank
                weights = RankWeights(checkpoint, rank=rank, size=ranks)
                limit = definition.limits(self.config).max_model_tokens
                self._models.append(
                    definition.load(self.config, weights, ops=ops, communicator=communicator, max_model_tokens=limit)
                )
                spec = definition.kv_spec(
                    self.config, model_tag="test", dtype=KvDtype.FLOAT32, num_ranks=ranks, rank_index=rank
                )
                shape = KvLayout.from_spec(spec, block_size_tokens=block_tokens).block_shape()
                self._caches.append(np.full((num_blocks, *shape), np.nan, np.float32))

    def fork(self, sequence: str, parent: str, num_tokens: int) -> None:
        """Begins a sequence with the first full blocks of another."""
        assert num_tokens % self._block_tokens == 0
        assert num_tokens <= self._lengths[parent]
        self._tables[sequence] = self._tables[parent][: num_tokens // self._block_tokens]
        self._lengths[sequence] = num_tokens

    def step(self, rows: Mapping[str, Sequence[int]]) -> dict[str, Logits]:
        """Computes the next tokens of some sequences: the logits `[tokens, V]` at each of them."""
        batch = self._batch(rows)
        token_ids = np.asarray([token for tokens in rows.values() for token in tokens], np.int32)

        def work(communicator: Communicator) -> Logits:
            model = self._models[communicator.rank]
            hidden = model.forward(token_ids, batch=batch, kv_cache=self._caches[communicator.rank])
            return model.logits(hidden)

        results = self._group.run(work)
        for other in results[1:]:
            assert np.array_equal(results[0], other)
        pieces = np.split(results[0], batch.query_starts[1:-1])
        return dict(zip(rows, pieces, strict=True))

    def step_wanted(self, rows: Mapping[str, Sequence[int]]) -> dict[str, Logits]:
        """As `step`, but the logits `[1, V]` at the last token of each sequence alone are asked for."""
        batch = self._batch(rows)
        token_ids = np.asarray([token for tokens in rows.values() for token in tokens], np.int32)
        last = (batch.query_starts[1:] - 1).astype(np.int32)
        alone = replace(
            batch,
            positions=batch.positions[last],
            query_starts=np.arange(len(rows) + 1, dtype=np.int32),
            cache_slots=batch.cache_slots[last],
            max_query_tokens=1,
        )
        (model,), (cache,) = self._models, self._caches
        wanted = WantedTokens(tokens=last, batch=alone)
        logits = model.logits(model.forward_wanted(token_ids, batch=batch, kv_cache=cache, wanted=wanted))
        return dict(zip(rows, np.split(logits, len(rows)), strict=True))

    def _batch(self, rows: Mapping[str, Sequence[int]]) -> AttentionBatch:
        positions: list[int] = []
        slots: list[int] = []
        for sequence, tokens in rows.items():
            table = self._tables.setdefault(sequence, [])
            start = self._lengths.get(sequence, 0)
            end = self._lengths[sequence] = start + len(tokens)
            while len(table) * self._block_tokens < end:
                table.append(self._free.pop())
            positions += range(start, end)
            slots += [
                table[p // self._block_tokens] * self._block_tokens + p % self._block_tokens for p in range(start, end)
            ]
        tables = [self._tables[sequence] for sequence in rows]
        block_tables = np.zeros((len(rows), max(map(len, tables))), np.int32)
        for row, table in enumerate(tables):
            block_tables[row, : len(table)] = table
        counts = [len(tokens) for tokens in rows.values()]
        lengths = [self._lengths[sequence] for sequence in rows]
        return AttentionBatch(
            positions=np.asarray(positions, np.int32),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lens=np.asarray(lengths, np.int32),
            block_tables=block_tables,
            cache_slots=np.asarray(slots, np.int64),
            max_query_tokens=max(counts),
            max_context_tokens=max(lengths),
        )


@pytest.fixture(params=FIXTURE_NAMES)
def model_dir(request: pytest.FixtureRequest) -> Path:
    """Each recorded model in turn."""
    return FIXTURES / request.param


@pytest.fixture
def fixtures() -> Path:
    """The folder of recorded models."""
    return FIXTURES


@pytest.fixture
def harness() -> type[ModelHarness]:
    return ModelHarness
