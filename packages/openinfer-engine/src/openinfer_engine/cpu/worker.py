"""`CpuWorker`: executes steps on one rank: input ids, forward, sampling, log-probabilities."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from openinfer_core import TokenLogprobs
from openinfer_core.scheduling import StepPlan, StepResult
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.kv_tiers.pool import HostPool
from openinfer_engine.model import Model
from openinfer_engine.tracing.trace import DEVICE, NoTrace, Tracer
from openinfer_engine.worker.block_tables import BlockTables
from openinfer_engine.worker.logprobs import HostLogprobs
from openinfer_engine.worker.runner import DoneStep
from openinfer_engine.worker.sampling_state import SamplingState
from openinfer_engine.worker.state_slots import StateSlots
from openinfer_kernels import Array, HostArray, Ops
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


class CpuWorker:
    """One rank's state and its step. Steps run one after the other on one thread."""

    def __init__(
        self,
        model: Model,
        *,
        kv_cache: Array,
        ops: Ops,
        communicator: Communicator,
        limits: WorkerLimits,
        states: StateSlots | None = None,
        caches: Mapping[str, Array] = MappingProxyType({}),
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer or NoTrace()
        self._states = states
        self._caches = caches
        self._model = model
        self._kv_cache = kv_cache
        self._ops = ops
        self._communicator = communicator
        self._tables = BlockTables(
            max_num_seqs=limits.max_num_seqs,
            max_model_tokens=limits.max_model_tokens,
            block_size_tokens=limits.block_size_tokens,
        )
        self._sampling = SamplingState(
            max_num_seqs=limits.max_num_seqs, num_token_ids=limits.num_token_ids, vocab_size=limits.vocab_size
        )
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._last_ids: Array = ops.zeros((limits.max_num_seqs,), np.int32)

    def launch(self, plan: StepPlan) -> DoneStep:
        """Computes one step. If it fails, the other ranks are told, so that none waits for this one."""
        try:
            for start in plan.started:
                self._sampling.start(start)
                self._prompts[start.slot] = start.request.prompt_token_ids
            self._tables.advance(plan)
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

    def pool_memory(self) -> HostPool:
        return HostPool(self._kv_cache, None if self._states is None else self._states.memory)

    def fence(self) -> Callable[[], None]:
        return _nothing

    def close(self) -> None:
        self._communicator.close()

    def _compute(self, plan: StepPlan) -> StepResult:
        batch = replace(self._tables.batch(plan, self._ops), caches=self._caches)
        if self._states is not None:
            batch = self._states.join(batch, plan)
        hidden = self._model.forward(self._input_ids(plan), batch=batch, kv_cache=self._kv_cache)
        sampled = np.flatnonzero(plan.max_new)
        token_ids = np.full(plan.num_rows, -1, np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        if len(sampled):
            logits = self._model.logits(self._take(hidden, np.cumsum(plan.counts)[sampled] - 1))
            token_ids[sampled] = self._sample(plan, sampled, logits)
            logprobs = self._logprobs(plan, sampled, logits, token_ids)
        return StepResult.of_single_tokens(
            token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(plan, hidden),
            failed_rows={int(row): NOT_FINITE for row in sampled if token_ids[row] < 0},
        )

    def _input_ids(self, plan: StepPlan) -> Array:
        """`[T]`: host ids, and before them the last sampled id of the slot where a row begins with it."""
        starts = np.cumsum(plan.counts) - plan.counts
        from_device = plan.counts > plan.num_host_tokens
        is_host = np.ones(plan.num_tokens, np.bool_)
        is_host[starts[from_device]] = False
        host_ids = np.zeros(plan.num_tokens, np.int32)
        host_ids[is_host] = plan.token_ids
        token_ids = self._ops.upload(host_ids)
        if from_device.any():
            slots = self._ops.upload(plan.slots[from_device])
            token_ids[self._ops.upload(starts[from_device])] = self._last_ids[slots]
        return token_ids

    def _take(self, array: Array, rows: HostArray) -> Array:
        return self._ops.embedding(self._ops.upload(rows.astype(np.int32)), array)

    def _sample(self, plan: StepPlan, rows: HostArray, logits: Array) -> HostArray:
        """Samples on rank 0 and tells the others; returns the ids of `rows`."""
        slots = plan.slots[rows]
        positions = (plan.starts[rows] + plan.counts[rows]).astype(np.int64)
        if self._communicator.rank == 0:
            masks = [plan.token_masks.get((row, 0)) for row in rows.tolist()] if plan.token_masks else []
            token_ids = self._ops.sample(logits, self._sampling.batch(slots, positions, self._ops, masks=masks))
        else:
            token_ids = self._ops.zeros((len(rows),), np.int32)
        token_ids = self._communicator.broadcast(token_ids, root=0)
        self._last_ids[self._ops.upload(slots)] = token_ids.clip(0)  # a failed row's slot is never read again
        host_ids = self._ops.download(token_ids)
        self._sampling.count(slots, host_ids)
        return host_ids

    def _logprobs(
        self, plan: StepPlan, sampled: HostArray, logits: Array, token_ids: HostArray
    ) -> dict[int, TokenLogprobs]:
        tops = self._sampling.logprobs[plan.slots[sampled]]
        asked = np.flatnonzero((tops >= 0) & (token_ids[sampled] >= 0))
        if not len(asked) or self._communicator.rank != 0:
            return {}
        rows = sampled[asked]
        found = self._logprobs_of(self._take(logits, asked), self._ops.upload(token_ids[rows]), tops[asked].tolist())
        return dict(zip(rows.tolist(), found, strict=True))

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
            logits = self._model.logits(hidden[begin : begin + len(piece)])
            scored += self._logprobs_of(logits, self._ops.upload(np.asarray(piece, np.int32)), [top] * len(piece))
        return tuple(scored)

    def _logprobs_of(self, logits: Array, token_ids: Array, tops: list[int]) -> list[TokenLogprobs]:
        result = self._ops.logprobs(logits, token_ids, top=max(tops))
        columns = (result.chosen, result.ranks, result.top_ids, result.top)
        return HostLogprobs(*map(self._ops.download, columns)).of_rows(range(len(tops)), tops)


def _nothing() -> None:
    """Nothing to wait for."""
