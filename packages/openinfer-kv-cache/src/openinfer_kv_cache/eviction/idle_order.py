"""`IdleOrder`: idle blocks of one owner in the order in which they are given up; those that are retained go last.

    plain      longest idle ────► shortest │ kept   by conversation │ retained   longest idle ────► shortest
    given up   first                       │ next                   │ last; plain or kept again after their deadline

Of conversations that are kept (`conversations.py`) the one that will go on last is given up first, its tail before its
head.

A retained block's deadline is kept while it is in use, too. Retention orders victims and nothing more: every block that
is here can be given up.
"""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from openinfer_kv_cache.eviction.kept import KeptBlocks


class IdleOrder:
    """Of one owner. `deadlines` is the policy's: of each retained block, in use or idle, in seconds of its clock.

    A deadline that has passed is taken out of it. `kept` is the policy's, too.
    """

    __slots__ = ("_deadlines", "_due", "_kept", "_kept_blocks", "_num_kept", "_plain", "_retained")

    def __init__(self, deadlines: dict[int, float], kept: KeptBlocks) -> None:
        self._deadlines = deadlines
        self._kept_blocks = kept
        self._kept: dict[int, OrderedDict[int, None]] = {}  # by conversation
        self._num_kept = 0
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._retained: OrderedDict[int, None] = OrderedDict()
        self._due: list[tuple[float, int]] = []  # deadlines of retained blocks, with some that are out of date

    def __len__(self) -> int:
        return len(self._plain) + self._num_kept + len(self._retained)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._plain or block_id in self._retained or self._is_kept(block_id)

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    @property
    def num_kept(self) -> int:
        return self._num_kept

    def add(self, block_ids: Sequence[int]) -> None:
        """These became idle, in this order."""
        plain, deadlines, conversation_of = self._plain, self._deadlines, self._kept_blocks.conversation_of
        if not deadlines and not conversation_of:
            for block_id in block_ids:
                plain[block_id] = None
            return
        find, kept = conversation_of.get, self._kept
        for block_id in block_ids:
            if deadlines and (deadline_s := deadlines.get(block_id)) is not None:
                self._retained[block_id] = None
                self._note(deadline_s, block_id)
            elif (conversation := find(block_id)) is None:
                plain[block_id] = None
            elif conversation in kept:
                kept[conversation][block_id] = None
                self._num_kept += 1
            else:
                self._add_kept(block_id, conversation)

    def remove(self, block_ids: Sequence[int]) -> None:
        plain, retained, conversation_of = self._plain, self._retained, self._kept_blocks.conversation_of
        for block_id in block_ids:
            if plain.pop(block_id, self) is self and (not retained or retained.pop(block_id, self) is self):
                self._remove_kept(block_id, conversation_of[block_id])

    def change(self, block_id: int) -> None:
        """The deadline of an idle block has changed: it is retained for longer, or no more."""
        deadline_s = self._deadlines.get(block_id)
        if deadline_s is None:
            if self._retained.pop(block_id, self) is not self:
                self._add_again(block_id)
        else:
            if block_id not in self._retained:
                self.remove((block_id,))
                self._retained[block_id] = None
            self._note(deadline_s, block_id)

    def drop(self, block_id: int, conversation: int) -> None:
        """A block that is idle is kept no longer for a conversation, which was dropped."""
        if block_id not in self._retained:
            self._remove_kept(block_id, conversation)
            self._give_up_first(block_id)

    def pop(self, num_blocks: int, now_s: float) -> list[int]:
        """Removes the blocks to give up, first victim first; that many are here."""
        if self._retained:
            self._expire(now_s)
        taken = _pop(self._plain, num_blocks)
        while self._kept and len(taken) < num_blocks:
            conversation = self._kept_blocks.first_victim(self._kept)
            gone = _pop(self._kept[conversation], num_blocks - len(taken))
            self._num_kept -= len(gone)
            taken += gone
            if not self._kept[conversation]:
                del self._kept[conversation]
        return taken + _pop(self._retained, num_blocks - len(taken))

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
                self._add_again(block_id)

    def _is_kept(self, block_id: int) -> bool:
        conversation = self._kept_blocks.conversation_of.get(block_id)
        return conversation is not None and block_id in self._kept.get(conversation, ())

    def _add_kept(self, block_id: int, conversation: int) -> None:
        self._kept.setdefault(conversation, OrderedDict())[block_id] = None
        self._num_kept += 1

    def _remove_kept(self, block_id: int, conversation: int) -> None:
        blocks = self._kept[conversation]
        del blocks[block_id]
        self._num_kept -= 1
        if not blocks:
            del self._kept[conversation]

    def _add_again(self, block_id: int) -> None:
        """It is retained no longer; of several the head first."""
        conversation = self._kept_blocks.conversation_of.get(block_id)
        if conversation is not None:
            self._add_kept(block_id, conversation)
            self._kept[conversation].move_to_end(block_id, last=False)
        else:
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


def _pop(order: OrderedDict[int, None], most: int) -> list[int]:
    pop = order.popitem
    return [pop(last=False)[0] for _ in range(min(most, len(order)))]
