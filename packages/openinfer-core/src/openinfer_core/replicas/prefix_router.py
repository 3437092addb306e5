"""`PrefixRouter`: sends a request to the replica that holds most of its prefix, as long as work is spread.

    prompt ─► digests of its blocks ─► replicas within the bound of load ─► longest prefix held
                                                                      └─► none holds any: the lesser load of two

What a replica holds is what was sent there, the least recently used first forgotten, up to its pool's blocks; a router
that is told more, as by KV events, gives `PrefixHoldings` and digests of its own. The bound is that of consistent
hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): a replica takes no request that would give it more
than `1 + slack` times the mean, unless it has no request open: of replicas that are idle the one with the prefix is
right, however much it did before. Work is counted in tokens to compute, and old work weighs less and less as new comes,
so no clock is needed: two runs of one sequence of requests agree.
"""

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openinfer_core.replicas.held_prefixes import HeldPrefixes, PrefixHoldings, prefix_digests
from openinfer_core.request import GenerateRequest

_MEMORY_TOKENS = 1 << 20  # of work per replica, after which work before it weighs 1/e


class PrefixRouter:
    """Chooses among replicas by name. Not for several threads.

    Args:
        block_size_tokens: of the replicas' pools.
        key: 16 to 64 secret bytes: digests of prompts cannot be told from outside.
        slack: how much more than the mean a replica may have to do.
        memory_tokens: of work per replica, after which work before it weighs 1/e.
        seed: of the two replicas that are compared.
        digests: of a prompt's whole blocks, each over all tokens up to its end; by default those of `key`.
        hold: what a replica of this name, whose pool has so many blocks, is believed to hold.
    """

    def __init__(
        self,
        *,
        block_size_tokens: int,
        key: bytes,
        slack: float = 0.25,
        memory_tokens: int = _MEMORY_TOKENS,
        seed: int = 0,
        digests: Callable[[GenerateRequest], Sequence[bytes]] | None = None,
        hold: Callable[[str, int], PrefixHoldings] | None = None,
    ) -> None:
        if block_size_tokens < 1 or slack < 0 or memory_tokens < 1:
            raise ValueError("a block has a token at least, and slack and memory are not negative")
        self._block_size_tokens = block_size_tokens
        self._digests = digests or functools.partial(prefix_digests, block_size_tokens=block_size_tokens, key=key)
        self._hold = hold or _hold
        self._slack = slack
        self._memory_tokens = memory_tokens
        self._random = random.Random(seed)  # noqa: S311 - of two replicas, the lesser load wins; nothing is secret
        self._replicas: dict[str, _Replica] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._replicas)

    @property
    def loads(self) -> dict[str, float]:
        """Tokens of work of each replica, the older the less."""
        return {name: replica.load for name, replica in sorted(self._replicas.items())}

    def add(self, name: str, *, num_blocks: int) -> None:
        """A replica, which holds nothing yet; it begins with the mean of the loads, or all would go to it."""
        loads = [replica.load for replica in self._replicas.values()]
        self._replicas[name] = _Replica(self._hold(name, num_blocks), sum(loads) / len(loads) if loads else 0.0)

    def remove(self, name: str) -> None:
        """Does nothing for one that is not there."""
        self._replicas.pop(name, None)

    def choose(self, request: GenerateRequest) -> str:
        """The replica for a request, which is open there until `ended`, its work, and remembered as what it holds.

        Raises:
            LookupError: there is none.
        """
        if not self._replicas:
            raise LookupError("there is no replica")
        digests = self._digests(request)
        held = {name: replica.held.count(digests) for name, replica in self._replicas.items()}
        costs = {name: self._cost(request, blocks) for name, blocks in held.items()}
        name = self._best(held, self._within_bound(costs))
        self._take(self._replicas[name], digests, costs[name])
        return name

    def ended(self, name: str) -> None:
        """A request that this replica was chosen for is open no longer; does nothing for one that is not there."""
        if (replica := self._replicas.get(name)) is not None:
            replica.num_open -= 1

    def _within_bound(self, costs: dict[str, int]) -> list[str]:
        total, size = sum(replica.load for replica in self._replicas.values()), len(self._replicas)
        least = min(self._replicas, key=lambda name: (self._replicas[name].load, name))
        return [
            name
            for name, replica in sorted(self._replicas.items())
            if name == least
            or not replica.num_open
            or replica.load + costs[name] <= (1 + self._slack) * (total + costs[name]) / size
        ]

    def _best(self, held: dict[str, int], names: Sequence[str]) -> str:
        most = max(held[name] for name in names)
        candidates = [name for name in names if held[name] == most]
        if len(candidates) > 2:
            candidates = self._random.sample(candidates, 2)
        return min(candidates, key=lambda name: (self._replicas[name].load, name))

    def _cost(self, request: GenerateRequest, held_blocks: int) -> int:
        """Tokens to compute: a prompt's last token is always computed, and how many follow is not known."""
        return max(1, len(request.prompt_token_ids) - held_blocks * self._block_size_tokens)

    def _take(self, replica: "_Replica", digests: Sequence[bytes], cost: int) -> None:
        replica.num_open += 1
        replica.load += cost
        replica.held.note(digests)
        kept = math.exp(-cost / (self._memory_tokens * len(self._replicas)))
        for each in self._replicas.values():
            each.load *= kept


def _hold(name: str, num_blocks: int) -> PrefixHoldings:
    del name  # what was sent is known without it
    return HeldPrefixes(num_blocks)


@dataclass(slots=True)
class _Replica:
    """A replica, as the router knows it."""

    held: PrefixHoldings
    load: float
    num_open: int = 0
