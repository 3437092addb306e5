"""`MixedForward`: forward passes of mixed batches on a GPU, replayed from graphs or launched operator by operator."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np

from openinfer_core.scheduling import StepPlan
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.cuda.graphs import CapturedMixed
from openinfer_engine.cuda.memory_budget import slot_sizes
from openinfer_engine.cuda.step_buckets import ADAPTED_TOKEN_BUCKETS, TOKEN_BUCKETS, bucket_of
from openinfer_engine.lora.adapter_rows import AdapterRows
from openinfer_engine.model import KvLayers, LastTokenModel, LogitsIndices, Model
from openinfer_engine.worker.step_observer import StepObserver
from openinfer_kernels import Array, AttentionBatch, HostArray
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.common.pinned import StagingBuffer
from openinfer_kernels.cuda.ops import CudaOps
from openinfer_kernels.cuda.sampling.step_inputs import BatchMemory, MixedInputs, mixed_record
from openinfer_kernels.cuda.sampling.steps import SlotState, copy_array
from openinfer_kernels.cuda.sampling.token_rows import TokenRows


class RowColumns(NamedTuple):
    """Rows of a mixed batch, as in a plan."""

    slots: HostArray
    starts: HostArray
    counts: HostArray
    num_host_tokens: HostArray
    host_ids: HostArray

    @classmethod
    def of(cls, plan: StepPlan) -> "RowColumns":
        return cls(plan.slots, plan.starts, plan.counts, plan.num_host_tokens, plan.token_ids)


class ReadTokens(NamedTuple):
    """The last tokens of some rows of a mixed batch, one or several of each."""

    rows: HostArray
    """`[n]`: of each token."""
    tokens: HostArray
    """`[n]`, of the batch."""


class MixedForward:
    """Queues forward passes. Those that are replayed, by tokens: `captured`, and with adapters `adapted`."""

    def __init__(
        self,
        model: Model,
        *,
        ops: CudaOps,
        kv_cache: KvLayers,
        slots: SlotState,
        limits: WorkerLimits,
        memory: BatchMemory,
        adapters: AdapterRows,
        observer: StepObserver | None = None,
    ) -> None:
        self.captured: dict[int, CapturedMixed] = {}
        self.adapted: dict[int, CapturedMixed] = {}
        self._adapters = adapters
        self._observer = observer
        self._ops = ops
        self.model = model
        self._kv_cache = kv_cache
        self._slots = slots
        self._limits = limits
        self._memory = memory

    @cached_property
    def _token_rows(self) -> TokenRows:
        return TokenRows(self._ops.device)

    def padded_inputs(self, num_tokens: int) -> MixedInputs:
        """For as many rows as so many tokens can have; two at least, since attention is told of no shorter row else."""
        return MixedInputs.make(
            max(2, min(num_tokens, self._limits.max_num_seqs)),
            num_tokens,
            max_blocks=slot_sizes(self._limits).max_blocks,
            longest=(num_tokens, self._limits.max_model_tokens),
            memory=self._memory,
            has_adapters=self._adapters.adapters is not None,
        )

    def prompt_inputs(self, num_tokens: int) -> MixedInputs:
        """As for a prompt of so many tokens, all of them padding."""
        return MixedInputs.make(
            2,
            num_tokens,
            max_blocks=-(-num_tokens // self._limits.block_size_tokens),
            longest=(num_tokens, num_tokens),
            chunk_context_tokens=num_tokens,
            memory=self._memory,
            has_adapters=self._adapters.adapters is not None,
        )

    def inputs_of(self, columns: RowColumns, staging: StagingBuffer) -> MixedInputs:
        starts, counts = columns.starts, columns.counts
        num_rows, num_tokens, longest = len(counts), int(counts.sum()), int((starts + counts).max())
        adapter_slots = self._adapters.of(columns.slots)
        (record,) = staging.upload(mixed_record(*columns, sizes=(num_rows, num_tokens), adapter_slots=adapter_slots))
        return MixedInputs.make(
            num_rows,
            num_tokens,
            max_blocks=-(-longest // self._limits.block_size_tokens),
            longest=(int(counts.max()), longest),
            chunk_context_tokens=int((starts + counts)[counts > 1].sum()),
            record=record,
            memory=self._memory,
            has_adapters=adapter_slots is not None,
        )

    def captured_for(self, slots: HostArray, num_tokens: int) -> CapturedMixed | None:
        """What is replayed for rows in these sequence slots, of so many tokens; None if nothing is."""
        if self._adapters.of(slots) is None:
            bucket = bucket_of(TOKEN_BUCKETS, num_tokens)
            return None if bucket is None else self.captured.get(bucket)
        bucket = bucket_of((*TOKEN_BUCKETS, *ADAPTED_TOKEN_BUCKETS), num_tokens)
        return None if bucket is None else self.adapted.get(bucket)

    def hidden_of(self, inputs: MixedInputs) -> Array:
        """`[T, h]` hidden states of a mixed batch, which a drafter is shown; launched operator by operator."""
        self._slots.prepare_mixed(inputs)
        if self._observer is not None:
            slots = inputs.record[: len(inputs.batch.context_lens)]
            return self._observer.forward(slots, inputs.token_ids, batch=inputs.batch, kv_cache=self._kv_cache)
        return self.model.forward(inputs.token_ids, batch=inputs.batch, kv_cache=self._kv_cache)

    @property
    def selects_last_tokens(self) -> bool:
        """Whether a pass that is not replayed may leave out hidden states of tokens that nothing is sampled from."""
        if self._observer is None:
            return isinstance(self.model, LastTokenModel)
        return self._observer.selects_last_tokens

    def _hidden_of_some(self, inputs: MixedInputs, read: ReadTokens, staging: StagingBuffer) -> Array:
        """`[T, h]`, of which those of the tokens that are read are computed; others are any numbers."""
        self._slots.prepare_mixed(inputs)
        token_ids, batch, places = inputs.token_ids, inputs.batch, np.zeros(len(inputs.token_ids), np.int32)
        count = len(read.tokens)
        places[read.tokens] = np.arange(count)
        rows, tokens, starts, found_at = staging.upload(
            read.rows.astype(np.int32), read.tokens.astype(np.int32), np.arange(count + 1, dtype=np.int32), places
        )
        last = LogitsIndices(tokens=tokens, batch=batch)
        if count:
            # The last token of a row has its context; those before it are looked at one by one.
            if (np.diff(read.rows) == 0).any():
                contexts = self._taken(self._token_rows.batch(inputs).context_lens, tokens)
            else:
                contexts = self._taken(batch.context_lens, rows)
            last = LogitsIndices(tokens=tokens, batch=self._rows_of_one(batch, rows, tokens, starts, contexts))
        if self._observer is None:
            model = cast("LastTokenModel", self.model)
            found = model.forward_last_tokens(token_ids, batch=batch, kv_cache=self._kv_cache, last=last)
        else:
            slots = inputs.record[: len(batch.context_lens)]
            found = self._observer.forward_last_tokens(
                slots, token_ids, batch=batch, kv_cache=self._kv_cache, last=last
            )
        if not count:
            return cupy.empty((len(token_ids), found.shape[1]), found.dtype)
        return self._ops.embedding(found_at, found)

    def _rows_of_one(
        self, batch: AttentionBatch, rows: Array, tokens: Array, starts: Array, contexts: Array
    ) -> AttentionBatch:
        """`tokens [n]` of these rows again, as rows of one token each, which begin at `starts`."""
        return replace(
            batch,
            positions=self._taken(batch.positions, tokens),
            query_starts=starts,
            context_lens=contexts,
            block_tables=tuple(self._taken(table, rows) for table in batch.block_tables),
            cache_slots=tuple(self._taken(slots, tokens) for slots in batch.cache_slots),
            max_query_tokens=1,
            chunk_context_tokens=None,
            state_slots=None if batch.state_slots is None else self._taken(batch.state_slots, rows),
            adapter_slots=None if batch.adapter_slots is None else self._taken(batch.adapter_slots, tokens),
        )

    def _taken(self, array: Array, indices: Array) -> Array:
        """`array[indices]`, by an operator, whatever the numbers stand for: CuPy compiles a kernel for each kind of
        array in the first step that asks, which takes the time of a hundred steps.
        """
        words = array.reshape(len(array), -1).view(np.float32)
        return self._ops.embedding(indices, words).view(array.dtype).reshape(-1, *array.shape[1:])

    def leave_hidden_by_token(self, rows: TokenRows, inputs: MixedInputs, hidden: Array, *, most_tokens: int) -> None:
        """As `hidden_of`, where each token is a row for the model's attention; leaves the states in `hidden`.

        No row has more than `most_tokens`, so that recurrent states launch nothing that is made for prompts.
        """
        self._slots.prepare_mixed(inputs)
        most = min(inputs.batch.max_query_tokens, most_tokens)
        batch = replace(inputs.batch, token_rows=rows.batch(inputs), max_query_tokens=most)
        if self._observer is None:
            found = self.model.forward(inputs.token_ids, batch=batch, kv_cache=self._kv_cache)
        else:
            slots = inputs.record[: len(inputs.batch.context_lens)]
            found = self._observer.forward(
                slots, inputs.token_ids, batch=inputs.batch, kv_cache=self._kv_cache, of_model=batch
            )
        copy_array(found, hidden)

    def run(
        self,
        columns: RowColumns,
        staging: StagingBuffer,
        *,
        correct: Callable[[MixedInputs], None] | None = None,
        least_tokens: int = 0,
        by_token: bool = False,
        read: ReadTokens | None = None,
    ) -> tuple[MixedInputs, Array]:
        """A forward pass of these rows.

        Args:
            columns: of the rows.
            staging: of the step.
            correct: queues what changes the record on the device before the pass reads it.
            least_tokens: what is replayed was captured for so many at least.
            by_token: attention may take each token for a row.
            read: of the hidden states nothing is read but those of these tokens; None: anything.

        Returns:
            Its inputs, and `[T or more, h]` hidden states; both are those of a graph if one was replayed.
        """
        captured = self.captured_for(columns.slots, max(int(columns.counts.sum()), least_tokens))
        if captured is None:
            inputs = self.inputs_of(columns, staging)
        else:
            inputs = captured.inputs
            sizes = len(inputs.batch.context_lens), len(inputs.token_ids)
            adapter_slots = self._adapters.of(columns.slots)
            record = mixed_record(*columns, sizes=sizes, adapter_slots=adapter_slots)
            # The record of steps without adapters is the first part of the other one.
            staging.upload_into(record, inputs.record[: len(record)])
        if correct is not None:
            correct(inputs)
        if captured is None and read is not None and self.selects_last_tokens:
            return inputs, self._hidden_of_some(inputs, read, staging)
        if captured is None:
            return inputs, self.hidden_of(inputs)
        graph = captured.by_token if by_token and captured.by_token is not None else captured.forward
        graph.launch()
        return inputs, captured.hidden
