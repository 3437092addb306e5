"""`FakeDevice`: executes step plans as a runner would, and notices every mistake in them.

Its KV cache holds, for each position of each block, the fake model's state there, that is a hash of the whole
prefix. A row that reads a block which another row has overwritten, was never written, or belongs to another
salt, reads another state and is caught, in the step in which it happens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openinfer_core.events import TokenLogprobs
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduling import SchedulerConfig, SlotStart, StepPlan, StepResult
from openinfer_core.testing import fake_model
from openinfer_core.testing.errors import ConformanceError, require
from openinfer_core.testing.fake_states import FakeStates

FAULT = "the fake device was told to fail this row"
_INT_COLUMNS = (
    "slots",
    "starts",
    "counts",
    "num_host_tokens",
    "max_new",
    "token_ids",
    "new_block_counts",
    "new_blocks",
)


@dataclass(slots=True)
class _Slot:
    request: GenerateRequest
    token_ids: list[int]  # given and sampled ids, by position
    states: list[int]  # the fake model's state at each of them
    blocks: list[int] = field(default_factory=list[int])
    end: int | None = None  # position after the last one computed; None before the first row
    num_sampled: int = 0  # how many of `token_ids` were sampled in this sequence slot

    @property
    def what(self) -> str:
        return f"request {self.request.request_id}"


class FakeDevice:
    """Runs plans one after the other. Any violation of the contract raises `ConformanceError`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._states = FakeStates(config) if config.num_snapshots else None
        self._memory: dict[int, int] = {}  # block id * block size + offset -> state
        self._slots: dict[int, _Slot] = {}
        self._seeds: dict[RequestId, int] = {}
        self._to_fail: set[RequestId] = set()
        self.steps = 0

    @property
    def seeds(self) -> Mapping[RequestId, int]:
        return self._seeds

    def fail_next_row(self, request_id: RequestId) -> None:
        self._to_fail.add(request_id)

    def read_block(self, block_id: int) -> tuple[int | None, ...]:
        size = self._config.block_size_tokens
        return tuple(self._memory.get(block_id * size + offset) for offset in range(size))

    def write_block(self, block_id: int, content: tuple[int | None, ...]) -> None:
        # As a copy from a KV tier does.
        size = self._config.block_size_tokens
        for offset, state in enumerate(content):
            if state is None:
                self._memory.pop(block_id * size + offset, None)
            else:
                self._memory[block_id * size + offset] = state

    @property
    def states(self) -> FakeStates:
        # Only a config with snapshots has recurrent states.
        if self._states is None:
            raise ConformanceError("this device has no recurrent states: num_snapshots is 0")
        return self._states

    def run(self, plan: StepPlan) -> StepResult:
        self._check_columns(plan)
        for start in plan.started:
            self._start(start, plan)
        self._begin_states(plan)
        rows = self._read_rows(plan)
        self._advance_states(plan, rows)
        self._write(rows)
        for row in rows:
            self._read_context(row)
        self.steps += 1
        return self._sample(rows)

    # --- columns ----------------------------------------------------------------------------------------

    def _check_columns(self, plan: StepPlan) -> None:
        config = self._config
        require(plan.step == self.steps, f"step {plan.step} was planned; the next one is {self.steps}")
        for name in _INT_COLUMNS:
            _check_column(plan, name, np.int32)
        num_rows = len(plan.slots)
        require(num_rows > 0, "a plan without rows; return None")
        for name in ("starts", "counts", "num_host_tokens", "max_new", "new_block_counts"):
            require(len(getattr(plan, name)) == num_rows, f"{name} has {len(getattr(plan, name))} of {num_rows} rows")
        require(num_rows <= config.max_num_seqs, f"{num_rows} rows; max_num_seqs is {config.max_num_seqs}")
        require(
            plan.num_tokens <= config.max_step_tokens,
            f"{plan.num_tokens} tokens in one step; max_step_tokens is {config.max_step_tokens}",
        )
        slots = plan.slots.tolist()
        require(len(set(slots)) == num_rows, f"a slot has two rows in one step: {slots}")
        require(all(0 <= slot < config.max_num_seqs for slot in slots), f"slots {slots} beyond max_num_seqs")
        require(plan.num_host_tokens.sum() == len(plan.token_ids), "token_ids is not as long as num_host_tokens say")
        require(plan.new_block_counts.sum() == len(plan.new_blocks), "new_blocks is not as long as its counts say")
        blocks = plan.new_blocks.tolist()
        require(all(0 <= block < config.num_blocks for block in blocks), f"blocks {blocks} beyond the pool")

    # --- rows -------------------------------------------------------------------------------------------

    def _start(self, start: SlotStart, plan: StepPlan) -> None:
        request = start.request
        require(start.slot in plan.slots, f"slot {start.slot} is started without a row in the step")
        right = fake_model.outcome(request, max_model_tokens=self._config.max_model_tokens).token_ids
        outputs = start.output_token_ids
        what = f"request {request.request_id}"
        require(outputs == right[: len(outputs)], f"{what} starts with outputs {outputs}; the model gave {right}")
        self._check_seed(start)
        token_ids = [*request.prompt_token_ids, *outputs]
        self._slots[start.slot] = _Slot(request, token_ids, fake_model.states(request, token_ids))

    def _check_seed(self, start: SlotStart) -> None:
        request = start.request
        asked = request.sampling.seed
        seed = self._seeds.setdefault(request.request_id, start.seed if asked is None else asked)
        require(0 <= start.seed < 2**64, f"seed {start.seed} is no unsigned 64-bit number")
        require(start.seed == seed, f"request {request.request_id} starts with seed {start.seed}; it has {seed}")

    def _read_rows(self, plan: StepPlan) -> "list[_Row]":
        rows: list[_Row] = []
        token_ids, new_blocks = plan.token_ids.tolist(), plan.new_blocks.tolist()
        num_ids = num_blocks = 0
        for index, slot_index in enumerate(plan.slots.tolist()):
            slot = self._slots.get(slot_index)
            if slot is None:
                raise ConformanceError(f"slot {slot_index} has a row and was never started")
            given = token_ids[num_ids : num_ids + int(plan.num_host_tokens[index])]
            added = new_blocks[num_blocks : num_blocks + int(plan.new_block_counts[index])]
            num_ids, num_blocks = num_ids + len(given), num_blocks + len(added)
            start, count = int(plan.starts[index]), int(plan.counts[index])
            row = _Row(slot, start, start + count, given, is_sampled=bool(plan.max_new[index]))
            slot.blocks += added
            self._check_row(row)
            slot.end = row.end
            rows.append(row)
        return rows

    def _check_row(self, row: "_Row") -> None:
        slot, what = row.slot, f"{row.slot.what}, row {row.start}:{row.end}"
        known = len(slot.token_ids)
        require(row.start < row.end, f"{what}: no tokens")
        if slot.end is None:
            require(row.start >= 0, f"{what}: begins before the sequence")
        else:
            require(row.start == slot.end, f"{what}: its last row ended at {slot.end}")
        require(row.end <= known, f"{what}: only {known} ids are there")
        from_device = row.end - row.start - len(row.given)
        require(from_device in (0, 1), f"{what}: {from_device} ids are to come from the device, at most 1 can")
        if from_device:
            is_there = slot.num_sampled > 0 and row.start == known - 1
            require(is_there, f"{what}: no id of that position was sampled in the slot")
        right = slot.token_ids[row.start + from_device : row.end]
        require(row.given == right, f"{what}: ids {row.given} are given; its ids are {right}")
        if row.is_sampled:
            require(row.end == known, f"{what}: samples position {row.end}, whose id is known")
        room = len(slot.blocks) * self._config.block_size_tokens
        require(row.end <= room, f"{what}: its {len(slot.blocks)} blocks have room for {room} tokens")
        require(row.end <= self._config.max_model_tokens, f"{what}: beyond max_model_tokens")

    # --- KV ---------------------------------------------------------------------------------------------

    def _write(self, rows: "list[_Row]") -> None:
        writers: dict[int, _Row] = {}
        for row in rows:
            for position in range(row.start, row.end):
                place = self._place(row.slot, position)
                other = writers.setdefault(place, row)
                require(other is row, f"{row.slot.what} and {other.slot.what} write to the same block in one step")
                self._memory[place] = row.slot.states[position]

    def _read_context(self, row: "_Row") -> None:
        for position in range(row.end):
            place = self._place(row.slot, position)
            if self._memory.get(place) != row.slot.states[position]:
                block = place // self._config.block_size_tokens
                raise ConformanceError(
                    f"{row.slot.what}, row {row.start}:{row.end}: position {position} in block {block} holds "
                    f"{'nothing' if place not in self._memory else 'the KV of another prefix'}"
                )

    def _place(self, slot: _Slot, position: int) -> int:
        size = self._config.block_size_tokens
        return slot.blocks[position // size] * size + position % size

    # --- states -----------------------------------------------------------------------------------------

    def _begin_states(self, plan: StepPlan) -> None:
        if self._states is not None:
            self._states.begin(plan)
        else:
            copies = len(plan.state_restores) + len(plan.state_snapshots)
            require(not copies, f"{copies} copies of states; num_snapshots is 0")

    def _advance_states(self, plan: StepPlan, rows: "list[_Row]") -> None:
        if self._states is None:
            return
        for slot, row in zip(plan.slots.tolist(), rows, strict=True):
            what = f"{row.slot.what}, row {row.start}:{row.end}"
            self._states.consume(slot, row.slot.states, row.start, row.end, what=what)
        self._states.keep(plan)

    # --- results ----------------------------------------------------------------------------------------

    def _sample(self, rows: "list[_Row]") -> StepResult:
        token_ids = np.full(len(rows), -1, np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        failed_rows: dict[int, str] = {}
        for index, row in enumerate(rows):
            request = row.slot.request
            if request.request_id in self._to_fail:
                self._to_fail.remove(request.request_id)
                failed_rows[index] = FAULT
            if row.is_sampled:
                token_id = row.slot_samples()
                if index not in failed_rows:
                    token_ids[index] = token_id
                if request.sampling.logprobs is not None:
                    logprobs[index] = _marked(row.end)
            if request.sampling.prompt_logprobs is not None:
                last = min(row.end, len(request.prompt_token_ids) - 1)
                prompt_logprobs[index] = tuple(_marked(position + 1) for position in range(row.start, last))
        return StepResult.of_single_tokens(
            token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs, failed_rows=failed_rows
        )


@dataclass(slots=True)
class _Row:
    slot: _Slot
    start: int
    end: int
    given: list[int]
    is_sampled: bool

    def slot_samples(self) -> int:
        slot = self.slot
        num_outputs = len(slot.token_ids) - len(slot.request.prompt_token_ids)
        token_id = fake_model.next_token(slot.request, slot.states[-1], num_outputs=num_outputs)
        slot.token_ids.append(token_id)
        slot.states.append(fake_model.extend(slot.states[-1], token_id))
        slot.num_sampled += 1
        return token_id


def _check_column(plan: StepPlan, name: str, dtype: Any) -> None:
    column: Any = getattr(plan, name)
    kind = (getattr(column, "dtype", None), getattr(column, "ndim", None))
    right = (np.dtype(dtype), 1)
    if kind != right:  # what an array looks like is not written down for nothing: this is asked of every step
        raise ConformanceError(f"{name} must be a one-dimensional array of {right[0].name}; it is {column!r}")


def _marked(position: int) -> TokenLogprobs:
    # The rank tells which position they are of.
    return TokenLogprobs(-1.0, position, (), ())
