"""`RemoteTierPort`: the tiers of a data-parallel rank that is a process, as its scheduler, in the engine's, has them.

The rank loads and saves (`share_service.py`). What its tiers hold they tell, also what an earlier engine left there or
another one has stored since: to ask them would take as long as a step. Of tiers that do not tell (`TellingTier`), what
they saved for this engine is known. What they have dropped meanwhile is a load that ends early: its blocks are
computed, and forgotten here.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openinfer_core.engine import KvTierStats
from openinfer_core.replicas.held_prefixes import HeldPrefixes
from openinfer_engine.kv_tiers.port import CHUNK_BLOCKS
from openinfer_engine.kv_tiers.share import TellingShare
from openinfer_kv_cache import Digest, PrefixHit, TierTransfer

LOOK_S = 1.0
"""How often a rank is told of a block that its tiers are not known to hold; they look for news when they choose to."""


class RemoteTierPort:
    """Implements `openinfer_kv_cache.TierPort`, of a model without recurrent states, for one thread.

    Args:
        share: of the rank, which has its blocks and tiers.
        num_blocks: that are remembered at most of tiers that do not tell, those that were used last.
        clock: monotonic seconds.
    """

    chunks_per_slot = 0

    def __init__(self, share: TellingShare, *, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._held = HeldPrefixes(num_blocks) if share.contents is None else share.contents
        self._next_look_s = clock()
        self._transfers: dict[TierTransfer, Callable[[TierTransfer], None]] = {}
        self.clock = clock

    @property
    def is_moving(self) -> bool:
        """Whether something is on its way, or was when it was last looked at."""
        return bool(self._transfers)

    def state_places(self, slot: int) -> Sequence[int]:
        del slot
        return ()

    def find(self, digests: Sequence[Digest]) -> PrefixHit:
        self.settle()
        count = self._held.count(digests)
        if count < len(digests) and self.clock() >= self._next_look_s:
            self._next_look_s = self.clock() + LOOK_S
            self._share.look(digests[count])
        chunks = (digests[begin : min(begin + CHUNK_BLOCKS, count)] for begin in range(0, count, CHUNK_BLOCKS))
        return PrefixHit([_Known(chunk) for chunk in chunks])

    def load(self, found: PrefixHit, places: Sequence[int]) -> TierTransfer | None:
        digests = [digest for hit in found.hits for digest in hit.digests]
        found.close()
        if not digests:
            return None
        self._held.note(digests)

        def forget(transfer: TierTransfer) -> None:
            self._held.forget(digests[transfer.completed_blocks :])

        return self._begin(self._share.load(digests, places[: len(digests)]), forget)

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer | None:
        def note(transfer: TierTransfer) -> None:
            self._held.note(digests[: transfer.completed_blocks])

        return self._begin(self._share.save(digests, places), note)

    def settle(self) -> None:
        for transfer in [each for each in self._transfers if each.is_over()]:
            self._transfers.pop(transfer)(transfer)

    def wait(self, timeout_s: float) -> None:
        """Waits until one of the transfers is over, at most so long."""
        for transfer in self._transfers:
            transfer.wait(timeout_s)
            break

    def stats(self) -> tuple[KvTierStats, ...]:
        return self._share.stats()

    @property
    def faults(self) -> int:
        return self._share.faults

    def close(self) -> None:
        """The rank ends its transfers when it leaves, and then closes its tiers."""
        self._transfers.clear()

    def _begin(self, transfer: TierTransfer, ended: Callable[[TierTransfer], None]) -> TierTransfer:
        self._transfers[transfer] = ended
        return transfer


@dataclass(frozen=True, slots=True)
class _Known:
    """A `TierHit` that holds nothing: the rank's tiers hold what they find when they load."""

    digests: Sequence[Digest]

    def close(self) -> None:
        pass
