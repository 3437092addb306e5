"""`RemoteTier`: KV blocks as objects on a server that several machines share."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import msgspec

from openinfer_kv_cache import Digest, KvLayout, TierFailure
from openinfer_kv_cache.tiers.traits import BlockMemory
from openinfer_kv_offload.errors import StoreError, TierConfigError
from openinfer_kv_offload.format.checksum import BlockChecksum
from openinfer_kv_offload.format.manifest import StoreAccess
from openinfer_kv_offload.format.record import HEADER_BYTES, decode_header, encode_header
from openinfer_kv_offload.remote.namespace import Namespace
from openinfer_kv_offload.remote.object_index import KnownObject, ObjectIndex
from openinfer_kv_offload.remote.object_store import ObjectStore
from openinfer_kv_offload.transfer.block_transfer import BlockTransfer
from openinfer_kv_offload.transfer.failures import BlockFault
from openinfer_kv_offload.transfer.memory import WrapMedium, as_it_is, copy_from_block, copy_to_block
from openinfer_kv_offload.transfer.queue import QueueOptions
from openinfer_kv_offload.transfer.queued_tier import QueuedTier


class RemoteTierOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a `RemoteTier`.

    Raises:
        TierConfigError: a field is out of range.
    """

    budget_bytes: int
    """The size of all objects under the prefix; a process that writes deletes the least recently used to stay below."""
    prefix: str = "openinfer"
    """The beginning of every key; blocks of one layout have one of their own."""
    access: StoreAccess = StoreAccess.WRITE
    """Any number of processes may write."""
    connections: int = 8
    """Objects that move at the same time."""
    refresh_s: float = 30.0
    """After a miss, how old the list of what other processes have saved may be."""
    queue: QueueOptions = QueueOptions()

    def __post_init__(self) -> None:
        if not self.prefix or not self.prefix.isprintable() or self.prefix.strip("/") != self.prefix:
            raise TierConfigError(f"prefix is {self.prefix!r}; it must have characters, and no slash at its ends")
        if self.connections < 1:
            raise TierConfigError(f"connections is {self.connections}; it must be 1 or more")
        if self.refresh_s <= 0:
            raise TierConfigError(f"refresh_s is {self.refresh_s}; it must be more than 0")


