"""`HostTier`: KV blocks in this process's memory."""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence

from openinfer_kv_cache import (
    DeviceBlock,
    Digest,
    EvictionPolicy,
    KvLayout,
    LeastRecentlyUsed,
    TierFailure,
)
from openinfer_kv_cache.tier_traits import BlockMemory
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.host.arena import Arena, WrapMedium, as_it_is
from openinfer_kv_offload.host.block_index import PlaceIndex, Stored
from openinfer_kv_offload.host.checksums import BlockStamps
from openinfer_kv_offload.host.frequency import LeastFrequentlyUsed
from openinfer_kv_offload.host.options import HostPolicy, HostTierOptions
from openinfer_kv_offload.transfer.block_transfer import BlockTransfer
from openinfer_kv_offload.transfer.failures import BlockFault
from openinfer_kv_offload.transfer.memory import in_memory, on_a_device
from openinfer_kv_offload.transfer.queued_tier import QueuedTier

_ALIGN_BYTES = 64
_MOST_BATCH_BLOCKS, _LEAST_BATCHES = 32, 32
"""Blocks of a device that are copied together, and how many such batches a tier has room for at least."""


class HostTier(QueuedTier[Stored, PlaceIndex]):
    """An arena of equal places, one block each, with an eviction policy; gone with the process.

    A device's blocks are copied between the device and their place directly, past `wrap_medium`, and are stamped by the
    device, which reads them faster than any processor of this machine.

    Args:
        layout: of the blocks. options: its size and policy. name: for counters and logs.
            policy: a policy of your own instead of `options.policy`. clock: seconds that never run back.
            wrap_medium: put between the tier and its arena, for tests.

    Raises:
        TierConfigError: not one block fits.
    """

    def __init__(
        self,
        layout: KvLayout,
        options: HostTierOptions,
        *,
        name: str = "host",
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        wrap_medium: WrapMedium = as_it_is,
    ) -> None:
        self._stride_bytes = -(-layout.block_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        num_places = options.capacity_bytes // self._stride_bytes
        if num_places < 1:
            raise TierConfigError(
                f"capacity_bytes of {name} is {options.capacity_bytes}; one block needs {self._stride_bytes}"
            )
        if policy is None:
            policy = LeastFrequentlyUsed() if options.policy is HostPolicy.LFU else LeastRecentlyUsed()
        self._batch_blocks = max(1, min(_MOST_BATCH_BLOCKS, num_places // _LEAST_BATCHES))
        index = PlaceIndex(num_places, policy, ttl_s=options.ttl_s, clock=clock)
        super().__init__(layout, index, name=name, clock=clock)
        self._arena = Arena(num_places * self._stride_bytes)
        self._medium = wrap_medium(self._arena)
        self._stamps = BlockStamps(layout)
        self._sink: Callable[[Digest, memoryview], None] | None = None
        self._open_queue(options.queue)

    def pinnable_memory(self) -> Sequence[memoryview]:
        """The arena."""
        return [self._arena.view(0, self._arena.num_bytes)]

    def close(self) -> None:
        """Stops its threads; the memory goes with the object."""
        self._queue.close()

    def demote_to(self, sink: Callable[[Digest, memoryview], None]) -> None:
        """Gives what is evicted to `sink`, which the thread of the save that needs the place waits for."""
        self._sink = sink

    def demote_all(self) -> None:
        """Gives every block to the sink, in this thread."""
        with self._lock:
            digests = self._index.digests()
        for digest in digests:
            hit = self.find([digest])
            for each in hit.held or ():
                self._demote(each)
            hit.close()

    def copy_block(self, digest: Digest, into: memoryview) -> bool:
        """Fills `into` with an intact block; False if it is not there."""
        with self._lock:
            held = self._index.hold_prefix([digest])
        try:
            for stored in held:
                self._medium.read(stored.place * self._stride_bytes, into)
                if self._stamps.fits(digest, into, stored.stamp):
                    return True
                self._tally.lost(corrupt_blocks=int(self._drop(stored)))
            return False
        finally:
            self._release(held)

    # The threads' side.

    def _hold(self, digests: Sequence[Digest]) -> list[Stored]:
        with self._lock:
            expired = self._index.expire()
            held = self._index.hold_prefix(digests)
        if expired:
            self._tally.lost(evicted_blocks=expired)
        return held

    def _load(self, transfer: BlockTransfer, held: Sequence[Stored], blocks: Sequence[BlockMemory]) -> None:
        for stored, block in zip(held, in_memory(blocks), strict=False):
            with transfer.touching():
                self._medium.read(stored.place * self._stride_bytes, block)
                is_intact = self._stamps.fits(stored.digest, block, stored.stamp)
            self._land_loaded(transfer, [stored], [is_intact])
        on_device = on_a_device(blocks)
        for begin in range(0, len(on_device), self._batch_blocks):
            batch = held[begin : begin + self._batch_blocks]
            places = [self._memory_of(stored.place) for stored in batch]
            with transfer.touching():
                are_intact = self._stamps.copy_in(batch, on_device[begin : begin + self._batch_blocks], places)
            self._land_loaded(transfer, batch, are_intact)

    def _land_loaded(self, transfer: BlockTransfer, batch: Sequence[Stored], are_intact: Sequence[bool]) -> None:
        """Lands blocks up to the first that is not right, which is dropped."""
        num_right = len(batch) if all(are_intact) else are_intact.index(False)
        transfer.land(num_right)
        self._tally.moved(loaded_blocks=num_right)
        if num_right < len(batch):
            self._tally.lost(corrupt_blocks=int(self._drop(batch[num_right])))
            raise BlockFault(TierFailure.CORRUPT)

    def _save(self, transfer: BlockTransfer, digests: Sequence[Digest], blocks: Sequence[BlockMemory]) -> None:
        for digest, block in zip(digests, in_memory(blocks), strict=False):
            if digest not in self._index:
                self._save_one(transfer, digest, block)
            transfer.land()
        on_device = on_a_device(blocks)
        for begin in range(0, len(on_device), self._batch_blocks):
            batch = dict(zip(digests[begin : begin + self._batch_blocks], on_device[begin:], strict=False))
            new = {digest: block for digest, block in batch.items() if digest not in self._index}
            if new:
                self._save_from_device(transfer, list(new), list(new.values()))
            transfer.land(min(self._batch_blocks, len(on_device) - begin))

    def _save_one(self, transfer: BlockTransfer, digest: Digest, block: memoryview) -> None:
        with self._filling(1) as places:
            with transfer.touching():
                stamp = self._stamps.stamp(digest, block)
                self._medium.write(places[0] * self._stride_bytes, [block])
            self._publish(places, [digest], [stamp])

    def _save_from_device(
        self, transfer: BlockTransfer, digests: Sequence[Digest], blocks: Sequence[DeviceBlock]
    ) -> None:
        with self._filling(len(blocks)) as places:
            memory = [self._memory_of(place) for place in places]
            with transfer.touching():
                stamps = self._stamps.copy_out(blocks, memory)
            self._publish(places, digests, stamps)

    @contextlib.contextmanager
    def _filling(self, num_places: int) -> Generator[list[int]]:
        """Places to fill; whoever publishes them takes them off the list, and the rest is given back."""
        places: list[int] = []
        try:
            self._take(places, num_places)
            yield places
        finally:
            with self._lock:
                for place in places:
                    self._index.give_back(place)

    def _publish(self, places: list[int], digests: Sequence[Digest], stamps: Sequence[bytes]) -> None:
        """Makes filled places findable, and empties the list of them."""
        with self._lock:
            filled = zip(places, digests, stamps, strict=True)
            saved_blocks = sum([self._index.publish(place, digest, stamp) for place, digest, stamp in filled])
            places.clear()
        self._tally.moved(saved_blocks=saved_blocks)

    def _memory_of(self, place: int) -> memoryview:
        return self._arena.view(place * self._stride_bytes, self.layout.block_bytes)

    def _take(self, places: list[int], num_places: int) -> None:
        """Adds places to fill; what was there has been handed on."""
        left: list[Stored] = []
        with self._lock:
            while len(places) < num_places:
                taken = self._index.take()
                if taken is None:
                    raise BlockFault(TierFailure.BUSY)
                places.append(taken[0])
                if taken[1] is not None:
                    left.append(taken[1])
        if left:
            self._tally.lost(evicted_blocks=len(left))
            for stored in left:
                self._demote(stored)

    def _demote(self, stored: Stored) -> None:
        """Hands on a block that nobody can overwrite now, if it is intact: the next tier stamps what it gets."""
        if self._sink is None:
            return
        block = memoryview(bytearray(self.layout.block_bytes))
        self._medium.read(stored.place * self._stride_bytes, block)
        if self._stamps.fits(stored.digest, block, stored.stamp):
            self._sink(stored.digest, block.toreadonly())
        else:
            self._drop(stored)
            self._tally.lost(corrupt_blocks=1)
