"""`PlanCheck`: whether a plan keeps the contract, as far as plans alone tell; for schedulers of other packages.

    check(plan) ─► a worker runs it ─► applied(plan, result)

It remembers, per sequence slot, where the last row ended and which blocks are in its table, and per block, how many
live slots have it and which one writes it. All rows are looked at together: tens of microseconds for 256 rows.

Not seen here: whether ids, seeds and the KV of a shared prefix are right. The conformance kit's fake device sees that.
"""

from collections import deque
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from openinfer_core.request import RequestId
from openinfer_core.scheduling import SchedulerConfig, SlotStart, StepPlan, StepResult
from openinfer_engine.guard.adapter_check import AdapterCheck
from openinfer_engine.guard.block_users import BlockUsers
from openinfer_engine.guard.errors import BadPlan

_INT_COLUMNS = (
    "slots",
    "starts",
    "counts",
    "num_host_tokens",
    "max_new",
    "draft_counts",
    "new_blocks",
    "token_ids",
)
_NUM_ROW_COLUMNS = 6  # the first so many have one entry per row
_TABLE_COLUMNS = ("new_block_counts", "void_block_counts")
_INT32 = np.dtype(np.int32)

Slots: TypeAlias = NDArray[np.intp]


class PlanCheck:
    """Raises `BadPlan` at the first plan that breaks the contract; nothing is promised after that.

    Args:
        config: the scheduler's limits.
        num_token_ids: ids from here on are no tokens.
    """

    def __init__(self, config: SchedulerConfig, *, num_token_ids: int) -> None:
        self._config = config
        self._num_token_ids = num_token_ids
        self._num_tables = len(config.table_windows)
        num_slots = config.max_num_seqs
        self.owners: dict[int, RequestId] = {}  # live slot -> the request in it
        self._is_live = np.zeros(num_slots, np.bool_)
        self._has_sampled = np.zeros(num_slots, np.bool_)
        self._masked: set[int] = set()  # live slots whose request has a grammar
        self._ends = np.zeros(num_slots, np.int32)  # after the slot's last row, as if all drafts had been accepted
        self._drafts_in_flight = np.zeros(num_slots, np.int32)  # of the slot's rows that were not applied
        self._started_step = np.zeros(num_slots, np.int64)
        self._users = BlockUsers(config)
        self._adapters = AdapterCheck(config.max_adapters)
        self._in_flight: deque[StepPlan] = deque()
        self._next_step = 0

    # --- before a step ----------------------------------------------------------------------------------

    def check(self, plan: StepPlan) -> None:
        """Raises `BadPlan`: what is wrong with it, by name of the column."""
        self._check_columns(plan)
        for slot in plan.released:
            self._release(slot)
        self._adapters.check(plan)
        if plan.started:
            self._start(plan)
        slots: Slots = plan.slots.astype(np.intp)  # once: every look into a table would do so
        self._check_slots(plan, slots)
        has_sampled = self._has_sampled.take(slots)
        self._check_counts(plan, has_sampled)
        ends = self._check_positions(plan, slots)
        owners, first_positions = self._users.owners_of(slots), self._ends
        if self._users.has_windows:
            first_positions = self._ends - self._drafts_in_flight  # before the rows of this plan
            self._users.void(plan, owners, first_positions)
        elif plan.void_block_counts.any():
            raise BadPlan("void_block_counts is above 0, and no table has a window")
        self._ends[slots] = ends
        if len(plan.new_blocks):
            self._users.append(plan, owners, self._ends, first_positions)
        elif plan.new_block_counts.any():
            raise BadPlan(f"new_block_counts sums up to {int(plan.new_block_counts.sum())}; new_blocks has 0")
        self._users.check_room(slots, owners, ends)
        if not has_sampled.all():
            self._has_sampled[slots] = has_sampled | (plan.max_new > 0)
        if _largest(plan.max_new) > 1:
            self._drafts_in_flight[slots] += np.maximum(plan.max_new - 1, 0)
        if plan.state_restores or plan.state_snapshots:
            self._check_states(plan)
        self._in_flight.append(plan)
        self._next_step += 1

    def _check_columns(self, plan: StepPlan) -> None:
        _require(plan.step == self._next_step, "step {} was planned; the next one is {}", plan.step, self._next_step)
        num_rows = len(plan.slots)
        for index, name in enumerate(_INT_COLUMNS):
            column: Any = getattr(plan, name)
            if type(column) is not np.ndarray or column.dtype is not _INT32 or column.ndim != 1:
                _check_dtype(name, column)
            if index < _NUM_ROW_COLUMNS and len(column) != num_rows:
                raise BadPlan(f"{name} has {len(column)} entries for {num_rows} rows")
        _require(num_rows > 0, "a plan without rows, where None is right")
        shape = (self._num_tables, num_rows)
        for name in _TABLE_COLUMNS:
            column = getattr(plan, name)
            if type(column) is not np.ndarray or column.dtype is not _INT32 or column.ndim != 2:
                _check_dtype(name, column, num_axes=2)
            if column.shape != shape:
                raise BadPlan(f"{name} is of shape {column.shape}; [tables, rows] are {shape}")
        if _largest(plan.slots) > self._last:
            raise BadPlan(f"slots are 0 .. {self._last}; the plan names {_some(_outside(plan.slots, self._last))}")

    def _release(self, slot: int) -> None:
        _require(_is_index(slot, self._config.max_num_seqs), "slot {} is released; slots are 0 .. {}", slot, self._last)
        _require(slot in self.owners, "slot {} is released, and no sequence is in it", slot)
        del self.owners[slot]
        self._is_live[slot] = False
        self._masked.discard(slot)
        self._users.release(slot)

    @property
    def _last(self) -> int:
        return self._config.max_num_seqs - 1

    def _start(self, plan: StepPlan) -> None:
        rows = {slot: row for row, slot in enumerate(plan.slots.tolist())}
        for start in plan.started:
            slot, request_id = start.slot, start.request.request_id
            is_slot = _is_index(slot, self._config.max_num_seqs)
            _require(is_slot, "slot {} is started; slots are 0 .. {}", slot, self._last)
            _require(slot not in self.owners, "slot {} is started, and was not released by the sequence in it", slot)
            _require(slot in rows, "slot {} is started and has no row", slot)
            busy = any(slot in earlier.slots for earlier in self._in_flight)
            _require(not busy, "slot {} is started while a step in flight has a row of it", slot)
            _require(request_id not in self.owners.values(), "request {} is started in a second slot", request_id)
            self.owners[slot] = request_id
            self._is_live[slot] = True
            self._has_sampled[slot] = False
            if start.request.sampling.is_masked:
                self._masked.add(slot)
            self._started_step[slot] = plan.step
            self._ends[slot] = plan.starts[rows[slot]]
            self._drafts_in_flight[slot] = 0
            _check_begin(start, int(self._ends[slot]))

    def _check_slots(self, plan: StepPlan, slots: Slots) -> None:
        if np.maximum.reduce(np.bincount(slots)) > 1:
            raise BadPlan(f"slots {_some(np.flatnonzero(np.bincount(slots) > 1))} have more than one row")
        is_live = self._is_live.take(slots)
        if not is_live.all():
            raise BadPlan(f"slots {_some(slots[~is_live])} have rows, and no sequence was started in them")
        if self._masked:
            self._check_masked(slots)

    def _check_masked(self, slots: Slots) -> None:
        masked = slots[np.isin(slots, list(self._masked))]
        for earlier in self._in_flight:
            early = masked[np.isin(masked, earlier.slots[earlier.max_new > 0])]
            early = early[self._started_step[early] <= earlier.step]
            if len(early):
                raise BadPlan(f"slots {_some(early)} have a grammar, and a row while their last token is in flight")

    def _check_counts(self, plan: StepPlan, has_sampled: NDArray[np.bool_]) -> None:
        limit, counts, num_host, max_new = self._config.max_step_tokens, plan.counts, plan.num_host_tokens, plan.max_new
        # Before the sum, which might come round to a small number.
        if _largest(counts) > limit or np.add.reduce(counts) > limit:
            _check_rows(plan, counts < 1, "counts is below 1")
            num_tokens = sum(counts.tolist())
            raise BadPlan(f"{num_tokens} tokens in one step; max_step_tokens is {limit}")
        if not counts.all():
            _check_rows(plan, counts < 1, "counts is below 1")
        if len(plan.token_ids):
            self._check_host_ids(plan)
        elif num_host.any():
            raise BadPlan(f"num_host_tokens sums up to {int(num_host.sum())}; token_ids has 0")
        on_device = counts - num_host
        if _largest(max_new) > 1 or plan.draft_counts.any():
            self._check_drafts(plan)
            on_device -= plan.draft_counts
        if _largest(on_device) > 1:
            is_wrong = (on_device < 0) | (on_device > 1)
            _check_rows(plan, is_wrong, "counts differs from its ids by more than one on the device")
        never_sampled = on_device > has_sampled
        if never_sampled.any():
            _check_rows(plan, never_sampled, "no id was sampled in the slot to go on from")

    def _check_drafts(self, plan: StepPlan) -> None:
        max_new, drafts, most = plan.max_new, plan.draft_counts, self._config.max_drafts
        _check_rows(plan, max_new < 0, "max_new is negative")
        _check_rows(plan, max_new > plan.counts, "max_new is above counts")
        _check_rows(plan, drafts < 0, "draft_counts is negative")
        _check_rows(plan, drafts > most, f"draft_counts is above max_drafts, {most}")
        _check_rows(plan, drafts > np.maximum(max_new - 1, 0), "draft_counts is above max_new - 1")

    def _check_host_ids(self, plan: StepPlan) -> None:
        given, token_ids, last = plan.num_host_tokens, plan.token_ids, self._num_token_ids - 1
        _check_rows(plan, given < 0, "num_host_tokens is negative")
        if int(given.sum()) != len(token_ids):
            raise BadPlan(f"num_host_tokens sums up to {int(given.sum())}; token_ids has {len(token_ids)}")
        if _largest(token_ids) > last:
            raise BadPlan(f"token_ids are 0 .. {last}; the plan has {_some(_outside(token_ids, last))}")

    def _check_positions(self, plan: StepPlan, slots: Slots) -> NDArray[np.int32]:
        starts, expected = plan.starts, self._ends.take(slots)
        is_wrong = starts != expected
        if is_wrong.any():
            row = int(np.flatnonzero(is_wrong)[0])
            raise BadPlan(
                f"row {row} begins at position {int(starts[row])}; the last row of slot {int(slots[row])} ended at "
                f"{int(expected[row])}"
            )
        ends = starts + plan.counts
        longest = self._config.max_model_tokens
        if _largest(ends) > longest:
            raise BadPlan(f"a row ends at position {int(ends.max())}; max_model_tokens is {longest}")
        return ends

    def _check_states(self, plan: StepPlan) -> None:
        for copy in (*plan.state_restores, *plan.state_snapshots):
            num_state_slots = self._config.max_num_seqs + self._config.num_snapshots
            is_right = self._config.num_snapshots > 0 and all(
                _is_index(slot, num_state_slots) for slot in (copy.source, copy.target)
            )
            _require(
                is_right,
                "states are copied from slot {} to {}; this engine has {} state slots for copies",
                copy.source,
                copy.target,
                self._config.num_snapshots,
            )

    # --- after a step -----------------------------------------------------------------------------------

    def applied(self, plan: StepPlan, result: StepResult) -> None:
        """Lowers the bounds of rows whose drafts were not all accepted."""
        self._in_flight.popleft()
        if _largest(plan.max_new) <= 1:
            return
        still_there = self._started_step[plan.slots] <= plan.step
        has_drafts = still_there & (plan.max_new > 1)
        # A failed row's request ends; what its slot's bound is does not matter any more.
        self._ends[plan.slots] -= np.where(has_drafts, plan.max_new - result.new_counts, 0).astype(np.int32)
        self._drafts_in_flight[plan.slots] -= np.where(has_drafts, plan.max_new - 1, 0).astype(np.int32)


