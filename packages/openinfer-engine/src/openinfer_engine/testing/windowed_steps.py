"""A worker with several block tables under test: steps planned by hand, and a model that says what it can see.

`WindowedSteps` runs sequences in chunks and decode rows, gives back every block as soon as a table's window has left
it, fills it with NaN and hands it out again. A model that reads beyond a window, or in another layer's table, answers
NaN or reads another sequence's tokens. `SeenModel` is one whose right answers are known from the tokens alone.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.scheduling import SlotStart, StepPlan, StepResult
from openinfer_engine.model import KvLayers
from openinfer_engine.worker.paged_tensors import KvPool
from openinfer_engine.worker.runner import Worker
from openinfer_kernels import Array, AttentionBatch
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, PagedGroup, PagedTensor


@dataclass(slots=True, kw_only=True)
class WindowedAnswer:
    """What one sequence got."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    """Of the prompt's tokens but the first, then of `token_ids`."""


@dataclass(slots=True)
class _Table:
    """One block table of a sequence."""

    window: int | None
    blocks: list[int] = field(default_factory=list[int])
    num_void: int = 0


@dataclass(slots=True)
class _Sequence:
    request: GenerateRequest
    slot: int
    tables: list[_Table]
    num_computed: int = 0
    answer: WindowedAnswer = field(default_factory=WindowedAnswer)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt_token_ids

    @property
    def is_done(self) -> bool:
        return len(self.answer.token_ids) == self.request.sampling.max_tokens


