"""`IdleOrder`: idle blocks of one owner in the order in which they are given up; those that are retained go last.

    plain      longest idle ────► shortest │ retained   longest idle ────► shortest
    given up   first                       │ when there is nothing else; plain again after their deadline

A retained block's deadline is kept while it is in use, too. Retention orders victims and nothing more: every block that
is here can be given up.
"""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush


class IdleOrder:
    """Of one owner. `deadlines` is the policy's: of each retained block, in use or idle, in seconds of its clock.

    A deadline that has passed is taken out of it.
    """

    __slots__ = ("_deadlines", "_due", "_plain", "_retained")

    def __init__(self, deadlines: dict[int, float]) -> None:
        self._deadlines = deadlines
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._retained: OrderedDict[int, None] = OrderedDict()
        self._due: list[tuple[float, int]] = []  # deadlines of retained blocks, with some that are out of date

    def __len__(self) -> int:
        return len(self._plain) + len(self._retained)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._plain or block_id in self._retained

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    def add(self, block_ids: Sequence[int]) -> None:
        """These became idle, in this order."""
        plain, deadlines = self._plain, self._deadlines
        if not deadlines:
            for block_id in block_ids:
                plain[block_id] = None
            return
        for block_id in block_ids:
            deadline_s = deadlines.get(block_id)
            if deadline_s is None:
                plain[block_id] = None
            else:
                self._retained[block_id] = None
                self._note(deadline_s, block_id)

    def remove(self, block_id: int) -> None:
        if self._plain.pop(block_id, self) is self:
            del self._retained[block_id]

    def change(self, block_id: int) -> None:
        """The deadline of an idle block has changed: it is retained for longer, or no more."""
        deadline_s = self._deadlines.get(block_id)
        if deadline_s is None:
            if self._retained.pop(block_id, self) is not self:
                self._give_up_first(block_id)
        else:
            if block_id not in self._retained:
                del self._plain[block_id]
                self._retained[block_id] = None
            self._note(deadline_s, block_id)

    def pop(self, num_blocks: int, now_s: float) -> list[int]:
        """Removes the blocks to give up, first victim first; that many are here."""
        if self._retained:
            self._expire(now_s)
        taken: list[int] = []
        for order in (self._plain, self._retained):
            pop = order.popitem
            taken += [pop(last=False)[0] for _ in range(min(num_blocks - len(taken), len(order)))]
        return taken

    def has_retained(self, now_s: float) -> bool:
        """Whether a block is retained until later than now."""
        if self._retained:
            self._expire(now_s)
        return bool(self._retained)

    def _expire(self, now_s: float) -> None:
        overdue: list[int] = []
        while self._due and self._due[0][0] <= now_s:
            deadline_s, block_id = heappop(self._due)
            if self._deadlines.get(block_id) == deadline_s and block_id in self._retained:
                overdue.append(block_id)
        if overdue:
            # In the order in which they became idle, so that a longer prefix goes before the shorter one it needs.
            gone = set(overdue)
            for block_id in [each for each in reversed(self._retained) if each in gone]:
                del self._retained[block_id], self._deadlines[block_id]
                self._give_up_first(block_id)

    def _give_up_first(self, block_id: int) -> None:
        # It was to be kept longer than those that are idle for as long; what was kept for nothing goes first.
        self._plain[block_id] = None
        self._plain.move_to_end(block_id, last=False)

    def _note(self, deadline_s: float, block_id: int) -> None:
        heappush(self._due, (deadline_s, block_id))
        if len(self._due) > 4 * len(self._retained) + 64:
            self._due = [(self._deadlines[each], each) for each in self._retained]
            heapify(self._due)
