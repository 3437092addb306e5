"""Loads of long prefixes, which are many transfers of a tier: how long they may take, and what a gap in them costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from openinfer_engine.kv_tiers.port import TIMEOUT_BLOCKS, PoolTierPort
from openinfer_engine.kv_tiers.transfer import ChunkedTransfer
from openinfer_kv_cache import Digest, KvTier, TierHit, Transfer, TransferState

CHUNK_BLOCKS = 32


@dataclass
class Chunk:
    num_blocks: int = CHUNK_BLOCKS
    completed_blocks: int = 0
    state: TransferState = TransferState.PENDING
    failure: None = None

    def poll(self) -> TransferState:
        return self.state

    def wait(self, timeout_s: float | None = None) -> TransferState:
        return self.state

    def cancel(self) -> None:
        if self.state is TransferState.PENDING:
            self.state = TransferState.CANCELLED

    def end(self, completed_blocks: int) -> None:
        self.completed_blocks = completed_blocks
        self.state = TransferState.COMPLETED if completed_blocks == self.num_blocks else TransferState.PARTIAL


@dataclass
class Hit:
    digests: tuple[Digest, ...]

    def close(self) -> None: ...


@dataclass
class Tier:
    """Holds everything, and notes how long each of its transfers may take."""

    name: str = "noting"
    timeouts_s: list[float | None] = field(default_factory=list[float | None])

    def find(self, digests: Sequence[Digest]) -> TierHit:
        return Hit(tuple(digests))

    def load(self, hit: TierHit, blocks: Sequence[memoryview], *, timeout_s: float | None = None) -> Transfer:
        self.timeouts_s.append(timeout_s)
        chunk = Chunk(len(hit.digests))
        chunk.end(len(hit.digests))
        return chunk


def load(num_blocks: int) -> set[float | None]:
    """How long the transfers of a load may take, with a timeout of a second."""
    tier, block = Tier(), memoryview(bytearray(1))
    port = PoolTierPort(cast("KvTier", tier), [block] * num_blocks, load_timeout_s=1.0, chunk_blocks=CHUNK_BLOCKS)
    digests = [Digest(number.to_bytes(16, "little")) for number in range(num_blocks)]
    transfer = port.load(port.find(digests), range(num_blocks))
    assert transfer is not None
    assert transfer.completed_blocks == num_blocks
    assert len(tier.timeouts_s) == -(-num_blocks // CHUNK_BLOCKS)
    return set(tier.timeouts_s)


def test_a_longer_load_may_take_longer() -> None:
    assert load(1) == load(TIMEOUT_BLOCKS) == {1.0}
    assert load(TIMEOUT_BLOCKS + 1) == {2.0}
    assert load(142_000 // 16) == {5.0}


def test_what_comes_before_a_gap_goes_on_and_what_comes_after_it_is_cancelled() -> None:
    chunks = [Chunk() for _ in range(5)]
    transfer = ChunkedTransfer(chunks, num_blocks=5 * CHUNK_BLOCKS, begin_s=0.0)
    chunks[3].end(7)
    assert not transfer.is_over()
    assert [each.state for each in chunks[:3]] == [TransferState.PENDING] * 3
    assert chunks[4].state is TransferState.CANCELLED
    chunks[0].end(CHUNK_BLOCKS)
    chunks[1].end(CHUNK_BLOCKS)
    assert not transfer.is_over()
    chunks[2].end(CHUNK_BLOCKS)
    assert transfer.is_over()
    assert transfer.completed_blocks == 3 * CHUNK_BLOCKS + 7
