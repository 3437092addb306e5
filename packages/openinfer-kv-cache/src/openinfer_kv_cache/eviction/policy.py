"""Which idle block is given up first: the `EvictionPolicy` protocol, and `LeastRecentlyUsed`."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable


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


@runtime_checkable
class EvictsByOwner(EvictionPolicy, Protocol):
    """An `EvictionPolicy` that is told whose blocks are: of the tenant, or of whom else `owner` names.

    A hook that not every policy has. A block belongs to the owner that took it last, until it is free: after `select`,
    `select_for` and `forget`, or where the pool says so.
    """

    def took(self, block_ids: Sequence[int], owner: str, *, new: bool) -> None:
        """These are an owner's from here on: allocated (`new`), or found, and reused where they were idle."""
        ...

    def freed(self, block_ids: Sequence[int]) -> None:
        """These became free and were never idle."""
        ...

    def select_for(self, num_blocks: int, owner: str, *, gaining: int) -> list[int]:
        """As `select`, for an owner that is about to take `gaining` blocks, some of them free already."""
        ...

    def used_blocks(self, owner: str) -> int:
        """An owner's blocks that are not idle."""
        ...

    def share_blocks(self) -> int:
        """What of the pool is each active owner's."""
        ...

    def protected_blocks(self, owner: str | None) -> Mapping[str, int]:
        """Idle blocks that this owner should leave others, where it can wait or give something up; of None, all.

        By the owner whose they are; one that is not there has none.
        """
        ...


@runtime_checkable
class RetainsBlocks(EvictionPolicy, Protocol):
    """An `EvictionPolicy` that gives up some blocks after others, until a deadline.

    A hook that not every policy has.
    """

    def retain(self, block_ids: Sequence[int], deadline_s: float | None) -> None:
        """These blocks, in use or idle, are given up after others until a deadline of the pool's clock; None: no more.

        A block that has a later deadline keeps it: of several that ask for a block, the longest counts. They are
        retained until they are free. It is an order alone: each of them is given up where there is no other.
        """
        ...

    @property
    def num_retained(self) -> int:
        """How many are."""
        ...


@runtime_checkable
class KeepsConversations(EvictionPolicy, Protocol):
    """An `EvictionPolicy` that gives up blocks of some conversations after others; see `conversations.py`.

    A hook that not every policy has. A conversation is known by a number, that of its first turn.
    """

    def keep(self, block_ids: Sequence[int], conversation: int, *, turn: int, interval: int) -> None:
        """Blocks of a conversation, head first, are given up after others that are not retained, until `drop`.

        They are in use. What it kept before it keeps, too. It is expected to have gone on `interval` turns after
        `turn`, of all that are counted. Blocks of another conversation are this one's from here on.
        """
        ...

    def drop(self, conversation: int) -> None:
        """What a conversation keeps is given up first; nothing where it keeps nothing."""
        ...

    def kept_blocks(self, conversation: int) -> int:
        """How many it keeps."""
        ...

    @property
    def num_kept_idle(self) -> int:
        """Idle blocks that are given up after others for a conversation."""
        ...


class LeastRecentlyUsed:
    """Evicts the block that has been idle longest."""

    # A sequence releases its blocks tail first, and using a block means using all before it: so of one chain of
    # prefixes the longest is always evicted before the shorter ones that it needs to be found.
    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def admit(self, block_ids: Sequence[int]) -> None:
        order = self._order
        for block_id in block_ids:
            order[block_id] = None

    def reuse(self, block_ids: Sequence[int]) -> None:
        order = self._order
        for block_id in block_ids:
            del order[block_id]

    def forget(self, block_ids: Sequence[int]) -> None:
        self.reuse(block_ids)

    def select(self, num_blocks: int) -> list[int]:
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(num_blocks)]


class Expiry:
    """When each idle block became idle, oldest first; the clock is read once per call, never per block."""

    __slots__ = ("_clock", "_idle_since", "_ttl_s")

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._idle_since: OrderedDict[int, float] = OrderedDict()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._idle_since

    def __len__(self) -> int:
        return len(self._idle_since)

    def admit(self, block_ids: Sequence[int]) -> None:
        now_s = self._clock()
        for block_id in block_ids:
            self._idle_since[block_id] = now_s

    def remove(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            del self._idle_since[block_id]

    def due(self) -> list[int]:
        latest_s = self._clock() - self._ttl_s
        overdue: list[int] = []
        for block_id, since_s in self._idle_since.items():
            if since_s > latest_s:  # in the order in which they became idle: the others are younger
                break
            overdue.append(block_id)
        return overdue
