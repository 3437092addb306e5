"""`GpuTier`: KV blocks in memory of this engine's GPU, which its peers read through NIXL, and their blocks.

    save ──copy──► this engine's memory, registered with NIXL ◄════ READ ════ a peer's landing ──copy, sum──► its block
                        ▲ lease, sums, give back: TCP, after both have shown the token ────┘

A block's sum is made by the GPU from what was saved, told with its lease, and compared with the sum of what has come:
bytes that were overwritten in the meantime, as after a lease that was over, are dropped and counted.
"""

import contextlib
import logging
import queue
import socket
import time
from collections.abc import Callable, Generator, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import msgspec

from openinfer_kv_cache import Digest, KvLayout, KvTierError, MemorySource, TierFailure, TierMedium, TierMemory
from openinfer_kv_cache.tiers.traits import BlockMemory
from openinfer_kv_offload import TierConfigError
from openinfer_kv_offload.host.block_index import Stored
from openinfer_kv_offload.transfer.block_transfer import BlockTransfer
from openinfer_kv_offload.transfer.failures import BlockFault
from openinfer_kv_offload.transfer.memory import WrapMedium, as_it_is
from openinfer_kv_offload.transfer.queue import QueueOptions
from openinfer_kv_offload.transfer.queued_tier import QueuedTier
from openinfer_nixl.agent import Agent, Memory, Piece, StillMoving
from openinfer_nixl.directory import Directory
from openinfer_nixl.gpu.index import BlockBook, Elsewhere, Held
from openinfer_nixl.gpu.memory import HostMemory
from openinfer_nixl.gpu.messages import (
    PROTOCOL,
    Answer,
    Count,
    Counted,
    Lease,
    Leased,
    LeasedBlock,
    answers,
    questions,
)
from openinfer_nixl.gpu.peers import BlockPeer
from openinfer_nixl.messages import GivenBack
from openinfer_nixl.peers import PeerConnection

logger = logging.getLogger("openinfer.kv_offload")

NAME = "nixl-gpu"
_MOST_BATCH_BLOCKS, _BATCH_BYTES = 128, 160 << 20
"""Of blocks that one lease and one READ move: as many as an engine asks for at a time, which else are cut again."""


class GpuTierOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a `GpuTier`."""

    budget_bytes: int
    """The GPU's memory for its own blocks; what is read from peers lands in `connections` batches beside it."""
    peers: tuple[tuple[str, int], ...]
    """Addresses of the others' directories."""
    timeout_s: float
    lease_s: float
    connections: int


class MakeAgent(Protocol):
    """Makes what moves bytes, for a piece of memory."""

    def __call__(self, address: int, num_bytes: int, *, memory: Memory, device: int) -> Agent: ...


class _Opened(NamedTuple):
    """What there is once the tier has its memory."""

    memory: TierMemory
    agent: Agent
    directory: Directory
    peers: Sequence[BlockPeer]


