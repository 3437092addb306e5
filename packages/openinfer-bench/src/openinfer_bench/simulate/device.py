"""A GPU that is none: steps run on a `FakeDevice`, take the time that a GPU would, and leave their KV in real bytes.

Each position's KV is the state of the fake model there. Whatever a tier brings back for another prefix, salt or moment
is another number, and the row that reads it is caught. It is there many times over: most bytes of a store must be KV,
as they are of a real one, or what damages them would mostly hit padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from openinfer_core.scheduling import SchedulerConfig, StepPlan, StepResult
from openinfer_core.testing.errors import ConformanceError
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_core.testing.fake_pool import FakePool, FakeTable
from openinfer_core.testing.fake_rows import FakeRow
from openinfer_core.testing.simulation.world import World
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, PagedGroup, PagedTensor

_COPIES = 16
_STATE_BYTES = 8 * _COPIES
_WHOLE_CHECK_STEPS = 32  # between two looks at all of a context; its last two blocks are looked at in every step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What a step takes: `base_s + rows * row_s + tokens * token_s`. The defaults are Qwen3-4B's on an H200."""

    base_s: float = 2.6e-3
    row_s: float = 45e-6
    token_s: float = 12.5e-6

    def of(self, plan: StepPlan) -> float:
        return self.base_s + len(plan.slots) * self.row_s + plan.num_tokens * self.token_s


def layout_of(block_size_tokens: int) -> KvLayout:
    """The layout whose blocks a `BytePool` has."""
    tensor = PagedTensor(name="state", num_heads=1, head_dim=_STATE_BYTES, dtype=KvDtype.UINT8)
    spec = KvSpec(model_tag="fake-model", paged=(PagedGroup(name="fake", num_layers=1, tensors=(tensor,)),))
    return KvLayout.from_spec(spec, block_size_tokens=block_size_tokens)


class BytePool(FakePool):
    """A `FakePool` whose blocks are memory, as tiers copy it: `states`, uint64 `[num_blocks * block_size, copies]`."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.states = np.zeros((config.num_blocks * config.block_size_tokens, _COPIES), np.uint64)
        self._num_checks = 0

    @property
    def blocks(self) -> list[memoryview]:
        """By block id."""
        whole = self.states.reshape(-1).view(np.uint8).data
        size = self._size * _STATE_BYTES
        return [whole[begin : begin + size] for begin in range(0, len(whole), size)]

    def write(self, rows: Sequence[FakeRow], tables: Sequence[Sequence[FakeTable]]) -> None:
        places: list[int] = []
        states: list[int] = []
        for row, (table,) in zip(rows, tables, strict=True):
            places += self._places(table, row.start, row.start + len(row.kv))
            states += row.kv
        if len(set(places)) < len(places):
            what = ", ".join(row.what for row in rows)
            raise ConformanceError(f"two of these rows write to the same block in one step: {what}")
        self.states[places] = np.array(states, np.uint64)[:, None]

    def check_context(self, row: FakeRow, tables: Sequence[FakeTable]) -> None:
        self._num_checks += 1
        end = row.end
        is_whole = len(row.kv) > 1 or self._num_checks % _WHOLE_CHECK_STEPS == 0
        begin = 0 if is_whole else max(0, end - 2 * self._size)
        there = self.states[self._places(tables[0], begin, end)]
        right = np.array(row.slot.states[begin:end], np.uint64)
        if (there == right[:, None]).all():
            return
        wrong = np.flatnonzero((there != right[:, None]).any(axis=1))
        position = begin + int(wrong[0])
        block = tables[0].blocks[position // self._size]
        found = "nothing" if not there[wrong[0]].any() else "the KV of another prefix"
        raise ConformanceError(f"{row.what}: position {position} in block {block} holds {found}")

    def _places(self, table: FakeTable, begin: int, end: int) -> list[int]:
        """Rows of `states` that positions `begin` to `end` of a sequence are in."""
        size, places = self._size, list[int]()
        for index in range(begin // size, -(-end // size)):
            first = table.blocks[index] * size
            places += range(first + max(0, begin - index * size), first + min(size, end - index * size))
        return places


class GpuLost(RuntimeError):
    """What a runner that was told to die raises."""


class SimulatedRunner:
    """Implements `openinfer_engine.worker.runner.Runner`: steps run one after the other, in virtual time.

    A step's rows are computed when its time is over: what it writes is not there before.
    """

    def __init__(
        self, world: World, config: SchedulerConfig, times: StepTimes, *, charge_plan: Callable[[int], None]
    ) -> None:
        self._world = world
        self._times = times
        self._charge_plan = charge_plan  # with the number of rows
        self.pool = BytePool(config)
        self._device = FakeDevice(config, pool=self.pool)
        self._free_s = 0.0
        self._num_taken = 0
        self._death: BaseException | None = None
        self.slowness = 1.0
        """What steps take more than they should: a GPU that throttles."""

    @property
    def failure(self) -> BaseException | None:
        return self._death

    def die(self) -> None:
        """From now on no step can be run."""
        self._death = GpuLost("the simulated GPU has fallen off the bus")

    def launch(self, plan: StepPlan) -> "_Pending":
        self._charge_plan(len(plan.slots))
        begin_s = max(self._free_s, self._world.now_s)
        self._free_s = begin_s + self._times.of(plan) * self.slowness
        return _Pending(self, plan, self._num_taken, self._free_s)

    def finish(self, plan: StepPlan, num_applied: int, end_s: float) -> StepResult:
        if end_s > self._world.now_s:
            self._world.sleep(end_s - self._world.now_s)
        if self._death is not None:
            raise self._death
        self._num_taken += 1
        return self._device.run(plan, num_applied=num_applied)

    def close(self) -> None:
        pass


class _Pending:
    def __init__(self, runner: SimulatedRunner, plan: StepPlan, num_applied: int, end_s: float) -> None:
        self._finish: Callable[[], StepResult] = lambda: runner.finish(plan, num_applied, end_s)

    def result(self) -> StepResult:
        return self._finish()
