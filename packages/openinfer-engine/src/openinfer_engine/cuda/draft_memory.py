"""`CudaDraftMemory`: the KV of a drafter in the pool of a GPU's rank, and blocks for what its drafts add.

As `cpu/draft_memory.py`, where positions are the device's: `openinfer_kernels.cuda.sampling.draft_spans`.
"""

from collections.abc import Mapping
from dataclasses import replace

from openinfer_engine.drafters.contract import DrafterRequirements, DraftSpan
from openinfer_engine.drafters.requirements import SPAN_ROWS, blocks_of_span
from openinfer_engine.model import KvLayers
from openinfer_engine.worker.paged_tensors import KvPool
from openinfer_kernels import Array, AttentionBatch
from openinfer_kernels.cuda.sampling.draft_spans import DraftSpans, SpanBlocks
from openinfer_kernels.cuda.sampling.steps import SlotState


class CudaDraftMemory:
    """Implements `DraftMemory`.

    Args:
        pool: of the rank.
        slots: where the block tables are.
        asked: by the drafter.
        states: of the rank.
        first_span_block: the block after those that the scheduler knows.
        block_tokens: of a block.
        max_model_tokens: of a sequence.
    """

    def __init__(
        self,
        pool: KvPool,
        slots: SlotState,
        asked: DrafterRequirements,
        *,
        states: Mapping[str, Array],
        first_span_block: int,
        block_tokens: int,
        max_model_tokens: int,
    ) -> None:
        names = {group.name for group in asked.paged}
        # A drafter's layers are computed without the step's first layer before them: attention may read nothing early.
        self.layers: KvLayers = {
            name: tuple(replace(cache, is_first_layer=True) for cache in caches) if name in names else caches
            for name, caches in pool.layers.items()
        }
        self.states = states
        self.max_rows = SPAN_ROWS
        begin_bytes, num_bytes = _piece_of(pool, names)
        blocks = SpanBlocks(
            pool=pool.blocks,
            first=first_span_block,
            per_row=blocks_of_span(asked, block_tokens),
            block_tokens=block_tokens,
            begin_bytes=begin_bytes,
            num_bytes=num_bytes,
        )
        most = max_model_tokens + asked.span_tokens
        self._spans = DraftSpans(
            slots.device,
            slots.block_tables[0],
            blocks,
            max_context_tokens=most,
            most=(SPAN_ROWS, max(1, asked.span_tokens)),
        )

    def span(self, slots: Array, lengths: Array) -> DraftSpan:
        starts, tables = self._spans.tables_of(slots, lengths)
        return _CudaSpan(self._spans, starts, tables, (slots, self.states))


class _CudaSpan:
    def __init__(
        self, spans: DraftSpans, starts: Array, tables: Array, states: tuple[Array, Mapping[str, Array]]
    ) -> None:
        self._spans, self._starts, self._tables = spans, starts, tables
        self._slots, self._states = states

    def rows(self, first: int, count: int) -> AttentionBatch:
        batch = self._spans.batch(self._starts, self._tables, first=first, count=count, whole=False)
        return replace(batch, state_slots=self._slots, states=self._states)

    def whole(self, count: int) -> AttentionBatch:
        return self._spans.batch(self._starts, self._tables, first=0, count=count, whole=True)


def _piece_of(pool: KvPool, names: set[str]) -> tuple[int, int]:
    """First byte and bytes of the layers of these groups in a block, from the first of them to the last."""
    caches = [cache for name in names for cache in pool.layers[name]]
    if not caches:
        return 0, 0
    layer_bytes = caches[0].data[0, 0].nbytes
    layers = [cache.layer for cache in caches]
    return min(layers) * layer_bytes, (max(layers) + 1 - min(layers)) * layer_bytes
