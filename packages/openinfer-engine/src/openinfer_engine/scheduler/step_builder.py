"""A step while it is planned, and what the scheduler remembers of it until its result is applied."""

from array import array
from collections.abc import Generator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from openinfer_core.scheduling import AdapterLoad, Int32Column, SlotStart, StateCopy, StepPlan
from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.windows import Windows
from openinfer_kv_cache import StateSlotCopy


@dataclass(slots=True, eq=False)
class StepInFlight:
    """What `apply` needs to know of a planned step; lists in row order."""

    step: int
    planned_s: float
    rows: list[Sequence]
    starts: list[int]
    ends: list[int]  # position after each row's last one
    max_new: list[int]  # tokens that each row may yield
    faults: dict[int, str]  # row -> why its request fails whatever the step gives
    decode_tokens: int  # positions of the first rows, which go on from the last id of their slot; drafts included
    # row -> the copy of its states after it
    snapshots: dict[int, StateSlotCopy] = field(default_factory=dict[int, StateSlotCopy])
    # snapshots that the step restores from, and that no tier may fill before it has run
    holds: list[StateSlotCopy] = field(default_factory=list[StateSlotCopy])

    @property
    def has_chunks(self) -> bool:
        """Whether it has rows of prompts, too."""
        return sum(self.ends) - sum(self.starts) != self.decode_tokens

    @property
    def decode_rows(self) -> int:
        """Rows, from the first, that go on from the last id of their slot."""
        if not self.has_chunks:
            return len(self.rows)
        ends = accumulate(end - start for start, end in zip(self.starts, self.ends, strict=True))
        return sum(1 for _ in takewhile(lambda end: end <= self.decode_tokens, ends))


