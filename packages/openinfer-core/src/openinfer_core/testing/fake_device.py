"""`FakeDevice`: executes step plans as a runner would, and notices every mistake in them.

Its KV cache (`fake_pool.py`) holds, for each position of each block, the fake model's state there, that is a hash of
the whole prefix. A row that reads a block which another row has overwritten, was never written, or belongs to another
salt or another table, reads another state and is caught, in the step in which it happens.

With drafts it alone knows how long a sequence is: rows are computed from the true position, what a rejected draft
leaves in the cache is the state of a wrong prefix, and a planned start must be the exact upper bound.
"""

from collections.abc import Mapping
from itertools import chain, repeat, takewhile
from typing import Any

import numpy as np

from openinfer_core.events import TokenLogprobs
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduling import SchedulerConfig, SlotStart, StepPlan, StepResult
from openinfer_core.testing import fake_model
from openinfer_core.testing.errors import ConformanceError, require
from openinfer_core.testing.fake_drafter import FakeDrafter
from openinfer_core.testing.fake_grammar import allowed_by
from openinfer_core.testing.fake_pool import FakePool, FakeTable
from openinfer_core.testing.fake_rows import FakeRow, FakeSlot, check_row
from openinfer_core.testing.fake_states import FakeStates

FAULT = "the fake device was told to fail this row"
_PADDING = -2  # the id of a draft that the device does not have; no drafter gives it
_ROW_COLUMNS = {
    "slots": np.int32,
    "starts": np.int32,
    "counts": np.int32,
    "num_host_tokens": np.int32,
    "max_new": np.int32,
    "draft_counts": np.int32,
    "wants_drafts": np.bool_,
}


