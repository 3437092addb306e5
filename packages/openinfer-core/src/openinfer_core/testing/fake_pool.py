"""`FakePool`: the KV cache of a fake device, and the block tables that its sequences find their KV by.

Each position of each block holds the fake model's state there, a hash of the whole prefix, in the version of the table
whose layers wrote it. So a row that reads a block which was overwritten, was never written, or belongs to another salt
or another table, reads another state than it must.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from openinfer_core.scheduling import SchedulerConfig, StepPlan
from openinfer_core.testing import fake_model
from openinfer_core.testing.errors import ConformanceError, require
from openinfer_core.testing.fake_rows import FakeRow

_VOID = -1


@dataclass(slots=True)
class FakeTable:
    """The blocks of one sequence in one table, by place; those before `num_void` are gone."""

    blocks: list[int] = field(default_factory=list[int])
    num_void: int = 0

    def advance(self, num_void: int, new_blocks: Sequence[int], *, what: Callable[[], str]) -> None:
        require(
            num_void >= self.num_void, lambda: f"{what()}: {num_void} blocks are void, and {self.num_void} were before"
        )
        if num_void:
            self.num_void = num_void
            self.blocks += [_VOID] * (num_void - len(self.blocks))
            self.blocks[:num_void] = [_VOID] * num_void
        self.blocks += new_blocks


class FakePool:
    """What `num_blocks` blocks hold, and what rows write to and read from them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._size = config.block_size_tokens
        self._windows = config.table_windows
        self._max_num_blocks = config.num_blocks
        self._memory: dict[int, int] = {}  # block id * block size + offset -> state

    def read_block(self, block_id: int) -> tuple[int | None, ...]:
        return tuple(self._memory.get(block_id * self._size + offset) for offset in range(self._size))

    def write_block(self, block_id: int, content: tuple[int | None, ...]) -> None:
        for offset, state in enumerate(content):
            if state is None:
                self._memory.pop(block_id * self._size + offset, None)
            else:
                self._memory[block_id * self._size + offset] = state

    # --- plans ------------------------------------------------------------------------------------------

    def new_blocks(self, plan: StepPlan) -> list[list[list[int]]]:
        """The new blocks of each row, of each of its tables."""
        blocks = plan.new_blocks.tolist()
        outside = [block for block in blocks if not 0 <= block < self._max_num_blocks]
        require(not outside, f"blocks {outside} beyond the pool")
        first, rows = 0, [list[list[int]]() for _ in plan.slots]
        for counts in plan.new_block_counts.tolist():
            for row, count in zip(rows, counts, strict=True):
                row.append(blocks[first : first + count])
                first += count
        return rows

    def advance(self, row: FakeRow, tables: Sequence[FakeTable], void: list[int], new: list[list[int]]) -> None:
        """Takes what a plan says of a row's tables: void blocks first, then new ones."""
        for index, table in enumerate(tables):
            self._advance_table(row, index, table, void[index], new[index])

    def _advance_table(self, row: FakeRow, index: int, table: FakeTable, void: int, new: list[int]) -> None:
        table.advance(void, new, what=lambda: f"{row.what}, table {index}")
        first_read = self._first_read(index, row.start)
        require(
            void * self._size <= first_read,
            lambda: (
                f"{row.what}: its first {void} blocks of table {index} are void, and it reads that table from "
                f"position {first_read} on"
            ),
        )
        room = len(table.blocks) * self._size
        require(
            row.planned_start + row.count <= room,
            lambda: f"{row.what}: its {len(table.blocks)} blocks have room for {room} tokens in table {index}",
        )

    def _first_read(self, table: int, position: int) -> int:
        window = self._windows[table]
        return 0 if window is None else max(0, position - window + 1)

    # --- KV ---------------------------------------------------------------------------------------------

    def write(self, rows: Sequence[FakeRow], tables: Sequence[Sequence[FakeTable]]) -> None:
        """Writes what all rows of a step compute."""
        writers: dict[int, tuple[FakeRow, int]] = {}
        for row, row_tables in zip(rows, tables, strict=True):
            for index, table in enumerate(row_tables):
                writer = row, index
                for position, state in enumerate(row.kv, row.start):
                    place = self._place(table, position)
                    other = writers.setdefault(place, writer)
                    if other is not writer:
                        raise _conflict(writer, other)
                    self._memory[place] = _version(state, index)

    def check_context(self, row: FakeRow, tables: Sequence[FakeTable]) -> None:
        """Reads all that a row's positions see."""
        for index, table in enumerate(tables):
            for position in range(self._first_read(index, row.start), row.end):
                place = self._place(table, position)
                if self._memory.get(place) != _version(row.slot.states[position], index):
                    where = f"position {position} in block {place // self._size}"
                    where += f" of table {index}" if len(tables) > 1 else ""
                    raise ConformanceError(f"{row.what}: {where} holds {self._content(row, place, position)}")

    def _place(self, table: FakeTable, position: int) -> int:
        return table.blocks[position // self._size] * self._size + position % self._size

    def _content(self, row: FakeRow, place: int, position: int) -> str:
        if place not in self._memory:
            return "nothing"
        for index in range(len(self._windows)):
            if self._memory[place] == _version(row.slot.states[position], index):
                return f"the KV of table {index}"
        return "the KV of another prefix"


def _version(state: int, table: int) -> int:
    return fake_model.extend(state, table) if table else state


def _conflict(writer: tuple[FakeRow, int], other: tuple[FakeRow, int]) -> ConformanceError:
    (row, table), (other_row, other_table) = writer, other
    if row is other_row:
        return ConformanceError(f"{row.what}: tables {other_table} and {table} have the same block")
    return ConformanceError(f"{row.slot.what} and {other_row.slot.what} write to the same block in one step")
