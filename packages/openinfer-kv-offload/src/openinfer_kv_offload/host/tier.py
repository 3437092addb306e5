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
    TierMedium,
)
from openinfer_kv_cache.tiers.traits import BlockMemory
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.host.arena import Arena
from openinfer_kv_offload.host.block_index import ArenaIndex, Stored
from openinfer_kv_offload.host.checksums import HostChecksums
from openinfer_kv_offload.host.frequency import LeastFrequentlyUsed
from openinfer_kv_offload.host.options import HostPolicy, HostTierOptions
from openinfer_kv_offload.transfer.block_transfer import BlockTransfer
from openinfer_kv_offload.transfer.failures import BlockFault
from openinfer_kv_offload.transfer.memory import WrapMedium, as_it_is, in_memory, on_a_device
from openinfer_kv_offload.transfer.queued_tier import QueuedTier

_ALIGN_BYTES = 64
# Blocks of a device that are copied together, and how many such batches a tier has room for at least.
_MOST_BATCH_BLOCKS, _LEAST_BATCHES = 128, 32


class HostTier(QueuedTier[Stored, ArenaIndex]):
    """An arena of equal blocks with an eviction policy; gone with the process.

    A device's blocks are copied between the device and the arena directly, past `wrap_medium`, and the device
    makes their checksum: it reads them faster than any processor of this machine. `policy` replaces `options.policy`.

    Raises:
        TierConfigError: not one block matches.
    """

    medium = TierMedium.CPU

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
        num_blocks = options.capacity_bytes // self._stride_bytes
        if num_blocks < 1:
            raise TierConfigError(
                f"capacity_bytes of {name} is {options.capacity_bytes}; one block needs {self._stride_bytes}"
            )
        if policy is None:
            policy = LeastFrequentlyUsed() if options.policy is HostPolicy.LFU else LeastRecentlyUsed()
        self.num_blocks = num_blocks
        self._batch_blocks = max(1, min(_MOST_BATCH_BLOCKS, num_blocks // _LEAST_BATCHES))
        index = ArenaIndex(num_blocks, policy, ttl_s=options.ttl_s, clock=clock)
        super().__init__(layout, index, name=name, clock=clock)
        self._arena = Arena(num_blocks * self._stride_bytes)
        self._medium = wrap_medium(self._arena)
        self._checksums = HostChecksums(layout)
        self._sink: Callable[[Digest, memoryview], None] | None = None
        self._open_queue(options.queue)

    def pinnable_memory(self) -> Sequence[memoryview]:
        return [self._arena.view(0, self._arena.num_bytes)]

    def demote_to(self, sink: Callable[[Digest, memoryview], None]) -> None:
        self._sink = sink

    def demote_all(self) -> None:
        with self._lock:
            digests = self._index.digests()
        for digest in digests:
            hit = self.find([digest])
            for each in hit.held or ():
                self._demote(each)
            hit.close()

    def copy_block(self, digest: Digest, into: memoryview) -> bool:
        with self._lock:
            held = self._index.hold_prefix([digest])
        try:
            for stored in held:
                self._medium.read(stored.block_id * self._stride_bytes, into)
                if self._checksums.matches(digest, into, stored.checksum):
                    return True
                self._counters.count_lost(corrupt_blocks=int(self._drop(stored)))
            return False
        finally:
            self._release(held)

    # The threads' side.

    def _hold(self, digests: Sequence[Digest]) -> list[Stored]:
        with self._lock:
            expired = self._index.expire()
            held = self._index.hold_prefix(digests)
        if expired:
            self._counters.count_lost(evicted_blocks=expired)
        return held

    def _load(self, transfer: BlockTransfer, held: Sequence[Stored], blocks: Sequence[BlockMemory]) -> None:
        for stored, block in zip(held, in_memory(blocks), strict=False):
            with transfer.touching():
                # Straight into the caller's memory: bytes that turn out corrupt are not counted as completed.
                self._medium.read(stored.block_id * self._stride_bytes, block)
                is_intact = self._checksums.matches(stored.digest, block, stored.checksum)
            self._complete_loaded(transfer, [stored], [is_intact])
        on_device = on_a_device(blocks)
        for begin in range(0, len(on_device), self._batch_blocks):
            batch = held[begin : begin + self._batch_blocks]
            content = [self._memory_of(stored.block_id) for stored in batch]
            with transfer.touching():
                are_intact = self._checksums.copy_in(batch, on_device[begin : begin + self._batch_blocks], content)
            self._complete_loaded(transfer, batch, are_intact)

    def _complete_loaded(self, transfer: BlockTransfer, batch: Sequence[Stored], are_intact: Sequence[bool]) -> None:
        """Completes blocks up to the first that is corrupt, which is dropped."""
        num_right = len(batch) if all(are_intact) else are_intact.index(False)
        transfer.complete_blocks(num_right)
        self._counters.count_moved(loaded_blocks=num_right)
        if num_right < len(batch):
            self._counters.count_lost(corrupt_blocks=int(self._drop(batch[num_right])))
            raise BlockFault(TierFailure.CORRUPT)

    def _save(self, transfer: BlockTransfer, digests: Sequence[Digest], blocks: Sequence[BlockMemory]) -> None:
        for digest, block in zip(digests, in_memory(blocks), strict=False):
            if digest not in self._index:
                self._save_one(transfer, digest, block)
            transfer.complete_blocks()
        on_device = on_a_device(blocks)
        for begin in range(0, len(on_device), self._batch_blocks):
            batch = dict(zip(digests[begin : begin + self._batch_blocks], on_device[begin:], strict=False))
            new = {digest: block for digest, block in batch.items() if digest not in self._index}
            if new:
                self._save_from_device(transfer, list(new), list(new.values()))
            transfer.complete_blocks(min(self._batch_blocks, len(on_device) - begin))

    def _save_one(self, transfer: BlockTransfer, digest: Digest, block: memoryview) -> None:
        with self._filling(1) as block_ids:
            with transfer.touching():
                checksum = self._checksums.checksum(digest, block)
                self._medium.write(block_ids[0] * self._stride_bytes, [block])
            self._publish(block_ids, [digest], [checksum])

    def _save_from_device(
        self, transfer: BlockTransfer, digests: Sequence[Digest], blocks: Sequence[DeviceBlock]
    ) -> None:
        with self._filling(len(blocks)) as block_ids:
            memory = [self._memory_of(block_id) for block_id in block_ids]
            with transfer.touching():
                checksums = self._checksums.copy_out(blocks, memory)
            self._publish(block_ids, digests, checksums)

    @contextlib.contextmanager
    def _filling(self, num_blocks: int) -> Generator[list[int]]:
        """Blocks to fill; `_publish` takes them off the list, and what is left is given back."""
        block_ids: list[int] = []
        try:
            self._take(block_ids, num_blocks)
            yield block_ids
        finally:
            with self._lock:
                for block_id in block_ids:
                    self._index.give_back(block_id)

    def _publish(self, block_ids: list[int], digests: Sequence[Digest], checksums: Sequence[bytes]) -> None:
        with self._lock:
            filled = zip(block_ids, digests, checksums, strict=True)
            saved_blocks = sum(
                [self._index.publish(block_id, digest, checksum) for block_id, digest, checksum in filled]
            )
            block_ids.clear()  # they are the index's now; `_filling` gives back what is listed
        self._counters.count_moved(saved_blocks=saved_blocks)

    def _memory_of(self, block_id: int) -> memoryview:
        return self._arena.view(block_id * self._stride_bytes, self.layout.block_bytes)

    def _take(self, block_ids: list[int], num_blocks: int) -> None:
        left: list[Stored] = []
        with self._lock:
            while len(block_ids) < num_blocks:
                taken = self._index.take()
                if taken is None:
                    raise BlockFault(TierFailure.BUSY)
                block_ids.append(taken[0])
                if taken[1] is not None:
                    left.append(taken[1])
        if left:
            self._counters.count_lost(evicted_blocks=len(left))
            for stored in left:
                # Outside the lock: the sink may wait for a slower tier. No save overwrites the block before that.
                self._demote(stored)

    def _demote(self, stored: Stored) -> None:
        """Hands on an intact block that no save can overwrite now; the next tier makes a checksum of what it gets."""
        if self._sink is None:
            return
        block = memoryview(bytearray(self.layout.block_bytes))
        self._medium.read(stored.block_id * self._stride_bytes, block)
        if self._checksums.matches(stored.digest, block, stored.checksum):
            self._sink(stored.digest, block.toreadonly())
        else:
            self._drop(stored)
            self._counters.count_lost(corrupt_blocks=1)