class GpuTier(QueuedTier[Held, BlockBook]):
    """Blocks that this engine saves stay here; what peers have saved is read from them. A peer that is gone has none.

    Its caller has to call `use_memory`; before that it finds nothing and takes no saves.

    Args:
        layout: of its blocks.
        options: as the setting says.
        listener: of the directory; closed with the tier.
        token: that all peers have.
        make_agent: of what moves bytes.

    Raises:
        TierConfigError: not one block fits into the budget.
    """

    medium = TierMedium.CPU  # of this machine: KV events have no word for a second place in a GPU's memory

    def __init__(
        self,
        layout: KvLayout,
        options: GpuTierOptions,
        listener: socket.socket,
        *,
        token: bytes,
        make_agent: MakeAgent,
        clock: Callable[[], float] = time.monotonic,
        wrap_medium: WrapMedium = as_it_is,
    ) -> None:
        self.num_blocks = options.budget_bytes // layout.block_bytes
        if self.num_blocks < 1:
            raise TierConfigError(f"{NAME} has {options.budget_bytes} bytes; one block needs {layout.block_bytes}")
        book = BlockBook(self.num_blocks, lease_s=options.lease_s, clock=clock)
        super().__init__(layout, book, name=NAME, clock=clock)
        self._options = options
        self._listener = listener
        self._token = token
        self._make_agent = make_agent
        self._wrap_medium = wrap_medium
        self._batch_blocks = max(1, min(_MOST_BATCH_BLOCKS, _BATCH_BYTES // layout.block_bytes))
        self._landings: queue.SimpleQueue[int] = queue.SimpleQueue()  # offsets, each of a batch
        self._opened: _Opened | None = None
        self._open_queue(QueueOptions(num_threads=options.connections))

    @property
    def port(self) -> int:
        """Of its directory."""
        return self._listener.getsockname()[1]

    @property
    def digest_key(self) -> bytes | None:
        return None  # the user brings one, the same for all peers

    def pinnable_memory(self) -> Sequence[memoryview]:
        return []

    def use_memory(self, device: MemorySource | None) -> None:
        size_bytes = self.layout.block_bytes
        num_places = self.num_blocks + self._options.connections * self._batch_blocks
        num_bytes = num_places * size_bytes
        kind: Memory = "DRAM" if device is None else "VRAM"
        memory = self._memory_of(device, num_bytes)
        try:
            agent = self._make_agent(memory.address, num_bytes, memory=kind, device=memory.device)
        except BaseException:
            memory.close()
            raise
        for place in range(self.num_blocks, num_places, self._batch_blocks):
            self._landings.put(place * size_bytes)
        # Two engines of one layout cannot read each other where one has a GPU and the other has none.
        same = f"{self.layout.digest} {kind}"
        self._opened = _Opened(
            memory,
            agent,
            Directory(
                self._listener,
                _BlockOffer(self, memory.address),
                token=self._token,
                layout=same,
                description=agent.describe(),
                protocol=PROTOCOL,
            ),
            [self._peer(address, agent, same) for address in self._options.peers],
        )

    def look_up(self, digests: Sequence[Digest]) -> None:
        opened = self._opened
        if opened is None or self._queue.is_refusing:
            return
        opened.memory.use()  # a peer is met by the thread that asks it first, and UCX wants to know its GPU then
        for number, peer in enumerate(opened.peers):
            with self._lock:
                missing = digests[self._index.count_known(digests) :]
            if not missing:
                return
            found = missing[: peer.count(missing)]
            with self._lock:
                self._index.learn(found, number)

    # What peers ask; by threads of the directory.

    def count_own(self, digests: Sequence[Digest]) -> int:
        with self._lock:
            return self._index.count_own(digests)

    def lease(self, digests: Sequence[Digest]) -> tuple[int, list[Stored]]:
        with self._lock:
            return self._index.lease(digests)

    def end_leases(self, lease_ids: Sequence[int]) -> None:
        with self._lock:
            self._index.end_leases(lease_ids)

    # The threads' side.

    def _peer(self, address: tuple[str, int], agent: Agent, same: str) -> BlockPeer:
        timeout_s = self._options.timeout_s
        connection: PeerConnection[Answer] = PeerConnection(
            address, agent, answers, token=self._token, layout=same, timeout_s=timeout_s, protocol=PROTOCOL
        )
        return BlockPeer(connection)

    def _memory_of(self, device: MemorySource | None, num_bytes: int) -> TierMemory:
        if device is None:
            return HostMemory(num_bytes, wrap_medium=self._wrap_medium)
        return device.allocate(num_bytes)

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            raise KvTierError(f"tier {self.name} has no memory; its caller has to call use_memory before it is used")
        return self._opened

    def _close_medium(self) -> None:
        opened, self._opened = self._opened, None
        if opened is None:
            self._listener.close()
            return
        opened.directory.close()
        for peer in opened.peers:
            peer.close()
        opened.agent.close()
        opened.memory.close()

    def _load(self, transfer: BlockTransfer, held: Sequence[Held], blocks: Sequence[BlockMemory]) -> None:
        pairs = zip(held, blocks, strict=True)
        for peer, run in groupby(pairs, key=lambda pair: pair[0].peer if isinstance(pair[0], Elsewhere) else None):
            of_run = list(run)
            for begin in range(0, len(of_run), self._batch_blocks):
                batch, into = zip(*of_run[begin : begin + self._batch_blocks], strict=True)
                if peer is None:
                    self._load_own(transfer, batch, into)
                else:
                    self._load_from(peer, transfer, batch, into)

    def _load_own(self, transfer: BlockTransfer, batch: Sequence[Stored], blocks: Sequence[BlockMemory]) -> None:
        offsets = [stored.block_id * self.layout.block_bytes for stored in batch]
        with transfer.touching():
            sums = self._open.memory.copy_in(blocks, offsets)
        self._complete(transfer, batch, [stored.checksum == found for stored, found in zip(batch, sums, strict=True)])

    def _load_from(
        self, peer: int, transfer: BlockTransfer, batch: Sequence[Elsewhere], blocks: Sequence[BlockMemory]
    ) -> None:
        with transfer.touching():
            pass  # else blocks would be read for a transfer that has ended
        opened, num_read = self._open, 0
        opened.memory.use()
        try:
            with opened.peers[peer].leased([each.digest for each in batch]) as told:
                if told is not None:
                    leased = told.answer.blocks
                    with self._landing() as landing:
                        self._read(told.peer, leased, landing)
                        offsets = [landing + place * self.layout.block_bytes for place in range(len(leased))]
                        with transfer.touching():
                            sums = opened.memory.copy_in(blocks[: len(leased)], offsets)
                    num_read = len(leased)
                    are_right = [block.sum == found for block, found in zip(leased, sums, strict=True)]
                    self._complete(transfer, batch[:num_read], are_right)
        except StillMoving:
            self._forget(batch)
            raise
        except ConnectionError as error:
            logger.warning("a peer's blocks could not be read: %s", error)
        if num_read < len(batch):
            self._forget(batch[num_read:])
            raise BlockFault(TierFailure.MISSING)

    def _read(self, peer: str, leased: Sequence[LeasedBlock], landing: int) -> None:
        """Neighbours in the peer's memory land as neighbours, so that they are one piece.

        Raises:
            ConnectionError: as an agent's `read`.
        """
        opened, size_bytes = self._open, self.layout.block_bytes
        local = opened.memory.address + landing
        pieces: list[Piece] = []
        begin = 0
        for end in range(1, len(leased) + 1):
            if end == len(leased) or leased[end].address != leased[end - 1].address + size_bytes:
                pieces.append(Piece(leased[begin].address, local + begin * size_bytes, (end - begin) * size_bytes))
                begin = end
        opened.agent.read(peer, pieces, timeout_s=self._options.timeout_s)

    @contextlib.contextmanager
    def _landing(self) -> Generator[int]:
        """A place for a batch; one that a transfer may still write to is never used again."""
        try:
            landing = self._landings.get(timeout=self._options.timeout_s)
        except queue.Empty as error:
            raise StillMoving("no place is free for what peers send: too many transfers have not ended") from error
        try:
            yield landing
        except StillMoving:
            raise
        except BaseException:
            self._landings.put(landing)
            raise
        self._landings.put(landing)

    def _complete(self, transfer: BlockTransfer, batch: Sequence[Held], are_right: Sequence[bool]) -> None:
        """Completes blocks up to the first whose bytes are not those that were saved, which is dropped."""
        num_right = len(batch) if all(are_right) else are_right.index(False)
        transfer.complete_blocks(num_right)
        self._counters.count_moved(loaded_blocks=num_right)
        if num_right < len(batch):
            self._counters.count_lost(corrupt_blocks=int(self._drop(batch[num_right])))
            raise BlockFault(TierFailure.CORRUPT)

    def _forget(self, batch: Sequence[Elsewhere]) -> None:
        for each in batch:
            self._drop(each)

    def _save(self, transfer: BlockTransfer, digests: Sequence[Digest], blocks: Sequence[BlockMemory]) -> None:
        for begin in range(0, len(digests), self._batch_blocks):
            end = min(begin + self._batch_blocks, len(digests))
            batch = dict(zip(digests[begin:end], blocks[begin:end], strict=True))
            with self._lock:
                new = {digest: block for digest, block in batch.items() if not self._index.has(digest)}
            if new:
                self._save_batch(transfer, new)
                transfer.has_stored = True
            transfer.complete_blocks(end - begin)

    def _save_batch(self, transfer: BlockTransfer, batch: "dict[Digest, BlockMemory]") -> None:
        block_ids: list[int] = []
        try:
            self._take(block_ids, len(batch))
            offsets = [block_id * self.layout.block_bytes for block_id in block_ids]
            with transfer.touching():
                sums = self._open.memory.copy_out(list(batch.values()), offsets)
            with self._lock:
                filled = zip(block_ids, batch, sums, strict=True)
                saved = sum([self._index.publish(block_id, digest, made) for block_id, digest, made in filled])
                block_ids.clear()  # they are the book's now
            self._counters.count_moved(saved_blocks=saved)
        finally:
            with self._lock:
                for block_id in block_ids:
                    self._index.give_back(block_id)

    def _take(self, block_ids: list[int], num_blocks: int) -> None:
        num_evicted = 0
        with self._lock:
            while len(block_ids) < num_blocks:
                taken = self._index.take()
                if taken is None:
                    break
                block_ids.append(taken[0])
                num_evicted += taken[1] is not None
        if num_evicted:
            self._counters.count_lost(evicted_blocks=num_evicted)
        if len(block_ids) < num_blocks:
            raise BlockFault(TierFailure.BUSY)


class _BlockOffer:
    """The blocks of a tier, as its directory tells of them."""

    def __init__(self, tier: GpuTier, address: int) -> None:
        self._tier = tier
        self._address = address

    def answer(self, question: bytes, leases: set[int]) -> Answer:
        asked = questions.decode(question)
        if isinstance(asked, Count):
            return Counted(self._tier.count_own([Digest(each) for each in asked.digests]))
        if isinstance(asked, Lease):
            lease_id, held = self._tier.lease([Digest(each) for each in asked.digests])
            leases.add(lease_id)
            size_bytes = self._tier.layout.block_bytes
            blocks = [LeasedBlock(self._address + each.block_id * size_bytes, each.checksum) for each in held]
            return Leased(lease_id, tuple(blocks))
        if asked.lease_id in leases:  # a peer gives back its own alone
            leases.discard(asked.lease_id)
            self._tier.end_leases([asked.lease_id])
        return GivenBack()

    def release(self, lease_ids: Sequence[int]) -> None:
        self._tier.end_leases(lease_ids)
