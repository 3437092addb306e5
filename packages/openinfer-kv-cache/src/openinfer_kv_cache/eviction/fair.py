"""`FairLeastRecentlyUsed`: the order of eviction, fair over the owners of blocks.

A block belongs to the owner that took it last, from when it is allocated or found until it is free. Where blocks run
short, the owner that holds most, in use or idle, gives up its oldest idle one: so the owners are brought down to one
level, and those that hold less than that lose nothing (max-min fairness: Bertsekas and Gallager, Data Networks, 1992,
section 6.5.2). One owner alone is served as by `LeastRecentlyUsed`.

    taken, found ──► active ──nothing in use, and none taken for some turnovers of the pool──► dormant
                        ▲                                                                         │
                        └───────────────────────── takes or finds a block ────────────────────────┘

Of each owner, blocks that are retained (`RetainsBlocks`) go after those that are not, until their deadline: an order,
no pin. An owner with retained blocks is not dormant; beyond its share it gives them up as any other. Before those come
the blocks of conversations that are kept (`KeepsConversations`).

What a dormant owner has goes first. An active one's share is the pool over the number of active owners;
`protected_blocks` are those that others leave it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from openinfer_kv_cache.eviction.idle_order import IdleOrder
from openinfer_kv_cache.eviction.kept import KeptBlocks

TURNOVERS = 4
"""An owner is dormant when the pool has given out so many times its blocks since the owner took one."""
MAX_PROTECTED_OWNERS = 256
"""With more active owners none is left its share by others: it would be small, and costs time per owner."""


class FairLeastRecentlyUsed:
    """An `EvictsByOwner` that is a `RetainsBlocks` and a `KeepsConversations`.

    Args:
        num_blocks: blocks of the pool.
        clock: monotonic seconds; read only while blocks are retained.
    """

    __slots__ = (
        "_active",
        "_clock",
        "_deadlines",
        "_dormant",
        "_heap",
        "_held",
        "_kept",
        "_num_blocks",
        "_orders",
        "_owner_of",
        "_taken",
    )

    def __init__(self, num_blocks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadlines: dict[int, float] = {}  # of retained blocks, in use or idle
        self._kept = KeptBlocks()
        self._num_blocks = num_blocks
        self._owner_of = [""] * num_blocks
        self._held: dict[str, int] = {}  # in use or idle; only owners that hold any
        self._orders: dict[str, IdleOrder] = {}  # idle blocks
        self._taken = 0  # blocks given out since the pool began
        # Those that hold any, by when they took a block last (`_taken` then), longest ago first.
        self._active: OrderedDict[str, int] = OrderedDict()
        self._dormant: OrderedDict[str, None] = OrderedDict()
        # (-held, owner), at least as much as each holds that has idle blocks; None until several have any
        self._heap: list[tuple[int, str]] | None = None

    @property
    def num_owners(self) -> int:
        """Those that hold blocks, in use or idle; nothing is kept of others."""
        return len(self._held)

    # What the pool tells.

    def took(self, block_ids: Sequence[int], owner: str, *, new: bool) -> None:
        held = self._held
        if new:
            self._taken += len(block_ids)
            gained = len(block_ids)
            owner_of = self._owner_of
            for block_id in block_ids:
                owner_of[block_id] = owner
        elif len(held) == 1 and owner in held:
            gained = 0  # all blocks are its own
        else:
            gained = self._take_over(block_ids, owner)
        if owner in self._active:
            self._active[owner] = self._taken
            self._active.move_to_end(owner)
            held[owner] += gained
        elif gained or owner in held:
            held[owner] = held.get(owner, 0) + gained
            self._active[owner] = self._taken
            self._dormant.pop(owner, None)
        if self._heap is not None and gained and self._orders.get(owner):
            self._push(owner)

    def retain(self, block_ids: Sequence[int], deadline_s: float | None) -> None:
        """See `RetainsBlocks`."""
        deadlines, orders, owner_of = self._deadlines, self._orders, self._owner_of
        for block_id in block_ids:
            if deadline_s is None:
                deadlines.pop(block_id, None)
            else:
                deadlines[block_id] = max(deadline_s, deadlines.get(block_id, deadline_s))
            order = orders.get(owner_of[block_id])
            if order is not None and block_id in order:
                order.change(block_id)

    @property
    def num_retained(self) -> int:
        """Blocks with a deadline that has not been looked at since it passed."""
        return len(self._deadlines)

    def keep(self, block_ids: Sequence[int], conversation: int, *, turn: int, interval: int) -> None:
        """See `KeepsConversations`."""
        self._kept.keep(block_ids, conversation, turn=turn, interval=interval)

    def drop(self, conversation: int) -> None:
        """See `KeepsConversations`."""
        orders, owner_of = self._orders, self._owner_of
        found = [(block_id, orders.get(owner_of[block_id])) for block_id in self._kept.blocks(conversation)]
        idle = [(block_id, order) for block_id, order in found if order is not None and block_id in order]
        self._kept.drop(conversation)
        for block_id, order in idle:  # head first: the last one is the first to go
            order.drop(block_id, conversation)

    def kept_blocks(self, conversation: int) -> int:
        """See `KeepsConversations`."""
        return len(self._kept.blocks(conversation))

    @property
    def num_kept_idle(self) -> int:
        """See `KeepsConversations`."""
        return sum(order.num_kept for order in self._orders.values()) if self._kept else 0

    def freed(self, block_ids: Sequence[int]) -> None:
        self._unretain(block_ids)
        if len(self._held) == 1:
            self._lose(next(iter(self._held)), len(block_ids))
            return
        owner_of = self._owner_of
        for block_id in block_ids:
            self._lose(owner_of[block_id], 1)

    def admit(self, block_ids: Sequence[int]) -> None:
        if len(self._held) > 1:
            self._admit_several(block_ids)
        elif block_ids:
            self._heap = None
            self._order(self._owner_of[block_ids[0]]).add(block_ids)

    def reuse(self, block_ids: Sequence[int]) -> None:
        orders, owner_of = self._orders, self._owner_of
        if len(orders) == 1:
            next(iter(orders.values())).remove(block_ids)
            return
        for block_id in block_ids:
            orders[owner_of[block_id]].remove((block_id,))

    def forget(self, block_ids: Sequence[int]) -> None:
        self.reuse(block_ids)
        self.freed(block_ids)

    # What it is asked.

    def select(self, num_blocks: int) -> list[int]:
        if len(self._orders) == 1:
            return self._take(next(iter(self._orders)), num_blocks)
        self._expire()
        victims: list[int] = []
        while len(victims) < num_blocks:
            victims += self._select_some(num_blocks - len(victims))
        return victims

    def select_for(self, num_blocks: int, owner: str, *, gaining: int) -> list[int]:
        if len(self._orders) == 1:
            return self._take(next(iter(self._orders)), num_blocks)
        if owner in self._dormant:
            del self._dormant[owner]
            self._active[owner] = self._taken  # it takes blocks now
        held = self._held
        held[owner] = held.get(owner, 0) + gaining
        if self._heap is not None and self._orders.get(owner):
            self._push(owner)
        victims = self.select(num_blocks)
        self._lose(owner, gaining)  # until they are taken
        return victims

    def used_blocks(self, owner: str) -> int:
        return self._held.get(owner, 0) - len(self._orders.get(owner, ()))

    def share_blocks(self) -> int:
        return self._num_blocks // max(1, len(self._active))

    def protected_blocks(self, owner: str | None) -> Mapping[str, int]:
        self._expire()
        active = self._active
        num_active = len(active) + (owner is not None and owner not in active)
        if not 1 < num_active <= MAX_PROTECTED_OWNERS:
            return {}
        share, held = self._num_blocks // num_active, self._held
        return {
            other: max(0, min(len(order), share - held[other] + len(order)))
            for other, order in self._orders.items()
            if order and other != owner and other in active
        }

    # Private.

    def _now_s(self) -> float:
        return self._clock() if self._deadlines else 0.0

    def _order(self, owner: str) -> IdleOrder:
        order = self._orders.get(owner)
        if order is None:
            order = self._orders[owner] = IdleOrder(self._deadlines, self._kept)
        return order

    def _admit_several(self, block_ids: Sequence[int]) -> None:
        owner_of = self._owner_of
        for block_id in block_ids:
            owner = owner_of[block_id]
            order = self._order(owner)
            if not order:
                self._push(owner)
            order.add((block_id,))

    def _unretain(self, block_ids: Sequence[int]) -> None:
        if self._deadlines:
            for block_id in block_ids:
                self._deadlines.pop(block_id, None)
        if self._kept:
            self._kept.forget(block_ids)

    def _take_over(self, block_ids: Sequence[int], owner: str) -> int:
        """Makes blocks in use an owner's, and returns how many were another's."""
        owner_of, gained = self._owner_of, 0
        for block_id in block_ids:
            other = owner_of[block_id]
            if other != owner:
                self._lose(other, 1)
                owner_of[block_id] = owner
                gained += 1
        return gained

    def _lose(self, owner: str, num_blocks: int) -> None:
        left = self._held.get(owner, 0) - num_blocks
        if left > 0:
            self._held[owner] = left
        elif self._held.pop(owner, None) is not None:
            # Names come from outside: nothing is kept of an owner without blocks.
            self._active.pop(owner, None)
            self._dormant.pop(owner, None)
            self._orders.pop(owner, None)

    def _expire(self) -> None:
        active, latest = self._active, self._taken - TURNOVERS * self._num_blocks
        while active:
            owner = next(iter(active))
            if active[owner] > latest:
                return
            if self.used_blocks(owner) or ((order := self._orders.get(owner)) and order.has_retained(self._now_s())):
                active[owner] = self._taken
                active.move_to_end(owner)
            else:
                del active[owner]
                self._dormant[owner] = None

    def _select_some(self, num_blocks: int) -> list[int]:
        while self._dormant:
            owner = next(iter(self._dormant))
            if order := self._orders.get(owner):
                return self._take(owner, min(num_blocks, len(order)))
            del self._dormant[owner]  # what it had idle was pinned since
            self._active[owner] = self._taken
        owner, lead = self._pop_largest()
        taken = self._take(owner, min(num_blocks, len(self._orders[owner]), max(1, lead)))
        if self._orders.get(owner):
            self._push(owner)
        return taken

    def _pop_largest(self) -> tuple[str, int]:
        """The owner that holds most of those with idle blocks, and how many more than the next one at least."""
        heap = self._heap
        if heap is None:
            heap = self._heap = [(-self._held.get(owner, 0), owner) for owner, order in self._orders.items() if order]
            heapify(heap)
        while True:
            level, owner = heappop(heap)
            if self._orders.get(owner):
                held = self._held.get(owner, 0)
                if held == -level:
                    return owner, held + heap[0][0] if heap else held
                heappush(heap, (-held, owner))

    def _take(self, owner: str, num_blocks: int) -> list[int]:
        taken = self._orders[owner].pop(num_blocks, self._now_s())
        self._unretain(taken)
        self._lose(owner, num_blocks)
        return taken

    def _push(self, owner: str) -> None:
        heap = self._heap
        if heap is None:
            return
        heappush(heap, (-self._held.get(owner, 0), owner))
        if len(heap) > 4 * len(self._orders) + 64:
            self._heap = None  # most entries are out of date: it is made anew
