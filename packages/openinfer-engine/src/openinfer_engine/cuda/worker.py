"""`CudaWorker`: the worker of one GPU. It queues steps and waits for none: results are read when the loop asks.

    plan ─► block tables, slots that begin ─► one small copy to the device
       ├─ decode rows alone ─► replay: forward ─► replay: sampling, plain or full ──────────► ids to the host
       └─ prefill chunks too ─► replay, or launch one by one: forward ─► sampling launched ──► ids to the host

What the host must know of a sequence slot is known when it begins (`CudaSamplingState`), so nothing that a request may
ask for makes a step wait, and what few rows ask for costs the others little.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from openinfer_core import Refused
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import StepPlan
from openinfer_engine.cpu.worker import PROMPT_LOGPROB_ROWS, NoModel, WorkerLimits
from openinfer_engine.cuda.draft_memory import CudaDraftMemory
from openinfer_engine.cuda.drafted import DraftedSteps, nothing_sampled
from openinfer_engine.cuda.drafted_sampling import DraftedSamplingState
from openinfer_engine.cuda.drafted_states import DraftedStates
from openinfer_engine.cuda.graphs import CapturedDecode, StepWork, capture_decode, capture_mixed
from openinfer_engine.cuda.late_steps import LateSteps
from openinfer_engine.cuda.memory_budget import slot_sizes
from openinfer_engine.cuda.mixed import MixedForward, RowColumns
from openinfer_engine.cuda.replayed_states import ReplayedStates
from openinfer_engine.cuda.results import DraftedTokens, QueuedStep, SampledTokens, ScoredPrompt
from openinfer_engine.cuda.sampler import CudaSampler, download_logprobs
from openinfer_engine.cuda.sampling_state import CudaSamplingState, UnscoredRow
from openinfer_engine.cuda.step_buckets import BY_TOKEN_TOKENS, ROW_BUCKETS, bucket_of, row_buckets, token_buckets
from openinfer_engine.cuda.times import StepTimes
from openinfer_engine.data_parallel.step_sizes import StepSizes
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.drafters.contract import DrafterRequirements
from openinfer_engine.drafting import SharedDrafter
from openinfer_engine.lora.adapter_rows import AdapterRows
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.model import LastTokenModel, LogitsIndices, Model, ModelOfDealtExperts
from openinfer_engine.tracing.trace import NoTrace, Tracer
from openinfer_engine.worker.block_tables import BlockTables
from openinfer_engine.worker.logprobs import HostLogprobs
from openinfer_engine.worker.paged_tensors import KvPool
from openinfer_engine.worker.runner import PendingStep
from openinfer_engine.worker.state_slots import StateSlots
from openinfer_engine.worker.step_observer import StepObserver
from openinfer_kernels import Array, HostArray, Logprobs, OutOfDeviceMemoryError
from openinfer_kernels.cuda.common.block_copies import DevicePool
from openinfer_kernels.cuda.common.graphs import Fence, Stream
from openinfer_kernels.cuda.common.mapped_memory import MappedMemory
from openinfer_kernels.cuda.common.pinned import StagingBuffer, StagingRing
from openinfer_kernels.cuda.ops import CudaOps
from openinfer_kernels.cuda.sampling.draft_state import DraftedSlotState
from openinfer_kernels.cuda.sampling.step_inputs import (
    DECODE_LINES,
    MASK_LINE,
    BatchMemory,
    DecodeInputs,
    MixedInputs,
    SampledRows,
    padding_record,
)
from openinfer_kernels.cuda.sampling.steps import SlotState
from openinfer_kernels.cuda.sampling.token_rows import TokenRows

_Inputs = TypeVar("_Inputs", DecodeInputs, MixedInputs)

_LONG_PROMPT_TOKENS = 1024  # more than any graph has, and than what kernels of short prompts are for
_STAGING_BUFFERS = 3  # steps whose host memory is in use at a time, at most: one running, one queued, one being read


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a step samples, on the device."""

    sampled: HostArray  # rows of the plan
    places: HostArray  # where each is in the next two
    token_ids: Array
    logprobs: Logprobs | None
    prompts: list[ScoredPrompt]


