"""`FakeTierPort`: tiers of a fake device's blocks and states, whose transfers end when a test's steps say so.

While a load is pending its places hold garbage, so a row that reads one is caught by the device; when it ends, the
places are overwritten, so a place that was given to another sequence meanwhile is caught, too. A save compares its
places at its begin and its end.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from openinfer_core.scheduling import SchedulerConfig, StepPlan
from openinfer_core.testing.errors import require
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_core.testing.scheduler_driver import RunsAt, SchedulerDriver, SchedulerFactory
from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.tiers.port import PortPrefetch, PrefixHit, TieredScheduler

NEVER = 10**9
_GARBAGE = -1
_STATE_CHUNKS = 2
_CHUNK_BITS = 32
_CHUNK = 2**_CHUNK_BITS - 1
Content = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Hit:
    digests: tuple[Digest, ...]

    def close(self) -> None:
        """Nothing is held: contents are kept for ever."""


@dataclass(eq=False)
class FakeTierTransfer:
    """One load or save that ends after so many steps, with as many blocks as it is told."""

    port: "FakeTierPort"
    digests: tuple[Digest, ...]
    places: tuple[int, ...]
    is_load: bool
    steps_left: int
    begin_s: float
    num_completing: int
    is_cancelled: bool = False
    completed_blocks: int = 0
    contents: list[Content] = field(default_factory=list[Content])

    @property
    def num_blocks(self) -> int:
        return len(self.digests)

    def is_over(self) -> bool:
        return self.steps_left <= 0

    def cancel(self) -> None:
        # Asked for, not obtained: a copy that runs goes on for a while.
        self.is_cancelled = True
        self.num_completing = 0
        self.steps_left = min(self.steps_left, 3)

    def wait(self, timeout_s: float) -> None:
        """Nothing: steps are what it waits for."""

    def tick(self) -> None:
        self.steps_left -= 1
        if self.steps_left == 0:
            self.port.end(self)


@dataclass(eq=False)
class FakePrefetch:
    """A window of blocks that is brought up, and ends after so many steps."""

    port: "FakeTierPort"
    digests: tuple[Digest, ...]
    steps_left: int
    begin_s: float
    completed_blocks: int = 0
    is_cancelled: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.digests)

    def is_over(self) -> bool:
        return self.steps_left <= 0

    def cancel(self) -> None:
        self.is_cancelled = True

    def wait(self, timeout_s: float) -> None:
        """Nothing: steps are what it waits for."""

    def tick(self) -> None:
        self.steps_left -= 1
        if self.steps_left == 0 and not self.is_cancelled:
            self.completed_blocks = self.num_blocks
            self.port.slow.difference_update(self.digests)


class FakeTierPort:
    """Implements `PrefetchingPort` over a fake device.

    Args:
        device: whose blocks and states are moved.
        config: of the scheduler.
        contents: what the tiers hold; give those of an earlier port for what a restart finds.
        seed: of everything at random.
        steps: that a transfer takes, at most.
        short_rate: share of the transfers that end with fewer blocks than were asked for.
        prefetch_blocks: that may be brought up for requests that wait. Then all that is saved lies in a slow tier.
    """

    def __init__(
        self,
        device: FakeDevice,
        config: SchedulerConfig,
        *,
        contents: dict[Digest, Content] | None = None,
        seed: int = 0,
        steps: int = 1,
        short_rate: float = 0.0,
        prefetch_blocks: int = 0,
    ) -> None:
        self._device = device
        self._num_blocks = config.num_blocks
        self._random = random.Random(seed)  # noqa: S311 -- no secrets here
        self.chunks_per_slot = _STATE_CHUNKS if config.num_snapshots else 0
        self.contents = {} if contents is None else contents
        self.load_steps = self.save_steps = steps
        self.short_rate = short_rate
        self.loads: list[FakeTierTransfer] = []
        self.saves: list[FakeTierTransfer] = []
        self.prefetch_blocks = prefetch_blocks
        self.prefetches: list[FakePrefetch] = []
        self.slow: set[Digest] = set(self.contents) if prefetch_blocks else set()
        self._now_s = 0.0

    @property
    def pending(self) -> list[FakeTierTransfer]:
        """Transfers that have not ended."""
        return [each for each in (*self.loads, *self.saves) if not each.is_over()]

    # --- what a scheduler asks --------------------------------------------------------------------------

    def find(self, digests: Sequence[Digest]) -> PrefixHit:
        found = 0
        while found < len(digests) and digests[found] in self.contents:
            found += 1
        return PrefixHit([_Hit(tuple(digests[:found]))] if found else [])

    def load(self, found: PrefixHit, places: Sequence[int]) -> FakeTierTransfer | None:
        hits, found.hits = found.hits, []
        digests = tuple(digest for hit in hits for digest in hit.digests)
        if not digests:
            return None
        require(len(digests) <= len(places), f"{len(digests)} blocks were found and {len(places)} places given")
        transfer = self._begin(digests, places[: len(digests)], is_load=True, steps=self.load_steps)
        transfer.contents = [self.contents[digest] for digest in digests]
        for place, content in zip(transfer.places, transfer.contents, strict=True):
            self._write(place, (_GARBAGE,) * len(content))
        self.loads.append(transfer)
        return transfer

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> FakeTierTransfer:
        require(len(digests) == len(places), f"{len(digests)} digests and {len(places)} places are to be saved")
        transfer = self._begin(tuple(digests), places, is_load=False, steps=self.save_steps)
        transfer.contents = [self._read(place) for place in transfer.places]
        for place, content in zip(transfer.places, transfer.contents, strict=True):
            require(
                None not in content and _GARBAGE not in content,
                f"block {place} is saved and holds nothing of a prefix: it was not computed, or is being loaded",
            )
        self.saves.append(transfer)
        return transfer

    def prefetch(self, digests: Sequence[Digest]) -> PortPrefetch:
        require(0 < len(digests) <= self.prefetch_blocks, f"{len(digests)} blocks are to be brought up at once")
        hit = self.find(digests)
        up = tuple(digest for digest in digests[: hit.num_blocks] if digest in self.slow)
        if not up:
            return PortPrefetch(hit.num_blocks, None)
        under_way = [each for each in self.prefetches if not (each.is_over() or each.is_cancelled)]
        coming = sum(each.num_blocks for each in under_way) + len(up)
        require(coming <= self.prefetch_blocks, f"{coming} blocks are brought up at a time")
        steps = self._random.randint(1, self.load_steps)
        self.prefetches.append(FakePrefetch(self, up, steps, self._now_s))
        return PortPrefetch(hit.num_blocks, self.prefetches[-1])

    def state_places(self, slot: int) -> Sequence[int]:
        begin = self._num_blocks + slot * self.chunks_per_slot
        return range(begin, begin + self.chunks_per_slot)

    def clock(self) -> float:
        return self._now_s

    # --- what a test does -------------------------------------------------------------------------------

    def tick(self) -> None:
        """One more step of the loop: every transfer comes further."""
        self._now_s += 0.02
        for transfer in (*self.pending, *self.prefetches):
            transfer.tick()

    def end(self, transfer: FakeTierTransfer) -> None:
        """The transfer's last step: its bytes are there."""
        completed = transfer.num_completing
        for place, before in zip(transfer.places, transfer.contents, strict=True) if not transfer.is_load else ():
            require(self._read(place) == before, f"block {place} was overwritten while it was saved")
        moved = list(zip(transfer.digests, transfer.places, transfer.contents, strict=True))[:completed]
        for digest, place, content in moved:
            if transfer.is_load:
                self._write(place, content)
            else:
                self.contents[digest] = content
                if self.prefetch_blocks:
                    self.slow.add(digest)
        transfer.completed_blocks = completed

    def _begin(
        self, digests: tuple[Digest, ...], places: Sequence[int], *, is_load: bool, steps: int
    ) -> FakeTierTransfer:
        busy = {place for each in self.pending if is_load or each.is_load for place in each.places}
        shared = sorted(busy & set(places))
        verb = "loaded" if is_load else "saved"
        require(not shared, f"blocks {shared} are to be {verb} while another transfer has them")
        require(len(set(places)) == len(places), f"one transfer has a block twice: {list(places)}")
        is_short = self._random.random() < self.short_rate
        return FakeTierTransfer(
            port=self,
            digests=digests,
            places=tuple(places),
            is_load=is_load,
            steps_left=NEVER if steps == NEVER else self._random.randint(1, steps),
            begin_s=self._now_s,
            num_completing=self._random.randrange(len(digests)) if is_short else len(digests),
        )

    def _read(self, place: int) -> Content:
        if place < self._num_blocks:
            return self._device.read_block(place)
        slot, chunk = divmod(place - self._num_blocks, self.chunks_per_slot)
        state = self._device.states.read(slot)
        return (None if state is None else state >> chunk * _CHUNK_BITS & _CHUNK,)

    def _write(self, place: int, content: Content) -> None:
        if place < self._num_blocks:
            self._device.write_block(place, content)
            return
        slot, chunk = divmod(place - self._num_blocks, self.chunks_per_slot)
        others = (self._device.states.read(slot) or 0) & ~(_CHUNK << chunk * _CHUNK_BITS)
        self._device.states.write(slot, others | ((content[0] or 0) & _CHUNK) << chunk * _CHUNK_BITS)