def _check_begin(start: SlotStart, position: int) -> None:
    num_known = len(start.request.prompt_token_ids) + len(start.output_token_ids)
    _require(
        0 <= position < num_known,
        "slot {} begins at position {}; its request has {} ids",
        start.slot,
        position,
        num_known,
    )


def _check_rows(plan: StepPlan, is_wrong: NDArray[np.bool_], what: str) -> None:
    if is_wrong.any():
        raise BadPlan(f"{what}, in the rows of slots {_some(plan.slots[is_wrong])}")


def _check_dtype(name: str, column: object, *, num_axes: int = 1) -> None:
    found = (getattr(column, "dtype", type(column).__name__), getattr(column, "ndim", 0))
    if found != (_INT32, num_axes):
        dimensions = "one-dimensional" if num_axes == 1 else "two-dimensional"
        raise BadPlan(f"{name} must be a {dimensions} array of int32; it is one of {found[0]} with {found[1]} axes")


def _largest(values: NDArray[np.int32]) -> int:
    # In one pass: as unsigned numbers, negative ones are beyond every limit.
    return int(np.maximum.reduce(values.view(np.uint32)))


def _outside(values: NDArray[np.int32], last: int) -> NDArray[np.int32]:
    return values[(values < 0) | (values > last)]


def _is_index(value: int, size: int) -> bool:
    return 0 <= value < size


def _some(values: NDArray[Any]) -> str:
    shown = ", ".join(str(int(value)) for value in values[:4])
    return f"{shown}, …" if len(values) > 4 else shown


def _require(condition: object, message: str, *values: object) -> None:
    if not condition:
        raise BadPlan(message.format(*values))