class FakeDevice:
    """Runs plans one after the other. Any violation of the contract raises `ConformanceError`.

    Args:
        config: the scheduler's.
        drafter: leaves drafts in a slot after each row that samples; without one there are none.
        pool: its KV cache; one of its own without.
    """

    def __init__(
        self, config: SchedulerConfig, *, drafter: FakeDrafter | None = None, pool: FakePool | None = None
    ) -> None:
        self._config = config
        self._drafter = drafter
        self._states = FakeStates(config) if config.num_snapshots else None
        self._pool = pool or FakePool(config)
        self._slots: dict[int, FakeSlot] = {}
        self._tables: dict[int, list[FakeTable]] = {}  # of the sequence in each slot
        self._seeds: dict[RequestId, int] = {}
        self._started: dict[RequestId, GenerateRequest] = {}
        self._to_fail: set[RequestId] = set()
        self.steps = 0

    @property
    def seeds(self) -> Mapping[RequestId, int]:
        return self._seeds

    def fail_next_row(self, request_id: RequestId) -> None:
        self._to_fail.add(request_id)

    def read_block(self, block_id: int) -> tuple[int | None, ...]:
        return self._pool.read_block(block_id)

    def write_block(self, block_id: int, content: tuple[int | None, ...]) -> None:
        # As a copy from a KV tier does.
        self._pool.write_block(block_id, content)

    @property
    def states(self) -> FakeStates:
        # Only a config with snapshots has recurrent states.
        if self._states is None:
            raise ConformanceError("this device has no recurrent states: num_snapshots is 0")
        return self._states

    def run(self, plan: StepPlan, *, num_applied: int | None = None) -> StepResult:
        """Executes a plan.

        Args:
            plan: the next step.
            num_applied: steps that were applied when it was planned; by default all before it.
        """
        self._check_columns(plan)
        for slot in plan.released:
            require(self._slots.pop(slot, None), f"slot {slot} is released; no sequence is in it")
        for start in plan.started:
            self._start(start, plan)
        self._begin_states(plan)
        rows = self._read_rows(plan, plan.step if num_applied is None else num_applied)
        self._advance_states(plan, rows)
        tables = [self._tables[slot] for slot in plan.slots.tolist()]
        self._pool.write(rows, tables)
        for row, row_tables in zip(rows, tables, strict=True):
            self._pool.check_context(row, row_tables)
        self.steps += 1
        return self._result(plan, rows)

    # --- columns ----------------------------------------------------------------------------------------

    def _check_columns(self, plan: StepPlan) -> None:
        config = self._config
        require(plan.step == self.steps, lambda: f"step {plan.step} was planned; the next one is {self.steps}")
        _check_column(plan, "token_ids", np.int32)
        _check_column(plan, "new_blocks", np.int32)
        num_rows = len(plan.slots)
        require(num_rows > 0, "a plan without rows; return None")
        for name, dtype in _ROW_COLUMNS.items():
            _check_column(plan, name, dtype)
            length = len(getattr(plan, name))
            if length != num_rows:
                raise ConformanceError(f"{name} has {length} of {num_rows} rows")
        for name in ("new_block_counts", "void_block_counts"):
            _check_column(plan, name, np.int32, num_axes=2)
            shape, right = getattr(plan, name).shape, (len(config.table_windows), num_rows)
            if shape != right:
                raise ConformanceError(f"{name} is of shape {shape}; [tables, rows] are {right}")
        require(num_rows <= config.max_num_seqs, lambda: f"{num_rows} rows; max_num_seqs is {config.max_num_seqs}")
        require(
            plan.num_tokens <= config.max_step_tokens,
            lambda: f"{plan.num_tokens} tokens in one step; max_step_tokens is {config.max_step_tokens}",
        )
        slots = plan.slots.tolist()
        require(len(set(slots)) == num_rows, lambda: f"a slot has two rows in one step: {slots}")
        require(all(0 <= slot < config.max_num_seqs for slot in slots), lambda: f"slots {slots} beyond max_num_seqs")
        require(plan.num_host_tokens.sum() == len(plan.token_ids), "token_ids is not as long as num_host_tokens say")
        require(plan.new_block_counts.sum() == len(plan.new_blocks), "new_blocks is not as long as its counts say")
        require((plan.new_block_counts >= 0).all(), "new_block_counts has negative ones")

    # --- rows -------------------------------------------------------------------------------------------

    def _start(self, start: SlotStart, plan: StepPlan) -> None:
        request = start.request
        require(start.slot in plan.slots, lambda: f"slot {start.slot} is started without a row in the step")
        owner = self._slots.get(start.slot)
        require(owner is None, lambda: f"slot {start.slot} is started; {owner and owner.what} was not released from it")
        right = fake_model.outcome(request, max_model_tokens=self._config.max_model_tokens).token_ids
        outputs = start.output_token_ids
        what = f"request {request.request_id}"
        require(
            outputs == right[: len(outputs)], lambda: f"{what} starts with outputs {outputs}; the model gave {right}"
        )
        self._check_seed(start)
        token_ids = [*request.prompt_token_ids, *outputs]
        self._tables[start.slot] = [FakeTable() for _ in self._config.table_windows]
        self._slots[start.slot] = FakeSlot(request, token_ids, fake_model.states(request, token_ids))

    def _check_seed(self, start: SlotStart) -> None:
        request = start.request
        asked = request.sampling.seed
        if self._started.get(request.request_id) is not request:
            # Another one: clients of one engine may use the number of a request that has ended.
            self._started[request.request_id] = request
            self._seeds.pop(request.request_id, None)
        seed = self._seeds.setdefault(request.request_id, start.seed if asked is None else asked)
        require(0 <= start.seed < 2**64, lambda: f"seed {start.seed} is no unsigned 64-bit number")
        require(
            start.seed == seed, lambda: f"request {request.request_id} starts with seed {start.seed}; it has {seed}"
        )

    def _read_rows(self, plan: StepPlan, num_applied: int) -> list[FakeRow]:
        rows: list[FakeRow] = []
        token_ids, num_ids = plan.token_ids.tolist(), 0
        new_blocks, void = self._pool.new_blocks(plan), plan.void_block_counts.T.tolist()
        columns = (plan.slots, plan.starts, plan.counts, plan.num_host_tokens, plan.draft_counts, plan.max_new)
        for index, (slot_index, start, count, num_given, draft_count, max_new) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            slot = self._slots.get(slot_index)
            if slot is None:
                raise ConformanceError(f"slot {slot_index} has a row and was never started")
            given = token_ids[num_ids : num_ids + num_given]
            num_ids += len(given)
            slot.rejected = {step: count for step, count in slot.rejected.items() if step >= num_applied}
            row = FakeRow(
                slot,
                planned_start=start,
                start=start - sum(slot.rejected.values()),
                count=count,
                host_ids=given,
                draft_count=draft_count,
                max_new=max_new,
                kv=[],
                masks=_masks(plan, index, max_new),
            )
            self._pool.advance(row, self._tables[slot_index], void[index], new_blocks[index])
            check_row(row, self._config)
            self._compute(row, plan.step)
            rows.append(row)
        return rows

    def _compute(self, row: FakeRow, step: int) -> None:
        slot = row.slot
        host_drafts = row.host_ids[len(row.host_ids) - (row.num_drafts - row.draft_count) :]
        drafts = [*host_drafts, *slot.drafts[: row.draft_count]]
        row.num_compared = len(drafts)
        drafts += [_PADDING] * (row.num_drafts - len(drafts))
        row.kv = slot.states[row.start : row.known_end]
        for draft in drafts:
            row.kv.append(fake_model.extend(row.kv[-1], draft))
        if row.max_new:
            self._sample(row, drafts)
            slot.rejected[step] = row.max_new - len(row.new_ids)
        slot.end = row.end

    def _sample(self, row: FakeRow, drafts: list[int]) -> None:
        slot = row.slot
        for draft, allowed in zip([*drafts, None], chain(row.masks, repeat(fake_model.ALL_TOKENS)), strict=False):
            token_id = fake_model.next_token(
                slot.request, slot.states[-1], num_outputs=slot.num_outputs, allowed=allowed
            )
            row.new_ids.append(token_id)
            slot.token_ids.append(token_id)
            slot.states.append(fake_model.extend(slot.states[-1], token_id))
            if token_id != draft:
                break
        slot.num_sampled += len(row.new_ids)
        if self._drafter is not None:
            slot.drafts = self._drafter.draft(slot.request, slot.states[-1], num_outputs=slot.num_outputs)

    # --- states -----------------------------------------------------------------------------------------

    def _begin_states(self, plan: StepPlan) -> None:
        if self._states is not None:
            self._states.begin(plan)
        else:
            copies = len(plan.state_restores) + len(plan.state_snapshots)
            require(not copies, lambda: f"{copies} copies of states; num_snapshots is 0")

    def _advance_states(self, plan: StepPlan, rows: list[FakeRow]) -> None:
        if self._states is None:
            return
        for slot, row in zip(plan.slots.tolist(), rows, strict=True):
            # Of drafts only those that were accepted are consumed: how a device sees to that is its own affair.
            self._states.consume(slot, row.slot.states, row.start, row.end, what=row.what)
        self._states.keep(plan)

    # --- results ----------------------------------------------------------------------------------------

    def _result(self, plan: StepPlan, rows: list[FakeRow]) -> StepResult:
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        next_drafts: dict[int, tuple[int, ...]] = {}
        failed_rows: dict[int, str] = {}
        for index, row in enumerate(rows):
            request = row.slot.request
            if request.request_id in self._to_fail:
                self._to_fail.remove(request.request_id)
                failed_rows[index] = FAULT
            elif row.max_new:
                if request.sampling.logprobs is not None:
                    positions = range(row.known_end, row.known_end + len(row.new_ids))
                    logprobs[index] = tuple(map(_marked, positions))
                if plan.wants_drafts[index]:
                    next_drafts[index] = tuple(takewhile(_is_token_id, row.slot.drafts[: self._config.max_drafts]))
            if request.sampling.prompt_logprobs is not None:
                last = min(row.known_end, len(request.prompt_token_ids) - 1)
                prompt_logprobs[index] = tuple(_marked(position + 1) for position in range(row.start, last))
        new_ids = [[] if index in failed_rows else row.new_ids for index, row in enumerate(rows)]
        return StepResult(
            new_counts=np.array([len(token_ids) for token_ids in new_ids], np.int32),
            token_ids=np.array([token_id for token_ids in new_ids for token_id in token_ids], np.int32),
            draft_counts=np.array([row.num_compared for row in rows], np.int32),
            next_drafts=next_drafts,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed_rows=failed_rows,
        )


def _check_column(plan: StepPlan, name: str, dtype: Any, *, num_axes: int = 1) -> None:
    column: Any = getattr(plan, name)
    kind = (getattr(column, "dtype", None), getattr(column, "ndim", None))
    right = (np.dtype(dtype), num_axes)
    if kind != right:  # what an array looks like is not written down for nothing: this is asked of every step
        dimensions = "one-dimensional" if num_axes == 1 else "two-dimensional"
        raise ConformanceError(f"{name} must be a {dimensions} array of {right[0].name}; it is {column!r}")


def _masks(plan: StepPlan, row: int, max_new: int) -> list[int]:
    if not plan.token_masks:
        return []
    places = takewhile(plan.token_masks.__contains__, ((row, position) for position in range(max_new)))
    return [allowed_by(plan.token_masks[place]) for place in places]


def _is_token_id(token_id: int) -> bool:
    return 0 <= token_id < fake_model.NUM_TOKEN_IDS


def _marked(position: int) -> TokenLogprobs:
    # The rank tells which position they are of.
    return TokenLogprobs(-1.0, position, (), ())
