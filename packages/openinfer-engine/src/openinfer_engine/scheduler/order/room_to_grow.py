"""`RoomToGrow`: after preemptions, what a tenant's rows are left to grow by before more of the tenant's is admitted.

A sequence that is admitted into the last free blocks is preempted as soon as the others have grown, and computes its
prompt again: with long answers in a small pool that is most of what is computed. How much a sequence will generate is
not known, so what is left for each row follows what happens:

    one block ── one of the tenant's is preempted for want of blocks ──► twice as much, MOST_BLOCKS at most
        ▲                                                                      │
        └──────────── one of the tenant's ends: a sixteenth less ──────────────┘

Until a first preemption nothing is as if this were not here. A row is left no more than it can still grow by. Other
tenants' requests wait for none of it, and where nothing of the tenant runs it is nothing.
"""

from collections.abc import Iterable

from openinfer_engine.scheduler.sequence import Sequence

MOST_BLOCKS = 256


class RoomToGrow:
    """Of one run queue."""

    def __init__(self, *, block_size_tokens: int) -> None:
        self._block_tokens = block_size_tokens
        self._blocks: dict[str, int] = {}  # by tenant, for each row, where it is more than one

    def preempted(self, sequence: Sequence) -> None:
        """Blocks were short, and it gave way."""
        tenant = sequence.request.tenant
        self._blocks[tenant] = min(MOST_BLOCKS, 2 * self._blocks.get(tenant, 1))

    def ended(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        blocks = self._blocks.pop(tenant, 1)
        blocks -= -(-blocks // 16)
        if blocks > 1:
            self._blocks[tenant] = blocks

    def blocks_for(self, sequence: Sequence, running: Iterable[Sequence]) -> int:
        """Beyond one a row, that are to be free after a sequence has been admitted, for it and its tenant's rows."""
        tenant = sequence.request.tenant
        most = self._blocks.get(tenant, 1) - 1
        if not most:
            return 0
        rows = [each for each in running if each.request.tenant == tenant]
        return sum(min(most, self._left_blocks(each)) for each in (sequence, *rows)) if rows else 0

    def _left_blocks(self, sequence: Sequence) -> int:
        return -(-(sequence.final_tokens - sequence.known_tokens) // self._block_tokens)