class WindowedSteps:
    """Plans steps for one worker and reads their results, one after the other.

    Which rows a step has, and how prompts are cut, depends on the seed alone: two runs with other tables, of the same
    model, are the same batches.
    """

    def __init__(
        self,
        worker: Worker,
        pool: KvPool,
        *,
        table_windows: Sequence[int | None],
        block_tokens: int,
        synchronize: Callable[[], None] | None = None,
        seed: int = 0,
    ) -> None:
        """The windows may be others than the model's, for a mutant; `synchronize` waits for writes to the pool."""
        self._worker = worker
        self._pool = pool
        self._windows = table_windows
        self._synchronize = synchronize
        self._block_tokens = block_tokens
        self._free = list(range(len(pool.blocks) - 1))  # the last one takes what padding writes
        self._rng = random.Random(seed)  # noqa: S311 - of a test
        self._step = 0

    def run(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, max_num_seqs: int, max_chunk_tokens: int = 24
    ) -> list[WindowedAnswer]:
        """Greedy answers of `max_tokens` tokens.

        Raises:
            AssertionError: a row failed, which means that its logits were NaN; or blocks ran out.
        """
        waiting = [
            GenerateRequest(
                request_id=RequestId(number),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0, prompt_logprobs=0),
            )
            for number, prompt in enumerate(prompts)
        ]
        answers: dict[int, WindowedAnswer] = {}
        running: list[_Sequence] = []
        slots = list(range(max_num_seqs))
        while waiting or running:
            started: list[_Sequence] = []
            while waiting and slots:
                tables = [_Table(window) for window in self._windows]
                started.append(_Sequence(waiting.pop(0), slots.pop(0), tables))
            some = [each for each in running if self._rng.random() < 0.8]
            rows = started + (some if started or some else running[:1])
            self._compute(rows, started, max_chunk_tokens=max_chunk_tokens)
            running = [each for each in (*running, *started) if not each.is_done]
            for each in rows:
                if each.is_done:
                    answers[int(each.request.request_id)] = each.answer
                    slots.append(each.slot)
                    for table in each.tables:
                        self._give_back(table.blocks[table.num_void :])
        return [answers[number] for number in range(len(prompts))]

    def _compute(self, rows: list[_Sequence], started: list[_Sequence], *, max_chunk_tokens: int) -> None:
        counts = [self._count_of(each, max_chunk_tokens) for each in rows]
        ends = [each.num_computed + count for each, count in zip(rows, counts, strict=True)]
        for each in rows:
            self._leave_behind(each)
        new_blocks = [
            [
                self._append(each.tables[table], each.num_computed + count)
                for each, count in zip(rows, counts, strict=True)
            ]
            for table in range(len(self._windows))
        ]
        host_ids = [each.prompt[each.num_computed : end] for each, end in zip(rows, ends, strict=True)]
        plan = StepPlan(
            step=self._step,
            slots=_column(each.slot for each in rows),
            starts=_column(each.num_computed for each in rows),
            counts=_column(counts),
            num_host_tokens=_column(map(len, host_ids)),
            max_new=_column(end >= len(each.prompt) for each, end in zip(rows, ends, strict=True)),
            token_ids=_column(token for ids in host_ids for token in ids),
            new_block_counts=np.array([[len(blocks) for blocks in table] for table in new_blocks], np.int32),
            new_blocks=_column(block for table in new_blocks for blocks in table for block in blocks),
            void_block_counts=np.array(
                [[each.tables[table].num_void for each in rows] for table in range(len(self._windows))], np.int32
            ),
            started=tuple(SlotStart(slot=each.slot, request=each.request, seed=0) for each in started),
        )
        self._step += 1
        result = self._worker.launch(plan).result()
        assert not result.failed_rows, f"step {plan.step}: rows failed: {dict(result.failed_rows)}"
        for row, (each, end) in enumerate(zip(rows, ends, strict=True)):
            each.num_computed = end
            _take(each, row, result)

    def _count_of(self, sequence: _Sequence, max_chunk_tokens: int) -> int:
        left = len(sequence.prompt) - sequence.num_computed
        return 1 if left <= 0 else min(left, self._rng.randint(1, max_chunk_tokens))

    def _leave_behind(self, sequence: _Sequence) -> None:
        """Gives back what the next position does not see, and no later one."""
        for table in sequence.tables:
            if table.window is not None:
                seen_from = max(0, sequence.num_computed - table.window + 1) // self._block_tokens
                self._give_back(table.blocks[table.num_void : seen_from])
                table.num_void = max(table.num_void, seen_from)

    def _append(self, table: _Table, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // self._block_tokens) - len(table.blocks)
        assert missing <= len(self._free), f"{missing} blocks are needed and {len(self._free)} are free"
        added = [self._free.pop() for _ in range(missing)]
        table.blocks += added
        return added

    def _give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._pool.blocks[block] = np.nan
        if blocks and self._synchronize is not None:
            self._synchronize()
        self._free += blocks


def _take(sequence: _Sequence, row: int, result: StepResult) -> None:
    answer = sequence.answer
    answer.logprobs += [each.logprob for each in result.prompt_logprobs.get(row, ())]
    answer.logprobs += [each.logprob for each in result.logprobs.get(row, ())]
    answer.token_ids += result.tokens_of_rows[row]


def _column(values: Any) -> Any:
    return np.fromiter(values, np.int32)


def windowed_layout(windows: Sequence[int | None], *, dtype: KvDtype, block_tokens: int) -> KvLayout:
    """Of `SeenModel`: one number per token and layer, each layer a paged group."""
    tensor = PagedTensor(name="ids", num_heads=1, head_dim=1, dtype=dtype)
    groups = tuple(
        PagedGroup(name=f"layer_{number}", num_layers=1, tensors=(tensor,), window_tokens=window)
        for number, window in enumerate(windows)
    )
    return KvLayout.from_spec(KvSpec(model_tag="test", paged=groups), block_size_tokens=block_tokens)


class SeenModel:
    """Keeps ids as KV; its logits are one-hot at `right_token`, NaN where a layer sees NaN.

    Args:
        xp: NumPy, or CuPy.
        windows: of its layers, each a paged group of its own: `layer_0`, `layer_1`, …
        vocab_size: below 256, so that BF16 holds every id.
    """

    def __init__(self, xp: Any, windows: Sequence[int | None], *, vocab_size: int) -> None:
        self._xp = xp
        self._windows = windows
        self._vocab_size = vocab_size

    def right_token(self, context: Sequence[int]) -> int:
        """What comes after a context."""
        total = 0
        for number, window in enumerate(self._windows, 1):
            first = 0 if window is None else max(0, len(context) - window)
            total += number * sum((place + 1) * context[place] for place in range(first, len(context)))
        return total % self._vocab_size

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        """`[T, 8]`: the token that comes after each, then zeros."""
        xp, num_tokens = self._xp, len(token_ids)
        rows = xp.searchsorted(batch.query_starts, xp.arange(num_tokens, dtype=np.int32), side="right") - 1
        rows = rows.clip(0, len(batch.context_lens) - 1)  # padding is in no row
        total, dtype = xp.zeros(num_tokens, np.float64), kv_cache["layer_0"][0].data.dtype
        for number, window in enumerate(self._windows, 1):
            (cache,) = kv_cache[f"layer_{number - 1}"]
            ids = cache.data[:, cache.layer, 0, 0, :, 0]
            slots, block_tokens = batch.cache_slots[cache.table], ids.shape[1]
            slots = xp.where(slots < 0, ids.size - 1, slots)  # padding goes to the last block, which is no sequence's
            ids[slots // block_tokens, slots % block_tokens] = token_ids.astype(dtype)
            found = ids[batch.block_tables[cache.table][rows]].reshape(num_tokens, -1).astype(np.float64)
            places, positions = xp.arange(found.shape[1]), batch.positions[:, None]
            seen = places <= positions
            if window is not None:
                seen &= places > positions - window
            total += number * (xp.where(seen, found, 0) * (places + 1)).sum(axis=1)
        hidden = xp.zeros((num_tokens, 8), dtype)
        hidden[:, 0] = (total % self._vocab_size).astype(dtype)
        return hidden

    def logits(self, hidden: Array) -> Array:
        """`[n, V]`."""
        xp, right = self._xp, hidden[:, :1].astype(np.float32)
        is_right = right == xp.arange(self._vocab_size, dtype=np.float32)
        return xp.where(xp.isnan(right), np.float32(np.nan), is_right * np.float32(5))
