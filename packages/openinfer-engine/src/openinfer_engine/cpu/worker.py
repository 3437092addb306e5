"""`CpuWorker`: executes steps on one rank: input ids, forward, sampling, log-probabilities.

A row of several sampled positions is sampled at the first, then at the next as long as its token is the draft that
stands there: exactly what so many steps of one token would do, with the same penalties, masks and random numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from openinfer_core import Refused, TokenLogprobs
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import Int32Column, StepPlan, StepResult
from openinfer_engine.cpu.draft_memory import CpuDraftMemory, SpanBlocks
from openinfer_engine.cpu.draft_rows import InputIds, SequenceLengths, SlotDrafts, indices_of
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.drafters.contract import DrafterRequirements
from openinfer_engine.drafters.requirements import blocks_of_span
from openinfer_engine.drafting import SharedDrafter
from openinfer_engine.kv_tiers.pool import HostPool
from openinfer_engine.lifecycle.memory import give_back
from openinfer_engine.lora.adapter_rows import AdapterRows
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.model import KvLayers, Model, ModelOfDealtExperts, checked_hidden, checked_logits
from openinfer_engine.tracing.trace import DEVICE, NoTrace, Tracer
from openinfer_engine.worker.block_tables import BlockTables
from openinfer_engine.worker.logprobs import HostLogprobs
from openinfer_engine.worker.paged_tensors import KvPool
from openinfer_engine.worker.runner import DoneStep
from openinfer_engine.worker.sampling_state import SamplingState
from openinfer_engine.worker.state_slots import StateSlots
from openinfer_engine.worker.step_observer import StepObserver
from openinfer_kernels import Array, AttentionBatch, HostArray, Ops
from openinfer_kv_cache import KvLayout

# positions whose whole-vocabulary logits exist at a time when prompt log-probabilities are computed
PROMPT_LOGPROB_ROWS = 256

NOT_FINITE = "the model gave no finite logit to sample from"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Sizes of the runner's state."""

    max_num_seqs: int
    max_model_tokens: int
    block_size_tokens: int
    num_tables: int = 1  # block tables of a sequence
    num_token_ids: int
    vocab_size: int
    num_snapshots: int = 0  # slots of recurrent states after the first `max_num_seqs`, for copies
    slot_bytes: int = 0  # memory of each of them, with padding; 0 without states
    tokens_per_score: int | None = None  # as in `ModelLimits`

    @property
    def score_bytes_per_token(self) -> int:
        """Scores of one token of a step over the longest context."""
        return 0 if self.tokens_per_score is None else 4 * -(-self.max_model_tokens // self.tokens_per_score)


def make_states(layout: KvLayout, limits: WorkerLimits, *, ops: Ops) -> StateSlots | None:
    if not layout.slot_bytes:
        return None
    num_slots = limits.max_num_seqs + limits.num_snapshots
    return StateSlots(layout, num_slots=num_slots, slot_bytes=limits.slot_bytes, ops=ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampledRows:
    """What the rows of a step sampled, as in `StepResult`."""

    new_counts: Int32Column
    token_ids: list[list[int]]
    logprobs: dict[int, tuple[TokenLogprobs, ...]]
    failed_rows: dict[int, str]


class CpuWorker:
    """One rank's state and its step. Steps run one after the other on one thread."""

    def __init__(
        self,
        model: Model,
        *,
        kv_pool: KvPool,
        ops: Ops,
        communicator: Communicator,
        limits: WorkerLimits,
        states: StateSlots | None = None,
        drafter: SharedDrafter | None = None,
        adapters: RankAdapters | None = None,
        first_span_block: int = 0,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer or NoTrace()
        self._limits = limits
        self._adapter_rows = AdapterRows(adapters, max_num_seqs=limits.max_num_seqs)
        self._states = states
        self._model = model
        self._kv_pool = kv_pool
        self._ops = ops
        self._communicator = communicator
        self._tables = BlockTables(
            max_num_seqs=limits.max_num_seqs,
            max_model_tokens=limits.max_model_tokens,
            block_size_tokens=limits.block_size_tokens,
            num_tables=limits.num_tables,
        )
        self._sampling = SamplingState(
            max_num_seqs=limits.max_num_seqs, num_token_ids=limits.num_token_ids, vocab_size=limits.vocab_size
        )
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._last_ids: Array = ops.zeros((limits.max_num_seqs,), np.int32)
        self._lengths = SequenceLengths(max_num_seqs=limits.max_num_seqs)
        self._first_span_block = first_span_block
        self._drafts: SlotDrafts | None = None
        self._observer: StepObserver | None = None
        if drafter is not None:
            self._join_drafter(model, drafter)

    def _join_drafter(self, model: Model, drafter: SharedDrafter) -> None:
        self._drafts = SlotDrafts(drafter, max_num_seqs=self._limits.max_num_seqs, ops=self._ops)
        if drafter.observes:
            self._observer = StepObserver(model, drafter)
            drafter.attach(self._draft_memory(drafter.requirements))

    def _draft_memory(self, asked: DrafterRequirements) -> CpuDraftMemory:
        blocks = SpanBlocks(
            first=self._first_span_block,
            per_row=blocks_of_span(asked, self._limits.block_size_tokens),
            groups=tuple(group.name for group in asked.paged),
        )
        states: Mapping[str, Array] = {} if self._states is None else self._states.tensors
        return CpuDraftMemory(self._kv_pool, self._tables, states=states, blocks=blocks, ops=self._ops)

    def launch(self, plan: StepPlan) -> DoneStep:
        """Computes one step. If it fails, the other ranks are told, so that none waits for this one."""
        try:
            self._adapter_rows.advance(plan)
            for start in plan.started:
                self._sampling.start(start)
                self._prompts[start.slot] = start.request.prompt_token_ids
            if self._drafts is not None:
                self._drafts.start(plan.started)
            self._tables.advance(plan)
            plan = self._lengths.place(plan)
            if self._states is not None:
                self._states.advance(plan)
            with self._tracer.span(DEVICE, "step", step=plan.step, rows=plan.num_rows, tokens=plan.num_tokens):
                done = DoneStep(self._compute(plan))
                if self._states is not None:
                    self._states.keep(plan)
                return done
        except BaseException as error:
            self._communicator.abort(error)
            raise

    def join_step(self) -> None:
        """Of a data-parallel rank without rows in a step: its experts compute those of the other ranks."""
        try:
            if not isinstance(self._model, ModelOfDealtExperts):
                raise ContractViolation(f"{type(self._model).__name__} has no join_step")
            self._model.join_step()
        except BaseException as error:
            self._communicator.abort(error)
            raise

    @property
    def adapters(self) -> RankAdapters | None:
        """None where none are served."""
        return self._adapter_rows.adapters

    def pool_memory(self) -> HostPool:
        return HostPool(self._kv_pool.blocks, None if self._states is None else self._states.memory)

    @property
    def keeps_drafter(self) -> bool:
        return False

    def drop_model(self) -> None:
        self._model = NoModel()
        self._drafts = self._observer = None
        self._prompts.clear()

    def put_model(self, model: Model, drafter: SharedDrafter | None) -> None:
        self._model = model
        if drafter is not None:
            self._join_drafter(model, drafter)

    def keep_weights(self) -> None:
        raise Refused("weights are in memory of the host already; their files can be held open")

    def give_back(self) -> None:
        give_back(self._kv_pool.blocks)
        if self._states is not None:
            give_back(self._states.memory)
        if self.adapters is not None:
            self.adapters.save_slots()
            for array in self.adapters.slot_arrays:
                give_back(array)

    def take_back(self) -> None:
        """Pages come, with zeros, when they are written to."""
        if self.adapters is not None:
            self.adapters.restore_slots()

    def fence(self) -> Callable[[], None]:
        return _nothing

    def close(self) -> None:
        self._communicator.close()

    def _compute(self, plan: StepPlan) -> StepResult:
        if not plan.num_rows:
            return StepResult.of_single_tokens(np.zeros(0, np.int32))
        inputs = InputIds.of(plan, last_ids=self._last_ids, drafts=self._drafts, ops=self._ops)
        token_ids = inputs.model_ids(num_token_ids=self._limits.num_token_ids)
        drafting = np.flatnonzero(plan.max_new > 1)
        kept = self._states.copy_of(plan.slots[drafting]) if self._states is not None and len(drafting) else None
        hidden = self._forward(plan, token_ids)
        sampled = self._sample(plan, inputs, hidden)
        if self._states is not None and kept is not None:
            self._set_back(self._states, plan, kept, token_ids, sampled.new_counts)
        self._lengths.advance(plan, sampled.new_counts)
        if self._drafts is not None:
            self._draft(self._drafts, plan, inputs, hidden, sampled.new_counts)
        return StepResult(
            new_counts=sampled.new_counts,
            token_ids=np.asarray([each for row in sampled.token_ids for each in row], np.int32),
            draft_counts=inputs.draft_counts,
            next_drafts=self._next_drafts(plan, sampled.new_counts),
            logprobs=sampled.logprobs,
            prompt_logprobs=self._prompt_logprobs(plan, hidden),
            failed_rows=sampled.failed_rows,
        )

    def _forward(self, plan: StepPlan, token_ids: Array) -> Array:
        batch = replace(self._tables.batch(plan, self._ops), caches=self._kv_pool.tensors)
        if self._states is not None:
            batch = self._states.join(batch, plan)
        if (slots := self._adapter_rows.of(plan.slots)) is not None:
            batch = replace(batch, adapter_slots=self._ops.upload(np.repeat(slots, plan.counts)))
        if self._observer is not None:
            rows = self._ops.upload(plan.slots.astype(np.int32))
            hidden = self._observer.forward(rows, token_ids, batch=batch, kv_cache=self._kv_pool.layers)
        else:
            hidden = self._model.forward(token_ids, batch=batch, kv_cache=self._kv_pool.layers)
        return checked_hidden(self._model, hidden, num_tokens=len(token_ids))

    def _logits(self, hidden: Array) -> Array:
        logits = self._model.logits(hidden)
        return checked_logits(self._model, logits, num_rows=len(hidden), vocab_size=self._limits.vocab_size)

    def _set_back(
        self, states: StateSlots, plan: StepPlan, kept: Array, token_ids: Array, new_counts: Int32Column
    ) -> None:
        """Sets states back that have consumed refused drafts, and computes again what was right before these."""
        drafting = np.flatnonzero(plan.max_new > 1)
        is_refused = new_counts[drafting] < plan.max_new[drafting]
        rows = drafting[is_refused]
        if not len(rows):
            return
        counts = plan.counts[rows] - plan.max_new[rows] + np.maximum(new_counts[rows], 1)
        states.set_back(plan.slots[rows], kept[self._ops.upload(is_refused)], consumed=plan.starts[rows] + counts)
        places = indices_of((np.cumsum(plan.counts) - plan.counts)[rows], counts)
        accepted = replace(plan, slots=plan.slots[rows], starts=plan.starts[rows], counts=counts)
        self._forward(accepted, token_ids[self._ops.upload(places)])

    def _draft(
        self, drafts: SlotDrafts, plan: StepPlan, inputs: InputIds, hidden: Array, new_counts: Int32Column
    ) -> None:
        rows = np.flatnonzero(new_counts)
        if not len(rows):
            return
        slots, predicted = plan.slots[rows], inputs.first_sampled[rows] + new_counts[rows] - 1
        lengths = (plan.starts + plan.counts - plan.max_new + 1 + new_counts)[rows]
        drafts.draft(slots, self._last_ids[self._ops.upload(slots)], self._take(hidden, predicted), lengths)

    def _next_drafts(self, plan: StepPlan, new_counts: Int32Column) -> dict[int, tuple[int, ...]]:
        if self._drafts is None:
            return {}
        rows: list[int] = np.flatnonzero(plan.wants_drafts & (new_counts > 0)).tolist()
        return {row: self._drafts.of(int(plan.slots[row])) for row in rows}

    def _take(self, array: Array, rows: HostArray) -> Array:
        return self._ops.embedding(self._ops.upload(rows.astype(np.int32)), array)

    def _sample(self, plan: StepPlan, inputs: InputIds, hidden: Array) -> "_SampledRows":
        """Samples all rows at their first position, then those whose token is their draft at the next, and so on."""
        token_ids: list[list[int]] = [[] for _ in range(plan.num_rows)]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        failed_rows: dict[int, str] = {}
        rows, position = np.flatnonzero(plan.max_new), 0
        while len(rows):
            logits = self._logits(self._take(hidden, inputs.first_sampled[rows] + position))
            sampled = self._sample_position(plan, rows, position, logits)
            for row, token_id in zip(rows.tolist(), sampled.tolist(), strict=True):
                if token_id >= 0:
                    token_ids[row].append(token_id)
                else:
                    failed_rows[row] = NOT_FINITE
            for row, found in self._logprobs(plan, rows, logits, sampled).items():
                logprobs.setdefault(row, []).append(found)
            rows = rows[(sampled >= 0) & (sampled == inputs.draft_after(rows, position))]
            position += 1
        for row in failed_rows:  # a request that fails gets none of the step's tokens
            token_ids[row].clear()
            logprobs.pop(row, None)
        return _SampledRows(
            new_counts=np.asarray([len(each) for each in token_ids], np.int32),
            token_ids=token_ids,
            logprobs={row: tuple(each) for row, each in logprobs.items()},
            failed_rows=failed_rows,
        )

    def _sample_position(self, plan: StepPlan, rows: HostArray, position: int, logits: Array) -> HostArray:
        """Samples on rank 0 and tells the others; returns the ids of `rows` at their `position`-th sampled position."""
        slots = plan.slots[rows]
        places = (plan.starts + plan.counts - plan.max_new + 1)[rows].astype(np.int64) + position
        if self._communicator.rank == 0:
            masks = [plan.token_masks.get((row, position)) for row in rows.tolist()] if plan.token_masks else []
            token_ids = self._ops.sample(logits, self._sampling.batch(slots, places, self._ops, masks=masks))
        else:
            token_ids = self._ops.zeros((len(rows),), np.int32)
        token_ids = self._communicator.broadcast(token_ids, root=0)
        self._last_ids[self._ops.upload(slots)] = token_ids.clip(0)  # a failed row's slot is never read again
        host_ids = self._ops.download(token_ids)
        self._sampling.count(slots, host_ids)
        return host_ids

    def _logprobs(
        self, plan: StepPlan, rows: HostArray, logits: Array, token_ids: HostArray
    ) -> dict[int, TokenLogprobs]:
        """Row -> those of its token, for rows that asked; `token_ids` of `rows`."""
        tops = self._sampling.logprobs[plan.slots[rows]]
        asked = np.flatnonzero((tops >= 0) & (token_ids >= 0))
        if not len(asked) or self._communicator.rank != 0:
            return {}
        found = self._logprobs_of(self._take(logits, asked), self._ops.upload(token_ids[asked]), tops[asked].tolist())
        return dict(zip(rows[asked].tolist(), found, strict=True))

    def _prompt_logprobs(self, plan: StepPlan, hidden: Array) -> dict[int, tuple[TokenLogprobs, ...]]:
        tops = self._sampling.prompt_logprobs[plan.slots]
        firsts = np.cumsum(plan.counts) - plan.counts
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        for row in np.flatnonzero(tops >= 0).tolist():
            start, first = int(plan.starts[row]), int(firsts[row])
            targets = self._prompts[int(plan.slots[row])][start + 1 : start + int(plan.counts[row]) + 1]
            if targets:
                found[row] = self._score(hidden[first : first + len(targets)], targets, int(tops[row]))
        return found

    def _score(self, hidden: Array, targets: tuple[int, ...], top: int) -> tuple[TokenLogprobs, ...]:
        scored: list[TokenLogprobs] = []
        for begin in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            piece = targets[begin : begin + PROMPT_LOGPROB_ROWS]
            logits = self._logits(hidden[begin : begin + len(piece)])
            scored += self._logprobs_of(logits, self._ops.upload(np.asarray(piece, np.int32)), [top] * len(piece))
        return tuple(scored)

    def _logprobs_of(self, logits: Array, token_ids: Array, tops: list[int]) -> list[TokenLogprobs]:
        result = self._ops.logprobs(logits, token_ids, top=max(tops))
        columns = (result.chosen, result.ranks, result.top_ids, result.top)
        return HostLogprobs(*map(self._ops.download, columns)).of_rows(range(len(tops)), tops)


class NoModel:
    """Stands where a model was: the engine plans no step before another one is there."""

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        raise ContractViolation("a step was launched while no weights are loaded")

    def logits(self, hidden: Array) -> Array:
        raise ContractViolation("a step was launched while no weights are loaded")


def _nothing() -> None:
    """Nothing to wait for."""
