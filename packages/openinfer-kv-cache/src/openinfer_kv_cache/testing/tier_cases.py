"""What the tiers' conformance kit is given, and the blocks that it works with."""

import hashlib
import random
from collections.abc import Sequence
from typing import Protocol

from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.layout import KvLayout
from openinfer_kv_cache.spec import KvDtype, KvSpec, PagedGroup, PagedTensor
from openinfer_kv_cache.testing.tier_faults import GIVE_UP_S, FaultInjector
from openinfer_kv_cache.tiers.contract import KvTier, Transfer, TransferState

CANARY = 0xA5


class TierCase(Protocol):
    """One place to keep blocks in, which the kit opens, closes and opens again."""

    @property
    def is_persistent(self) -> bool:
        """Whether what was saved is there after `close` and `open`."""
        ...

    @property
    def capacity_blocks(self) -> int:
        """How many blocks it certainly keeps; at least 8. It cannot keep five times as many."""
        ...

    def open(self, layout: KvLayout, faults: FaultInjector) -> KvTier:
        """Opens a tier whose medium `faults` wraps, with a breaker that the few faults of a rule do not open."""
        ...


def kit_layout(*, model_tag: str = "tier kit", head_dim: int = 3_900) -> KvLayout:
    """A layout of small blocks, of a size that no page or line divides."""
    tensor = PagedTensor(name="k", num_heads=1, head_dim=head_dim, dtype=KvDtype.UINT8)
    spec = KvSpec(model_tag=model_tag, paged=(PagedGroup(name="attention", num_layers=1, tensors=(tensor,)),))
    return KvLayout.from_spec(spec, block_size_tokens=1)


def chain(seed: int, num_blocks: int) -> list[Digest]:
    return [Digest(hashlib.blake2b(b"%d/%d" % (seed, i), digest_size=16).digest()) for i in range(num_blocks)]


def content(digest: Digest, layout: KvLayout) -> bytes:
    return random.Random(digest).randbytes(layout.block_bytes)  # noqa: S311 -- bytes to compare, no secret


def filled(digests: Sequence[Digest], layout: KvLayout) -> list[memoryview]:
    return [memoryview(bytearray(content(digest, layout))) for digest in digests]


def empty(num_blocks: int, layout: KvLayout) -> list[memoryview]:
    return [memoryview(bytearray([CANARY]) * layout.block_bytes) for _ in range(num_blocks)]


def ended(transfer: Transfer) -> TransferState:
    """Waits for the end and checks what every transfer promises about it."""
    state = transfer.wait(GIVE_UP_S)
    assert state is not TransferState.PENDING, f"the transfer did not end in {GIVE_UP_S} s"
    assert transfer.poll() is state, "an ended transfer changed its state"
    assert 0 <= transfer.completed_blocks <= transfer.num_blocks, "more blocks completed than were asked for"
    is_short = state is TransferState.PARTIAL
    assert (transfer.failure is not None) == is_short, f"{state} with failure {transfer.failure}"
    if state is TransferState.COMPLETED:
        assert transfer.completed_blocks == transfer.num_blocks, "completed without all blocks"
    return state


def save(tier: KvTier, digests: Sequence[Digest]) -> TransferState:
    # Memory is reused at once, as an engine does: a tier that still reads it stores wrong bytes.
    blocks = filled(digests, tier.layout)
    state = ended(tier.save(digests, blocks))
    for block in blocks:
        block[:] = bytes(len(block))
    return state


def load(tier: KvTier, digests: Sequence[Digest]) -> int:
    """Loads what is found of a chain, checks every byte that completed, and returns how many blocks did."""
    hit = tier.find(digests)
    assert list(hit.digests) == list(digests[: len(hit.digests)]), "find gave something else than a beginning"
    blocks = empty(len(hit.digests), tier.layout)
    transfer = tier.load(hit, blocks)
    ended(transfer)
    check_completed(transfer, digests, blocks, tier.layout)
    return transfer.completed_blocks


def check_completed(
    transfer: Transfer, digests: Sequence[Digest], blocks: Sequence[memoryview], layout: KvLayout
) -> None:
    """Compares what completed with the only right bytes."""
    for index in range(transfer.completed_blocks):
        assert bytes(blocks[index]) == content(digests[index], layout), f"WRONG KV in block {index}"