class StepBuilder:
    """The columns of one step, grown row by row. Lists, because a NumPy scalar per row costs more than the row."""

    __slots__ = (
        "budget_tokens",
        "counts",
        "decode_rows",
        "decode_tokens",
        "draft_counts",
        "ends",
        "faults",
        "grown_rows",
        "holds",
        "max_new",
        "num_host_tokens",
        "restores",
        "rows",
        "slots",
        "snapshots",
        "started",
        "starts",
        "token_ids",
        "wants_drafts",
    )

    def __init__(self, budget_tokens: int, *, wants_drafts: bool = False) -> None:
        self.budget_tokens = budget_tokens  # what is left of the step's token budget
        self.wants_drafts = wants_drafts  # whether rows with a grammar ask for the drafts after their last token
        self.decode_rows = self.decode_tokens = 0
        self.rows: list[Sequence] = []
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.counts: list[int] = []
        self.num_host_tokens: list[int] = []
        self.max_new: list[int] = []
        self.draft_counts: list[int] = []  # of decode rows, as far as the last that has any
        self.token_ids = array("I")
        self.grown_rows: list[int] = []  # whose sequences may have blocks that no row was sent with; in any order
        self.started: list[SlotStart] = []
        self.restores: list[StateCopy] = []
        self.snapshots: dict[int, StateSlotCopy] = {}
        self.holds: list[StateSlotCopy] = []
        self.faults: dict[int, str] = {}

    @contextmanager
    def limited_to(self, num_tokens: int) -> Generator[None]:
        """Plans with so much of the budget at most."""
        kept_tokens = max(0, self.budget_tokens - num_tokens)
        self.budget_tokens -= kept_tokens
        yield
        self.budget_tokens += kept_tokens

    def add_decode_row(self, sequence: Sequence, new_blocks: ListLike[int]) -> None:
        """Plans the position whose input id was sampled last in the slot; `close_decode_rows` fills in the rest."""
        start = sequence.computed_tokens
        end = start + 1
        self.slots.append(sequence.slot)
        self.starts.append(start)
        self.ends.append(end)
        if new_blocks:
            self.grown_rows.append(len(self.rows))
        self.rows.append(sequence)
        sequence.computed_tokens = end
        if end < sequence.final_tokens:
            sequence.target_tokens = end + 1
        sequence.rows_in_flight += 1

    def close_decode_rows(self) -> None:
        num_rows = self.decode_rows = self.decode_tokens = len(self.rows)
        self.counts = [1] * num_rows
        self.num_host_tokens = [0] * num_rows
        self.max_new = [1] * num_rows
        self.budget_tokens -= num_rows

    def add_drafts(self, row: int, num_drafts: int) -> None:
        """Drafts for a decode row, in row order; with a grammar those that the host has."""
        sequence = self.rows[row]
        end = self.ends[row] = self.ends[row] + num_drafts
        self.counts[row] += num_drafts
        self.max_new[row] += num_drafts
        if sequence.is_masked:
            self.num_host_tokens[row] = num_drafts
            self.token_ids.extend(sequence.drafts[:num_drafts])
        else:
            self.draft_counts += [0] * (row - len(self.draft_counts))
            self.draft_counts.append(num_drafts)
        self.decode_tokens += num_drafts
        self.budget_tokens -= num_drafts
        sequence.drafts_in_flight += num_drafts
        sequence.computed_tokens = end
        sequence.target_tokens = min(end + 1, sequence.final_tokens)

    def add_chunk(self, sequence: Sequence) -> int:
        """Plans as many of the sequence's given ids as budget and blocks allow, at least one; returns how many."""
        start = sequence.computed_tokens
        end = min(sequence.given_tokens, start + self.budget_tokens, sequence.capacity_tokens)
        # States are copied after a step, so a row ends where they are to be kept.
        end = min([end, *(position for position in sequence.snapshot_positions if position > start)])
        samples = end == sequence.given_tokens and sequence.samples
        self.grown_rows.append(len(self.rows))
        self.rows.append(sequence)
        self.slots.append(sequence.slot)
        self.starts.append(start)
        self.ends.append(end)
        self.counts.append(end - start)
        self.num_host_tokens.append(end - start)
        self.max_new.append(int(samples))
        self.token_ids.extend(sequence.kv.token_ids[start:end])
        self.budget_tokens -= end - start
        sequence.computed_tokens = end
        if samples and end < sequence.final_tokens:
            sequence.target_tokens = end + 1
        sequence.rows_in_flight += 1
        return end - start

    def build(
        self,
        step: int,
        *,
        planned_s: float,
        released: tuple[int, ...],
        adapter_loads: tuple[AdapterLoad, ...],
        num_tables: int,
        windows: Windows | None,
    ) -> tuple[StepPlan, StepInFlight]:
        new_block_counts, new_blocks = self._block_columns(num_tables)
        plan = StepPlan(
            step=step,
            slots=np.array(self.slots, np.int32),
            starts=np.array(self.starts, np.int32),
            counts=np.array(self.counts, np.int32),
            num_host_tokens=np.array(self.num_host_tokens, np.int32),
            max_new=np.array(self.max_new, np.int32),
            token_ids=np.frombuffer(self.token_ids, np.int32),
            new_block_counts=new_block_counts,
            new_blocks=new_blocks,
            started=tuple(self.started),
            released=released,
            adapter_loads=adapter_loads,
            state_restores=tuple(self.restores),
            state_snapshots=tuple(StateCopy(source=c.source, target=c.target) for c in self.snapshots.values()),
            **self._seldom_columns(windows),
        )
        record = StepInFlight(
            step=step,
            planned_s=planned_s,
            rows=self.rows,
            starts=self.starts,
            ends=self.ends,
            max_new=self.max_new,
            snapshots=self.snapshots,
            holds=self.holds,
            faults=self.faults,
            decode_tokens=self.decode_tokens,
        )
        return plan, record

    def _block_columns(self, num_tables: int) -> tuple[Int32Column, Int32Column]:
        counts = np.zeros((num_tables, len(self.rows)), np.int32)
        new_blocks: list[int] = []
        # Drafts come after the rows, and may let one grow again.
        grown_rows = sorted(set(self.grown_rows)) if self.wants_drafts else self.grown_rows
        for table in range(num_tables):
            for row in grown_rows:
                added = self.rows[row].take_unsent_blocks(table)
                counts[table, row] = len(added)
                new_blocks += added
        return counts, np.array(new_blocks, np.int32)

    def _seldom_columns(self, windows: Windows | None) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        if windows is not None:
            columns["void_block_counts"] = windows.void_counts(self.slots)
        if self.draft_counts:
            columns["draft_counts"] = np.zeros(len(self.rows), np.int32)
            columns["draft_counts"][: len(self.draft_counts)] = self.draft_counts
        if self.wants_drafts:
            columns["wants_drafts"] = np.array([sequence.is_masked for sequence in self.rows], np.bool_)
        return columns
