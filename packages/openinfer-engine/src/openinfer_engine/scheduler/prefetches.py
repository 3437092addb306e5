"""`Prefetches`: what requests that wait will load from slow KV tiers is brought into the fastest one before their turn.

    arrives ── waits ──► its chain, window after window: held by the fastest tier, or on its way up
       │                         │ no tier has more, or what waits has as much as it may
       └── its turn, or its end ─┴──► left: a window under way is cancelled, what is up stays as any other block

It is done for the first `MAX_WAITING` that wait, `MAX_WINDOWS` at a time, those of the first before those of the next,
and for no more blocks altogether than the port says, so that what waits pushes out little that is needed sooner.
Nothing waits for it: a load takes each block from where it is.
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from openinfer_engine.scheduler.sequence import Sequence
from openinfer_kv_cache import Digest, PrefetchingPort, TierTransfer

MAX_WAITING = 4
MAX_WINDOWS = 4
WINDOW_BLOCKS = 32
MAX_LOOKS = 8
"""Windows of a request that are looked at in one plan: those that the fastest tier has cost a look and no more."""


@dataclass(slots=True, eq=False)
class _Chain:
    """Of one request that waits."""

    digests: ListLike[Digest]
    num_seen: int = 0
    """From the beginning, that the tiers were asked for."""
    num_up: int = 0
    """Of these, that were brought up or are on their way."""
    transfers: list[TierTransfer] = field(default_factory=list[TierTransfer])
    is_done: bool = False


class Prefetches:
    """Of one scheduler whose models have one block table."""

    def __init__(self, port: PrefetchingPort, *, block_size_tokens: int) -> None:
        self._port = port
        self._block_tokens = block_size_tokens
        self._chains: dict[Sequence, _Chain] = {}
        self.prefetched_blocks = 0

    @property
    def waiting_blocks(self) -> int:
        """That were brought up, or are on their way, for requests that wait now."""
        return sum(chain.num_up for chain in self._chains.values())

    def advance(self, waiting: Iterable[Sequence]) -> None:
        """Goes on for these, the first that wait after a plan, and leaves all others."""
        wanted = [sequence for sequence in waiting if sequence.may_match][:MAX_WAITING]
        for chain in self._chains.values():
            self._settle(chain)
        for sequence in [each for each in self._chains if each not in wanted]:
            for transfer in self._chains.pop(sequence).transfers:
                transfer.cancel()
        room = self._port.prefetch_blocks if wanted else 0
        for sequence in wanted if room else ():
            if sequence not in self._chains:
                self._chains[sequence] = self._chain_of(sequence)
            self._go_on(self._chains[sequence], room)

    def _chain_of(self, sequence: Sequence) -> _Chain:
        """What the pool does not have of a prompt."""
        cached_blocks = sequence.kv.count_cached_tokens() // self._block_tokens
        return _Chain(sequence.kv.matchable_digests()[cached_blocks:])

    def _go_on(self, chain: _Chain, room: int) -> None:
        for _ in range(MAX_LOOKS):
            most = min(WINDOW_BLOCKS, room - self.waiting_blocks)
            window = chain.digests[chain.num_seen : chain.num_seen + max(0, most)]
            if chain.is_done or not window or self._num_windows >= MAX_WINDOWS:
                return
            found = self._port.prefetch(window)
            chain.num_seen += found.num_held
            chain.is_done = found.num_held < len(window)
            if found.transfer is not None:
                chain.transfers.append(found.transfer)
                chain.num_up += found.transfer.num_blocks

    @property
    def _num_windows(self) -> int:
        """That are on their way."""
        return sum(len(chain.transfers) for chain in self._chains.values())

    def _settle(self, chain: _Chain) -> None:
        over = [transfer for transfer in chain.transfers if transfer.is_over()]
        chain.transfers = [transfer for transfer in chain.transfers if transfer not in over]
        for transfer in over:
            self.prefetched_blocks += transfer.completed_blocks
            # What failed once is loaded from where it is: no time is spent on it twice.
            chain.is_done |= transfer.completed_blocks < transfer.num_blocks