class RemoteTier(QueuedTier[KnownObject, ObjectIndex]):
    """One object per block, with its checksum; found by a list in memory, which `find` asks and never the server.

    `namespace.py` says under which keys. What other processes save is seen when keys are listed: at the beginning, and
    in the background after a miss. Bytes pass through a buffer of the moving thread and reach the caller's blocks only
    when their checksum fits, so a deadline is met even while the server hangs. This process does not delete what is
    held; another one may, which makes the load partial. The tier closes the store.

    Raises:
        LayoutMismatchError: the prefix holds blocks of another layout.
        StoreError: the server cannot be reached or refuses, or there is nothing to read.
        TierConfigError: not one block fits into the budget.
    """

    def __init__(
        self,
        layout: KvLayout,
        store: ObjectStore,
        options: RemoteTierOptions,
        *,
        name: str = "remote",
        clock: Callable[[], float] = time.monotonic,
        wrap_medium: WrapMedium = as_it_is,
    ) -> None:
        self._object_bytes = HEADER_BYTES + layout.block_bytes
        if options.budget_bytes < self._object_bytes:
            raise TierConfigError(
                f"budget_bytes of {name} is {options.budget_bytes}; one block needs {self._object_bytes}"
            )
        index = ObjectIndex(options.budget_bytes // self._object_bytes)
        super().__init__(layout, index, name=name, accepts_saves=options.access is StoreAccess.WRITE, clock=clock)
        self._options = options
        self._checksum = BlockChecksum(layout)
        self._buffers = threading.local()
        self._objects = Namespace(store, options.prefix, layout, is_writer=self.accepts_saves, wrap_medium=wrap_medium)
        self._first_refresh(store.address)
        self._open_queue(options.queue)
        self._connections = ThreadPoolExecutor(options.connections, thread_name_prefix=f"kv-tier-{name}-connection")

    @property
    def digest_key(self) -> bytes | None:
        return None  # no secret is kept on a server

    def pinnable_memory(self) -> Sequence[memoryview]:
        return []  # bytes pass through buffers that come and go with the threads

    def refresh(self) -> None:
        """Lists what the server has, in this thread; `find` asks for it by itself, in the background.

        Raises:
            OSError: the server cannot be reached, or refuses.
        """
        self._next_refresh_s = self._clock() + self._options.refresh_s
        self._objects.restore_layout()
        # Only what was known before may be forgotten: the list may lack a block that was put while it was made.
        with self._lock:
            before = self._index.digests()
        listed = self._objects.list_digests()
        with self._lock:
            self._index.add(listed - before)
            forgotten = self._index.forget(before - listed)
        self._counters.count_lost(evicted_blocks=forgotten)

    def look_up(self, digests: Sequence[Digest]) -> None:
        with self._lock:
            known = self._index.count_prefix(digests)
        missing = digests[known:]
        if not missing or self._queue.is_refusing:
            return
        if not self._objects.asks_for_blocks:
            self.refresh()
            return
        found = missing[: count_beginning(missing, self._objects.has)]
        with self._lock:
            self._index.add(found)

    # The threads' side.

    def _close_medium(self) -> None:
        self._connections.shutdown(wait=False, cancel_futures=True)  # one that hangs ends with its own time limit
        self._objects.close()

    def _hold(self, digests: Sequence[Digest]) -> list[KnownObject]:
        held = super()._hold(digests)
        if len(held) < len(digests):
            self._refresh_soon()
        return held

    def _load(self, transfer: BlockTransfer, held: Sequence[KnownObject], blocks: Sequence[BlockMemory]) -> None:
        fetches = [functools.partial(self._fetch, transfer, *each) for each in zip(held, blocks, strict=True)]
        self._run(fetches, transfer)

    def _save(self, transfer: BlockTransfer, digests: Sequence[Digest], blocks: Sequence[BlockMemory]) -> None:
        puts = [functools.partial(self._put, transfer, *each) for each in zip(digests, blocks, strict=True)]
        self._run(puts, transfer)

    def _run(self, tasks: Sequence[Callable[[], None]], transfer: BlockTransfer) -> None:
        run_in_order(self._connections, tasks, window=self._options.connections, on_end=transfer.complete_blocks)

    def _fetch(self, transfer: BlockTransfer, known: KnownObject, block: BlockMemory) -> None:
        buffer = self._buffer()
        payload = buffer[HEADER_BYTES:]
        with transfer.touching():
            pass  # else a block would be fetched for a transfer that has ended
        try:
            self._objects.medium(known.digest).read(0, buffer)
        except BlockFault:
            self._counters.count_lost(evicted_blocks=int(self._drop(known)))
            raise
        if not self._checksum.is_intact(known.digest, decode_header(buffer), payload):
            self._counters.count_lost(corrupt_blocks=int(self._drop(known)))
            self._objects.delete([known.digest])
            raise BlockFault(TierFailure.CORRUPT)
        with transfer.touching():
            copy_to_block(block, payload)
        self._counters.count_moved(loaded_blocks=1)

    def _put(self, transfer: BlockTransfer, digest: Digest, block: BlockMemory) -> None:
        if digest in self._index:
            return
        buffer = self._buffer()
        with transfer.touching():
            copy_from_block(block, buffer[HEADER_BYTES:])
        header = self._checksum.header(digest, buffer[HEADER_BYTES:])
        buffer[:HEADER_BYTES] = encode_header(header)
        with self._lock:
            evicted = self._index.make_room()
        if evicted is None:
            raise BlockFault(TierFailure.BUSY)
        added = 0
        try:
            self._objects.delete(evicted)  # first, so that the store stays within its budget
            self._counters.count_lost(evicted_blocks=len(evicted))
            self._objects.medium(digest).write(0, [buffer])
            with self._lock:
                added = self._index.add([digest])
        finally:
            with self._lock:
                self._index.end_filling()
        transfer.has_stored = True
        self._counters.count_moved(saved_blocks=added)

    def _buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._buffers, "record", None)
        if buffer is None:
            buffer = memoryview(bytearray(self._object_bytes))
            self._buffers.record = buffer
        return buffer

    def _first_refresh(self, address: str) -> None:
        try:
            self.refresh()
        except OSError as error:
            raise StoreError(f"{address} cannot be used: {error}") from error

    def _refresh_soon(self) -> None:
        if self._clock() >= self._next_refresh_s:
            self._next_refresh_s = self._clock() + self._options.refresh_s
            self._queue.run_soon(self.refresh)


def run_in_order(
    executor: Executor, tasks: Iterable[Callable[[], None]], *, window: int, on_end: Callable[[], None]
) -> None:
    """Runs tasks in the threads of `executor`, at most `window` at a time, and calls `on_end` for each, in order.

    The first exception, of a task or of `on_end`, is raised here; what has not begun then never does, and what has
    begun may go on for a while.
    """
    pending: deque[Future[None]] = deque()
    try:
        for task in tasks:
            if len(pending) == window:
                pending.popleft().result()
                on_end()
            pending.append(executor.submit(task))
        while pending:
            pending.popleft().result()
            on_end()
    finally:
        for future in pending:
            future.cancel()


def count_beginning(digests: Sequence[Digest], has: Callable[[Digest], bool]) -> int:
    """How many of a chain's first digests a server has, asked a few times.

    A chain is saved from its head and given up from its tail, so what is there is a beginning of it. A gap, where that
    is not so, is found by the load, which ends there.
    """
    low, high = 0, len(digests)
    asked = high  # the whole chain first: it is there where another engine has just saved it
    while low < high:
        if has(digests[asked - 1]):
            low = asked
        else:
            high = asked - 1
        asked = (low + high + 1) // 2
    return low
