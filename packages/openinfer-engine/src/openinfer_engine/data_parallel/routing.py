"""`RankRouter`: which data-parallel rank gets a request: one that has its prefix, unless it has much more to do.

The least sum wins of the prompt tokens that a rank has yet to compute, a share for each request that it has open, and
twice the request's tokens that it does not hold: to compute them makes a step of all ranks longer. What a rank holds is
what was sent there (`HeldPrefixes`), so that a prefix counts from the moment at which it comes, not only once it is
computed, and what its tiers tell that they hold (`TierContents`), whichever engine stored it. Where sums are equal, as
among idle ranks, the pool that was filled least is.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from openinfer_core import GenerateRequest, RequestId
from openinfer_core.replicas.held_prefixes import HeldPrefixes
from openinfer_engine.kv_tiers.contents import TierContents
from openinfer_kv_cache import Digest, PrefixHasher

OPEN_REQUEST_TOKENS = 64
"""What an open request counts as: each step computes a row of it, and how many will follow is not known."""
UNCACHED_WEIGHT = 2
"""Of a token that is computed on one rank although another one holds it, against one that waits."""


@runtime_checkable
class SharesDigests(Protocol):
    """A `Scheduler` that digests prompts by a `PrefixHasher`, as the router has done before."""

    def share_digests(self, hasher: PrefixHasher) -> None:
        """Has its hasher remember what it computes together with this one; called once, before the first request."""
        ...


class RankRouter:
    """Not for several threads.

    Args:
        tiers: what those of each rank hold; None of a rank without, or whose tiers do not tell.
        num_blocks: that are remembered of what was sent to each.
        hasher: names blocks as the ranks' schedulers do.
    """

    def __init__(self, tiers: Sequence[TierContents | None], *, num_blocks: int, hasher: PrefixHasher) -> None:
        self._hasher = hasher
        self._ranks = [_Load(HeldPrefixes(num_blocks), each) for each in tiers]
        self._open: dict[RequestId, int] = {}

    def rank_of(self, request_id: RequestId) -> int | None:
        """None for a request that is not open."""
        return self._open.get(request_id)

    def open_ids(self, rank: int) -> frozenset[RequestId]:
        return frozenset(self._ranks[rank].pending)

    def choose(self, request: GenerateRequest) -> int:
        """The rank for a request, which counts as its work until `ended`."""
        root = self._hasher.root(lora_name=request.lora, cache_salt=request.cache_salt)
        digests = self._hasher.chain(root, request.prompt_token_ids)
        costs = [self._cost(request, each.count_held(digests)) for each in self._ranks]
        sums = [each.tokens + UNCACHED_WEIGHT * cost for each, cost in zip(self._ranks, costs, strict=True)]
        rank = min(range(len(sums)), key=lambda each: (sums[each], self._ranks[each].sent_tokens, each))
        chosen = self._ranks[rank]
        chosen.sent_tokens += costs[rank]
        chosen.pending[request.request_id] = costs[rank]
        chosen.held.note(digests)
        self._open[request.request_id] = rank
        return rank

    def shown(self, request_id: RequestId) -> None:
        """The prompt of a request is computed: its first token is there."""
        if (rank := self._open.get(request_id)) is not None:
            self._ranks[rank].pending[request_id] = 0

    def ended(self, request_id: RequestId) -> None:
        """Does nothing for a request that is not open."""
        if (rank := self._open.pop(request_id, None)) is not None:
            del self._ranks[rank].pending[request_id]

    def forget(self) -> None:
        """No pool holds anything any longer: they were flushed."""
        for each in self._ranks:
            each.held.clear()

    def _cost(self, request: GenerateRequest, held_blocks: int) -> int:
        """Tokens to compute: a prompt's last token is always computed."""
        return max(1, len(request.prompt_token_ids) - held_blocks * self._hasher.block_size_tokens)


@dataclass(slots=True)
class _Load:
    """What one rank has."""

    held: HeldPrefixes
    tiers: TierContents | None
    sent_tokens: int = 0
    """Uncached ones, of all requests that it was sent."""
    pending: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    """Of each open request the prompt tokens that it has yet to compute, about."""

    @property
    def tokens(self) -> int:
        return sum(self.pending.values()) + OPEN_REQUEST_TOKENS * len(self.pending)

    def count_held(self, digests: Sequence[Digest]) -> int:
        """Blocks from the beginning of a prompt on that need not be computed."""
        held, tiers = self.held, self.tiers
        if tiers is None:
            return held.count(digests)
        return sum(1 for _ in itertools.takewhile(lambda digest: digest in held or digest in tiers, digests))