class TieredDriver(SchedulerDriver):
    """A `SchedulerDriver` whose scheduler uses a `FakeTierPort`; a plan is what transfers come further by.

    Raises:
        ConformanceError: the scheduler has no `use_tiers`.
        Refused: the scheduler cannot use tiers with this config.
    """

    def __init__(
        self,
        factory: SchedulerFactory,
        config: SchedulerConfig,
        *,
        max_in_flight: int = 2,
        runs_at: RunsAt = RunsAt.PLAN,
        contents: dict[Digest, Content] | None = None,
        seed: int = 0,
        steps: int = 1,
        short_rate: float = 0.0,
        prefetch_blocks: int = 0,
    ) -> None:
        super().__init__(
            factory, config, max_in_flight=max_in_flight, is_moving=lambda: bool(self.port.pending), runs_at=runs_at
        )
        self.port = FakeTierPort(
            self.device,
            config,
            contents=contents,
            seed=seed,
            steps=steps,
            short_rate=short_rate,
            prefetch_blocks=prefetch_blocks,
        )
        scheduler: object = self.scheduler
        require(isinstance(scheduler, TieredScheduler), f"{type(scheduler).__name__} has no use_tiers(port)")
        if isinstance(scheduler, TieredScheduler):
            scheduler.use_tiers(self.port)

    def plan(self) -> StepPlan | None:
        self.port.tick()
        return super().plan()
