"""`DiskTier`: KV blocks in segment files, found again after a restart or a crash."""

import itertools
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from openinfer_kv_cache import Digest, KvLayout, TierCondition, TierFailure
from openinfer_kv_cache.tiers.traits import BlockMemory
from openinfer_kv_offload.disk.segments import Recorded, SegmentIndex
from openinfer_kv_offload.disk.store import StoreFolder
from openinfer_kv_offload.disk.watch import Seen, StoreWatch
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.format.checksum import BlockChecksum
from openinfer_kv_offload.format.manifest import StoreAccess
from openinfer_kv_offload.format.record import HEADER_BYTES, decode_header, encode_header, record_bytes
from openinfer_kv_offload.host.arena import Arena
from openinfer_kv_offload.transfer.block_transfer import BlockTransfer
from openinfer_kv_offload.transfer.failures import BlockFault, is_full
from openinfer_kv_offload.transfer.memory import WrapMedium, as_it_is, copy_from_block, copy_to_blocks
from openinfer_kv_offload.transfer.queue import QueueOptions
from openinfer_kv_offload.transfer.queued_tier import QueuedTier

_log = logging.getLogger(__name__)
_SEGMENTS = 64
_GROUP_BLOCKS, _GROUP_BYTES = 16, 8 * 2**20
"""Of blocks that a thread reads before it copies them to where they belong; one block at least."""


class DiskTierOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a `DiskTier`.

    Raises:
        TierConfigError: a field is out of range.
    """

    folder: str
    budget_bytes: int
    """The size of all segments; the least recently used segment is deleted to stay below."""
    segment_bytes: int | None = None
    """The size of one segment; by default a 64th of the budget, at least one record."""
    access: StoreAccess = StoreAccess.WRITE
    refresh_s: float = 1.0
    """How often a reading process looks for what the writing one has added."""
    queue: QueueOptions = QueueOptions()

    def __post_init__(self) -> None:
        if self.segment_bytes is not None and not 0 < self.segment_bytes <= self.budget_bytes // 2:
            raise TierConfigError(
                f"segment_bytes is {self.segment_bytes}; it must be at most half of the budget, {self.budget_bytes}"
            )
        if self.refresh_s <= 0:
            raise TierConfigError(f"refresh_s is {self.refresh_s}; it must be more than 0")


class DiskTier(QueuedTier[Recorded, SegmentIndex]):
    """A folder of append-only segments with checksums; nothing is synchronised to the platter, losing is a miss.

    Bytes pass through a buffer of the moving thread, some blocks at a time, and reach the caller's blocks only when
    their checksum fits, so a deadline is met even while the disk hangs. Segments of held blocks stay readable, also
    when they are deleted.

    Raises:
        LayoutMismatchError: the folder holds blocks of another layout.
        StoreError: another process writes to it, or it is no store.
        TierConfigError: the budget does not hold two records.
    """

    def __init__(
        self,
        layout: KvLayout,
        options: DiskTierOptions,
        *,
        name: str = "disk",
        clock: Callable[[], float] = time.monotonic,
        wrap_medium: WrapMedium = as_it_is,
    ) -> None:
        self._record_bytes = record_bytes(layout.block_bytes)
        if options.budget_bytes < 2 * self._record_bytes:
            raise TierConfigError(
                f"budget_bytes of {name} is {options.budget_bytes}; two records need {2 * self._record_bytes}"
            )
        self._checksum = BlockChecksum(layout)
        store = StoreFolder(Path(options.folder), layout, options.access)
        index = SegmentIndex(
            store,
            options.access,
            layout_digest=self._checksum.layout_digest,
            record_bytes=self._record_bytes,
            segment_bytes=max(options.segment_bytes or options.budget_bytes // _SEGMENTS, self._record_bytes),
            budget_bytes=options.budget_bytes,
            wrap_medium=wrap_medium,
        )
        super().__init__(layout, index, name=name, accepts_saves=options.access is StoreAccess.WRITE, clock=clock)
        # Taken before `_lock`, never while it is held: an append keeps it during its write, and finds go on meanwhile.
        self._append_lock = threading.Lock()
        self._buffers = threading.local()
        self._group_blocks = max(1, min(_GROUP_BLOCKS, _GROUP_BYTES // self._record_bytes))
        self._buffer_bytes = self._group_blocks * self._record_bytes
        self._scratch = Arena(options.queue.num_threads * self._buffer_bytes)
        self._num_buffers = itertools.count()
        self._budget_bytes = options.budget_bytes
        self._has_said_full = False
        self._refresh_s = options.refresh_s
        self._next_look_s = clock() + options.refresh_s
        self._watch = StoreWatch(
            store,
            index,
            self._lock,
            reopen=lambda before: StoreFolder(before.folder, layout, options.access, before=before),
            warns_of_segments=self.accepts_saves,
            name=name,
            clock=clock,
            retry_s=options.refresh_s,
        )
        try:
            self._count(self._watch.read_in())
            self._open_queue(options.queue)
        except BaseException:
            self._watch.close()
            raise

    @property
    def digest_key(self) -> bytes | None:
        return self._watch.digest_key

    def pinnable_memory(self) -> Sequence[memoryview]:
        return [self._scratch.view(0, self._scratch.num_bytes)]

    def refresh(self) -> None:
        """Looks for what another process has appended or deleted; `find` asks for it by itself, in the background."""
        with self._append_lock:
            self._count(self._watch.look())

    def look_up(self, digests: Sequence[Digest]) -> None:
        # One that writes knows all: no other process writes to its folder.
        if not self.accepts_saves and not all(digest in self._index for digest in digests):
            self.refresh()

    def copy_block(self, digest: Digest, into: memoryview) -> bool:
        with self._lock:
            held = self._index.hold_prefix([digest])
        buffer = self._buffer()[: self._record_bytes]
        payload = buffer[HEADER_BYTES : HEADER_BYTES + self.layout.block_bytes]
        try:
            for each in held:
                each.segment.medium.read(each.offset_bytes, buffer)
                if self._checksum.is_intact(digest, decode_header(buffer), payload):
                    copy_from_block(payload, into)
                    return True
            return False
        finally:
            self._release(held)

    # The threads' side.

    def _hold(self, digests: Sequence[Digest]) -> list[Recorded]:
        held = super()._hold(digests)
        # One that writes knows what it has appended, and looks whether that was removed from under it.
        if self.accepts_saves or len(held) < len(digests):
            self._look_soon()
        return held

    def _close_medium(self) -> None:
        # The lock on the folder, too: whatever hangs may still append, which no other writer must meet.
        with self._lock:
            self._index.close()
        self._watch.close()

    def _condition(self) -> TierCondition:
        return TierCondition.LOST if self._watch.is_lost else super()._condition()

    def _load(self, transfer: BlockTransfer, held: Sequence[Recorded], blocks: Sequence[BlockMemory]) -> None:
        # Several blocks at a time: a device's copy of one takes some ten calls, and a thread that has left the
        # interpreter for each waits to have it back.
        for begin in range(0, len(held), self._group_blocks):
            group = held[begin : begin + self._group_blocks]
            payloads, fault = self._read(group)
            if payloads:
                with transfer.touching():
                    copy_to_blocks(blocks[begin : begin + len(payloads)], payloads)
                transfer.complete_blocks(len(payloads))
                self._counters.count_moved(loaded_blocks=len(payloads))
            if fault is not None:
                raise fault

    def _read(self, group: Sequence[Recorded]) -> tuple[list[memoryview], Exception | None]:
        """What is whole of some blocks, up to the first that is not, and why that one is not."""
        buffer = self._buffer()
        payloads: list[memoryview] = []
        for number, each in enumerate(group):
            record = buffer[number * self._record_bytes : (number + 1) * self._record_bytes]
            try:
                each.segment.medium.read(each.offset_bytes, record)
            except Exception as error:  # noqa: BLE001 - raised when those before are where they belong
                return payloads, error
            payload = record[HEADER_BYTES : HEADER_BYTES + self.layout.block_bytes]
            if not self._checksum.is_intact(each.digest, decode_header(record), payload):
                self._counters.count_lost(corrupt_blocks=int(self._drop(each)))
                return payloads, BlockFault(TierFailure.CORRUPT)
            payloads.append(payload)
        return payloads, None

    def _save(self, transfer: BlockTransfer, digests: Sequence[Digest], blocks: Sequence[BlockMemory]) -> None:
        buffer = self._buffer()[: self._record_bytes]
        payload = buffer[HEADER_BYTES : HEADER_BYTES + self.layout.block_bytes]
        for digest, block in zip(digests, blocks, strict=True):
            if digest not in self._index:
                # The caller has its block back before the disk is asked, however slow that is.
                with transfer.touching():
                    copy_from_block(block, payload)
                header = self._checksum.header(digest, payload)
                buffer[:HEADER_BYTES] = encode_header(header)
                if self._append(digest, buffer):
                    transfer.has_stored = True
                    self._counters.count_moved(saved_blocks=1)
            transfer.complete_blocks()

    def _append(self, digest: Digest, record: memoryview) -> bool:
        """Writes a record; False if another thread was faster with the same block."""
        with self._append_lock:
            if not self._watch.is_in_place():
                self._count(self._watch.look())
                if self._watch.is_lost:
                    raise BlockFault(TierFailure.GONE)
            if digest in self._index:
                return False
            try:
                self._write(digest, record)
            except OSError as error:
                if is_full(error):
                    self._make_room(error)
                raise
            return True

    def _write(self, digest: Digest, record: memoryview) -> None:
        with self._lock:
            segment, evicted = self._index.segment_for_append()
        self._counters.count_lost(evicted_blocks=evicted)
        try:
            segment.medium.write(segment.size_bytes, [record])
        except BaseException:
            segment.cut_torn_end()
            raise
        with self._lock:
            self._index.appended(segment, digest)

    def _make_room(self, error: OSError) -> None:
        """For the next save, on a disk that has less space than the budget says."""
        with self._lock:
            evicted = self._index.make_room()
        self._counters.count_lost(evicted_blocks=evicted)
        if not self._has_said_full:
            self._has_said_full = True
            _log.warning(
                "tier %s: %s, below its budget of %d bytes: for a save that finds no space it gives up its least "
                "recently used segment, now %d blocks; give it less, or its disk more",
                self.name,
                error,
                self._budget_bytes,
                evicted,
            )

    def _buffer(self) -> memoryview:
        # As many as the queue has threads are in memory that a device may lock; one more, as of `copy_block`, is not.
        buffer: memoryview | None = getattr(self._buffers, "record", None)
        if buffer is None:
            begin, size = next(self._num_buffers) * self._buffer_bytes, self._buffer_bytes
            is_ours = begin + size <= self._scratch.num_bytes
            buffer = self._scratch.view(begin, size) if is_ours else memoryview(mmap.mmap(-1, size))
            self._buffers.record = buffer
        return buffer

    def _look_soon(self) -> None:
        if self._clock() >= self._next_look_s:
            self._next_look_s = self._clock() + self._refresh_s
            self._queue.run_soon(self._look)

    def _look(self) -> None:
        # A disk that hangs would keep one thread of the queue after the other, and loads with them.
        if self._append_lock.acquire(blocking=False):
            try:
                self._count(self._watch.look())
            finally:
                self._append_lock.release()

    def _count(self, seen: Seen) -> None:
        self._counters.count_lost(evicted_blocks=seen.gone_blocks, corrupt_blocks=seen.bad_records)
