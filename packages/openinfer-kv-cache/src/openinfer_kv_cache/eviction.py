"""Which idle block is given up first: the `EvictionPolicy` protocol, and `LeastRecentlyUsed`."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order over the idle blocks of one pool.

    The pool tells it of every block that becomes idle and every one that stops being idle. Pinned blocks are
    not idle, so a policy never sees them. `openinfer_kv_cache.testing.check_eviction_policy` is its
    conformance test.
    """

    def admit(self, block_ids: Sequence[int]) -> None:
        """These became idle, in this order (the tail of a sequence before its head)."""
        ...

    def reuse(self, block_ids: Sequence[int]) -> None:
        """These idle blocks were found again and are in use: a hit."""
        ...

    def forget(self, block_ids: Sequence[int]) -> None:
        """These idle blocks lost their content for another reason (expired, cleared)."""
        ...

    def select(self, num_blocks: int) -> list[int]:
        """Removes and returns the `num_blocks` blocks to evict, first victim first; that many are held."""
        ...


class LeastRecentlyUsed:
    """Evicts the block that has been idle longest.

    A sequence releases its blocks tail first, and using a block means using all before it, so of one chain of
    prefixes the longest is always evicted before the shorter ones that it needs to be found.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def admit(self, block_ids: Sequence[int]) -> None:
        """Appends to the end of the order."""
        order = self._order
        for block_id in block_ids:
            order[block_id] = None

    def reuse(self, block_ids: Sequence[int]) -> None:
        """Takes out of the order."""
        order = self._order
        for block_id in block_ids:
            del order[block_id]

    def forget(self, block_ids: Sequence[int]) -> None:
        """Takes out of the order."""
        self.reuse(block_ids)

    def select(self, num_blocks: int) -> list[int]:
        """Takes from the front of the order."""
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(num_blocks)]