class CudaWorker:
    """Steps of one GPU, in order, on one stream."""

    def __init__(
        self,
        model: Model,
        *,
        kv_pool: KvPool,
        ops: CudaOps,
        communicator: Communicator,
        limits: WorkerLimits,
        states: StateSlots | None = None,
        drafter: SharedDrafter | None = None,
        sleeping_memory: MappedMemory | None = None,
        adapters: RankAdapters | None = None,
        adapted_tokens: Sequence[int] = (),
        first_span_block: int = 0,
        shows_late: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self._adapter_rows = AdapterRows(adapters, max_num_seqs=limits.max_num_seqs)
        self._adapted_tokens = adapted_tokens  # of mixed batches that are captured with adapters alone
        self._model = model
        self._states = states
        self._sleeping_memory = sleeping_memory  # of weights, KV and graphs; None where none of them can change
        self._replayed: ReplayedStates | None = None
        if states is not None and drafter is not None:
            most = {"max_num_seqs": limits.max_num_seqs, "max_drafts": drafter.max_drafts}
            with self._void_memory():
                self._replayed = ReplayedStates.of(model, states.tensors, **most)
        self._memory = memory = BatchMemory(
            block_tokens=limits.block_size_tokens,
            num_tables=limits.num_tables,
            caches=kv_pool.tensors,
            states=None if states is None else states.tensors,
            kept=None if self._replayed is None else self._replayed.kept,
        )
        self._kv_pool = kv_pool
        self._ops = ops
        self._communicator = communicator
        self._sizes = StepSizes(communicator)
        self._limits = limits
        self._stream = Stream(ops.device)
        self._times = StepTimes(self._stream, tracer or NoTrace())
        self._tables = BlockTables(
            max_num_seqs=limits.max_num_seqs,
            max_model_tokens=limits.max_model_tokens,
            block_size_tokens=limits.block_size_tokens,
            num_tables=limits.num_tables,
        )
        self._slots, drafted_slots = _sampling_states(ops, limits, drafter)
        max_rows = max(limits.max_num_seqs, ROW_BUCKETS[-1])
        self._sampler = CudaSampler(ops, self._slots, communicator, limits, max_rows=max_rows)
        self._decode: dict[int, CapturedDecode] = {}
        self._adapted_decode: dict[int, CapturedDecode] = {}
        self._observer = StepObserver(model, drafter) if drafter is not None and drafter.observes else None
        self._mixed = MixedForward(
            model,
            ops=ops,
            kv_cache=kv_pool.layers,
            slots=self._slots.state,
            limits=limits,
            memory=memory,
            adapters=self._adapter_rows,
            observer=self._observer,
        )
        self._drafted: DraftedSteps | None = None
        self._late = self._late_steps(drafter, drafted_slots) if shows_late else None
        if drafter is not None and drafted_slots is not None:
            self._drafted = DraftedSteps(
                model,
                mixed=self._mixed,
                slots=drafted_slots,
                sampler=self._sampler,
                ops=ops,
                drafter=drafter,
                limits=limits,
                states=self._drafted_states(states),
                replayed=self._replayed,
                late=self._late,
                score_prompts=self._score_prompts,
            )
            if drafter.observes:
                drafter.attach(self._draft_memory(drafter.requirements, first_span_block))
        self._staging = StagingRing(ops.device, _STAGING_BUFFERS)

    def _late_steps(self, drafter: SharedDrafter | None, slots: DraftedSamplingState | None) -> LateSteps | None:
        """None for a drafter that is shown each step as it is computed."""
        if drafter is None or slots is None or self._observer is None or not drafter.requirements.observes_late:
            return None
        return LateSteps(
            self._observer,
            drafter,
            slots=slots.drafts,
            device=self._ops.device,
            limits=self._limits,
            memory=self._memory,
        )

    def _draft_memory(self, asked: DrafterRequirements, first_span_block: int) -> CudaDraftMemory:
        return CudaDraftMemory(
            self._kv_pool,
            self._slots.state,
            asked,
            states={} if self._states is None else self._states.tensors,
            first_span_block=first_span_block,
            block_tokens=self._limits.block_size_tokens,
            max_model_tokens=self._limits.max_model_tokens,
        )

    def _drafted_states(self, states: StateSlots | None) -> DraftedStates | None:
        """Those of a model that does not replay them."""
        if states is None or self._replayed is not None:
            return None
        with self._void_memory():
            return DraftedStates(
                states,
                mixed=self._mixed,
                max_num_seqs=self._limits.max_num_seqs,
                synchronize=self._stream.synchronize,
            )

    def _void_memory(self) -> contextlib.AbstractContextManager[None]:
        """For what is void between two steps: a sleep gives it back."""
        return contextlib.nullcontext() if self._sleeping_memory is None else self._sleeping_memory.of_kv()

    # --- start ------------------------------------------------------------------------------------------

    def warm_up(self, *, capture: bool, mark: Callable[[str], None]) -> None:
        """Runs each captured size once, so that nothing is compiled or measured later; marks `tuning` and `capture`."""
        work = StepWork(
            decode=self._decode_step,
            sample=lambda logits, inputs: self._sampled_decode(self._sampler.sample(logits, inputs.sampled), inputs),
            sample_fully=self._sample_decode_fully,
            mixed_hidden=self._mixed_hidden,
            hidden_by_token=self._hidden_by_token(),
        )
        self._ops.device.synchronize()  # state and cache are filled on other streams, which this one does not wait for
        with self._stream:
            decode = [self._decode_inputs(rows) for rows in row_buckets(self._limits.max_num_seqs)]
            mixed = [self._mixed.padded_inputs(tokens) for tokens in token_buckets(self._limits)]
            adapted = [self._mixed.padded_inputs(tokens) for tokens in self._adapted_tokens]
            with self._ops.tuning(), self._sizes.rehearsal():
                for inputs in (way for each in decode for way in self._ways(each)):
                    self._sample_decode_fully(self._decode_step(inputs)[0], inputs)
                # Those of few tokens are also what accepting drafts is run with, before it is captured.
                hidden = [[self._mixed_hidden(way) for way in self._ways(each)][-1] for each in mixed]
                for inputs in adapted:
                    self._mixed_hidden(inputs)
                self._stream.synchronize()
            if self._sizes.are_shared:
                self._warm_up_shared(decode, mixed)
            mark("tuning")
            if capture:
                self._warm_up_drafts(mixed, hidden)
                scratch = None if self._sleeping_memory is None else self._sleeping_memory.scratch_pool()
                with self._stream.private_pool(scratch):  # every graph's scratch; inputs lie elsewhere
                    for inputs in reversed(adapted):
                        self._mixed.adapted[len(inputs.token_ids)] = capture_mixed(self._stream, inputs, work)
                    self._capture(decode, mixed, work)
                self._stream.synchronize()
                mark("capture")

    def _warm_up_shared(self, decode: Sequence[DecodeInputs], mixed: Sequence[MixedInputs]) -> None:
        """Loads what prompts run that are in no graph; then every size once more, with what ranks exchange."""
        with self._sizes.rehearsal():
            self._mixed_hidden(self._mixed.prompt_inputs(min(_LONG_PROMPT_TOKENS, self._limits.max_model_tokens)))
            self._stream.synchronize()
        for inputs in decode:
            self._decode_step(inputs)
        for inputs in mixed:
            self._mixed_hidden(inputs)
        self._stream.synchronize()

    def _hidden_by_token(self) -> Callable[[MixedInputs, Array], None] | None:
        """Of an engine whose rows have drafts, where tokens of a row may be rows for attention."""
        if self._drafted is None or self._limits.num_tables > 1:
            return None
        rows, most_tokens = TokenRows(self._ops.device), self._drafted.most_tokens
        return partial(self._mixed.leave_hidden_by_token, rows, most_tokens=most_tokens)

    def _warm_up_drafts(self, mixed: Sequence[MixedInputs], hidden: Sequence[Array]) -> None:
        if self._drafted is None:
            return
        by_token = self._hidden_by_token()
        for inputs, states in zip(mixed, hidden, strict=True):
            if by_token is not None and len(inputs.token_ids) <= BY_TOKEN_TOKENS:
                by_token(inputs, states)
            self._drafted.graphs.warm_up(inputs, states)
        self._stream.synchronize()

    def _capture(self, decode: Sequence[DecodeInputs], mixed: Sequence[MixedInputs], work: StepWork) -> None:
        for inputs in reversed(mixed):
            for way, found in zip(self._ways(inputs), (self._mixed.captured, self._mixed.adapted), strict=False):
                found[len(inputs.token_ids)] = capture_mixed(self._stream, way, work)
        for inputs in reversed(decode):
            for way, found in zip(self._ways(inputs), (self._decode, self._adapted_decode), strict=False):
                found[inputs.rows.shape[1]] = capture_decode(self._stream, way, work)
        if self._drafted is not None:
            self._drafted.graphs.capture(self._stream, self._mixed.captured)
            self._drafted.capture_decode(self._stream, self._decode)

    def _ways(self, inputs: _Inputs) -> tuple[_Inputs, ...]:
        """A step without adapters, and where they are served one with them: both read the same arrays."""
        return (inputs,) if self.adapters is None else (inputs.without_adapters(), inputs)

    def _decode_inputs(self, num_rows: int) -> DecodeInputs:
        max_blocks = slot_sizes(self._limits).max_blocks
        return DecodeInputs.make(
            num_rows,
            max_blocks=max_blocks,
            max_context_tokens=self._limits.max_model_tokens,
            memory=self._memory,
            has_adapters=self.adapters is not None,
        )

    # --- what is captured, next to sampling -------------------------------------------------------------

    def _decode_step(self, inputs: DecodeInputs) -> tuple[Array, Array]:
        """Logits and hidden states."""
        self._sizes.pad_to(len(inputs.token_ids))
        if self._drafted is not None:
            self._drafted.begin_decode(inputs)
        self._slots.state.prepare_decode(inputs)
        token_ids, batch, layers = inputs.token_ids, inputs.batch, self._kv_pool.layers
        if self._observer is None:
            hidden = self._model.forward(token_ids, batch=batch, kv_cache=layers)
        elif self._late is not None:
            hidden, taps = self._observer.forward_unseen(token_ids, batch=batch, kv_cache=layers)
            self._late.put(inputs, hidden, taps)
        else:
            hidden = self._observer.forward(inputs.rows[0], token_ids, batch=batch, kv_cache=layers)
        return self._model.logits(hidden), hidden

    def _mixed_hidden(self, inputs: MixedInputs) -> Array:
        self._sizes.pad_to(len(inputs.token_ids))
        return self._mixed.hidden_of(inputs)

    def _sample_decode_fully(self, logits: Array, inputs: DecodeInputs) -> tuple[Array, Logprobs]:
        token_ids, logprobs = self._sampler.sample_fully(logits, inputs)
        return self._sampled_decode(token_ids, inputs), logprobs

    def _sampled_decode(self, token_ids: Array, inputs: DecodeInputs) -> Array:
        if self._drafted is not None:
            self._drafted.end_decode(inputs, token_ids)
        return token_ids

    # --- steps ------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> PendingStep:
        """Queues a step. If that fails, the other ranks are told, so that none waits for this one."""
        try:
            with self._stream:
                return self._queue(plan)
        except BaseException as error:
            self._communicator.abort(error)
            raise

    def join_step(self) -> None:
        """Of a data-parallel rank without rows in a step: queues its experts' part of the others' rows."""
        try:
            with self._stream:
                self._join()
        except BaseException as error:
            self._communicator.abort(error)
            raise

    @property
    def adapters(self) -> RankAdapters | None:
        """None where none are served."""
        return self._adapter_rows.adapters

    def pool_memory(self) -> DevicePool:
        slots = None if self._states is None else self._states.memory
        return DevicePool(self._kv_pool.blocks, self._ops.device, slots=slots)

    # --- weights that change ----------------------------------------------------------------------------

    @property
    def keeps_drafter(self) -> bool:
        return True

    def drop_model(self) -> None:
        memory = self._changing_memory()
        self._stream.synchronize()
        self._set_model(NoModel())
        memory.drop_weights()

    def put_model(self, model: Model, drafter: SharedDrafter | None) -> None:
        """Its weights lie where those before were, so that graphs, and what a drafter has of them, stay as they are."""
        if drafter is not None:
            raise ContractViolation("the drafter of a GPU stays when its model changes")
        self._changing_memory().check_weights()
        self._set_model(model)

    def _set_model(self, model: Model) -> None:
        self._model = self._mixed.model = model
        for each in (self._drafted, self._observer):
            if each is not None:
                each.model = model

    def keep_weights(self) -> None:
        try:
            self._changing_memory().keep_weights()
        except MemoryError as error:
            raise Refused(f"the weights cannot be kept asleep: {error}; sleep without them (level 2)") from error

    def give_back(self) -> None:
        memory = self._changing_memory()
        if self.adapters is not None:
            with self._stream:
                self.adapters.save_slots()
        memory.give_back()

    def take_back(self) -> None:
        try:
            self._changing_memory().take_back()
        except OutOfDeviceMemoryError as error:
            raise Refused(f"other processes hold its memory of the GPU: {error}") from error
        if self.adapters is not None:
            with self._stream:
                kept = self.adapters.restore_slots()
            self._stream.synchronize()
            del kept  # with it goes the memory of what was copied for this sleep alone

    def _changing_memory(self) -> MappedMemory:
        if self._sleeping_memory is None:
            raise Refused("weights of this GPU cannot change: the engine was started without --enable-sleep")
        return self._sleeping_memory

    def fence(self) -> Callable[[], None]:
        # Recorded at the stream's present end; any thread may wait for it.
        with self._stream:
            return Fence().wait

    def close(self) -> None:
        """Waits for what was queued, frees what was captured, and leaves the group."""
        # Graphs hold collectives of the communicator: they go first, once nothing of them runs. Where the device has
        # failed, waiting raises, and the rest is done all the same: a group that is being aborted waits for its graphs.
        with contextlib.ExitStack() as ends:
            ends.callback(self._communicator.close)
            if self._sleeping_memory is not None:
                ends.callback(self._sleeping_memory.close)
            ends.callback(self._stream.free_graphs)
            if self._drafted is not None:
                ends.callback(self._drafted.graphs.clear)
            for captured in (self._decode, self._adapted_decode, self._mixed.captured, self._mixed.adapted):
                ends.callback(captured.clear)
            self._stream.synchronize()

    def _queue(self, plan: StepPlan) -> QueuedStep:
        entries, planned = self._tables.advance(plan), plan
        if self._drafted is not None:
            self._drafted.draft_pending(plan, is_decode=self._is_replayed(plan))
            plan = self._drafted.place(plan)
        elif (plan.max_new > 1).any():
            raise ContractViolation("the plan has rows of several new tokens, and the worker no drafter")
        staging = self._staging.take()
        note_times = self._times.begin(plan)
        self._adapter_rows.advance(plan)
        # Queued before the step on the same stream, whose kernels read the tables and records that this writes.
        self._slots.update(plan, entries, staging)
        if self._states is not None:
            # Where states are replayed, the scheduler's positions are bounds, with the drafts that were left out.
            self._states.advance(plan if self._replayed is None else planned, are_bounds=self._replayed is not None)
        # States were restored above, before the rows that go on from them; they are kept below, after these rows.
        sampled, prompts = self._run(plan, staging) if plan.num_rows else (nothing_sampled(), [])
        if self._states is not None:
            if self._late is not None and plan.state_snapshots:
                self._late.show()
            self._states.keep(plan)
        after = note_times()
        staging.done.record()  # after the downloads: the step's host memory is reused once this event has passed
        return QueuedStep(staging.done, plan.num_rows, sampled, prompts, after)

    def _join(self) -> None:
        """The graph that the other ranks replay, with padding alone; where they replay none, the experts alone."""
        rows, staging = self._sizes.others_decode_rows, self._staging.take()
        decode = None if rows is None else self._decode.get(bucket_of(ROW_BUCKETS, rows) or 0)
        mixed = self._mixed.captured_for(np.empty(0, np.int32), self._sizes.num_tokens())
        if decode is not None:
            staging.upload_into(np.full(decode.inputs.rows.shape, -1, np.int32), decode.inputs.rows)
            decode.forward.launch()
        elif mixed is not None:
            num_rows, num_tokens = len(mixed.inputs.batch.context_lens), len(mixed.inputs.token_ids)
            staging.upload_into(padding_record(num_rows, num_tokens), mixed.inputs.record)
            mixed.forward.launch()
        elif isinstance(self._model, ModelOfDealtExperts):
            self._model.join_step()
        else:
            raise ContractViolation(f"{type(self._model).__name__} has no join_step")
        staging.done.record()

    def _run(self, plan: StepPlan, staging: StagingBuffer) -> tuple[SampledTokens | DraftedTokens, list[ScoredPrompt]]:
        captured = self._captured_decode(plan)
        if self._drafted is not None:
            return self._run_drafted(self._drafted, plan, captured, staging)
        rows = self._run_mixed(plan, staging) if captured is None else self._replay_decode(plan, captured, staging)
        return self._sampled(plan, rows, staging), rows.prompts

    def _run_drafted(
        self, drafted: DraftedSteps, plan: StepPlan, captured: CapturedDecode | None, staging: StagingBuffer
    ) -> tuple[SampledTokens | DraftedTokens, list[ScoredPrompt]]:
        """Rows of one token each, where no grammar waits for drafts, are replayed as without a drafter."""
        if captured is None or not self._is_replayed(plan):
            return drafted.run(plan, staging)
        found: list[_Rows] = []

        def replay() -> CapturedDecode:
            found.append(self._replay_decode(plan, captured, staging))
            return captured

        drafted.run_decode(plan, replay)
        return self._sampled(plan, found[0], staging), []

    def _sampled(self, plan: StepPlan, rows: _Rows, staging: StagingBuffer) -> SampledTokens:
        return SampledTokens(
            rows=rows.sampled,
            places=rows.places,
            token_ids=staging.download(rows.token_ids),
            logprobs=None if rows.logprobs is None else download_logprobs(rows.logprobs, staging),
            tops=self._slots.logprobs[plan.slots[rows.sampled]],
        )

    def _is_replayed(self, plan: StepPlan) -> bool:
        """Whether an engine with a drafter replays a step as one without: a token a row, and no grammar that waits."""
        bucket = self._decode_bucket(plan)
        return bucket in self._decode and not plan.wants_drafts.any() and bool(plan.max_new.all())

    def _decode_bucket(self, plan: StepPlan) -> int | None:
        """Rows of the captured decode step that could replay a plan; None for other plans."""
        num_rows = self._sizes.decode_rows(plan)
        return bucket_of(ROW_BUCKETS, num_rows) if num_rows else None

    def _captured_decode(self, plan: StepPlan) -> CapturedDecode | None:
        bucket = self._decode_bucket(plan)
        if bucket is None:
            return None
        return (self._decode if self._adapter_rows.of(plan.slots) is None else self._adapted_decode).get(bucket)

    def _replay_decode(self, plan: StepPlan, captured: CapturedDecode, staging: StagingBuffer) -> _Rows:
        num_rows = plan.num_rows
        num_lines, padded_rows = captured.inputs.rows.shape
        rows = np.full((num_lines, padded_rows), -1, np.int32)
        rows[0, :num_rows], rows[1, :num_rows], rows[2, :num_rows] = plan.slots, plan.starts, plan.max_new
        if plan.token_masks:
            rows[MASK_LINE] = self._sampler.send_masks(
                ((row, words) for (row, _), words in plan.token_masks.items()), rows.shape[1], staging
            )
        if (adapter_slots := self._adapter_rows.of(plan.slots)) is not None:
            rows[DECODE_LINES, :num_rows] = adapter_slots
        staging.upload_into(rows, captured.inputs.rows)
        captured.forward.launch()
        sampling = captured.plain if self._slots.is_plain(plan) else captured.full
        sampling.graph.launch()
        sampled = np.flatnonzero(plan.max_new)
        return _Rows(sampled, sampled, sampling.token_ids, sampling.logprobs, [])

    def _run_mixed(self, plan: StepPlan, staging: StagingBuffer) -> _Rows:
        ends = np.cumsum(plan.counts)
        sampled = np.flatnonzero(plan.max_new)
        places = np.arange(len(sampled))
        last_tokens, slots, positions = staging.upload(
            (ends[sampled] - 1).astype(np.int32), plan.slots[sampled], (plan.starts + plan.counts)[sampled]
        )
        most_tokens = self._sizes.num_tokens(plan)
        captured, unscored = self._mixed.captured_for(plan.slots, most_tokens), self._slots.unscored(plan)
        prompts: list[ScoredPrompt] = []
        # A captured step, and log-probabilities of the prompt, take the hidden states of every token. Data-parallel
        # ranks know how many tokens the others have, not how many are last ones.
        is_whole = captured is not None or unscored or self._sizes.are_shared
        if not is_whole and isinstance(self._model, LastTokenModel):
            last = self._forward_last_tokens(self._model, plan, last_tokens, staging)
        else:
            _, hidden = self._mixed.run(RowColumns.of(plan), staging, least_tokens=most_tokens)
            prompts = self._score_prompts(plan, hidden, staging)
            last = self._ops.embedding(last_tokens, hidden) if len(sampled) else hidden[:0]
        if not len(sampled):
            return _Rows(sampled, places, slots, None, prompts)
        logits = self._model.logits(last)
        rows = SampledRows.make(len(sampled), slots=slots)
        self._slots.state.prepare_sampling(rows, positions)
        masks = [
            (place, plan.token_masks[row, 0])
            for place, row in enumerate(sampled.tolist())
            if (row, 0) in plan.token_masks
        ]
        mask = self._sampler.token_mask(masks, len(sampled), staging) if masks else None
        token_ids = self._sampler.sample(logits, rows, changes=self._slots.changes_logits(plan), mask=mask)
        top = int(self._slots.logprobs[plan.slots[sampled]].max())
        logprobs = self._ops.logprobs(logits, token_ids, top=top) if top >= 0 else None
        return _Rows(sampled, places, token_ids, logprobs, prompts)

    def _forward_last_tokens(self, model: LastTokenModel, plan: StepPlan, last: Array, staging: StagingBuffer) -> Array:
        """`[n, h]` hidden states of the last tokens of rows that sample."""
        inputs = self._mixed.inputs_of(RowColumns.of(plan), staging)
        self._slots.state.prepare_mixed(inputs)
        batch, sampled = inputs.batch, plan.max_new > 0
        if len(last):
            # The last tokens again, as rows of one token each: what the last layer computes is for them alone.
            ends, ones = (plan.starts + plan.counts)[sampled], np.ones(len(last), np.int32)
            columns = RowColumns(plan.slots[sampled], ends - 1, ones, np.zeros_like(ones), plan.token_ids[:0])
            rows = self._mixed.inputs_of(columns, staging)
            self._slots.state.prepare_mixed(rows)
            batch = rows.batch
        return model.forward_last_tokens(
            inputs.token_ids,
            batch=inputs.batch,
            kv_cache=self._kv_pool.layers,
            last=LogitsIndices(tokens=last, batch=batch),
        )

    def _score_prompts(self, plan: StepPlan, hidden: Array, staging: StagingBuffer) -> list[ScoredPrompt]:
        begins = np.cumsum(plan.counts) - plan.counts
        return [self._score(each, hidden[int(begins[each.row]) :], staging) for each in self._slots.unscored(plan)]

    def _score(self, unscored: UnscoredRow, hidden: Array, staging: StagingBuffer) -> ScoredPrompt:
        """Log-probabilities of a row's `targets`, which the first of `hidden` predict, chunk by chunk."""
        targets: Sequence[int] = unscored.targets
        (token_ids,) = staging.upload(np.asarray(targets, np.int32))
        chunks: list[HostLogprobs] = []
        for begin in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            chunk = slice(begin, min(begin + PROMPT_LOGPROB_ROWS, len(targets)))
            logits = self._model.logits(hidden[chunk])
            chunks.append(download_logprobs(self._ops.logprobs(logits, token_ids[chunk], top=unscored.top), staging))
        return ScoredPrompt(unscored.row, chunks, unscored.top)


def _sampling_states(
    ops: CudaOps, limits: WorkerLimits, drafter: SharedDrafter | None
) -> tuple[CudaSamplingState, DraftedSamplingState | None]:
    """How slots are sampled; the second is the first where there is a drafter."""
    sizes = slot_sizes(limits)
    if drafter is None:
        return CudaSamplingState(SlotState(ops.device, sizes), limits), None
    drafted = DraftedSamplingState(DraftedSlotState(ops.device, sizes, max_drafts=drafter.max_drafts), limits)
    return drafted, drafted
