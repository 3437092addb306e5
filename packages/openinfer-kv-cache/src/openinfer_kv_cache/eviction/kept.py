"""`KeptBlocks`: blocks of conversations that are given up after others, and which of these conversations goes first."""

from collections.abc import Collection, Iterable, Sequence


class KeptBlocks:
    """Of one policy. A block is of one conversation at most, the last one that kept it.

    Turns are counted from 1, those of all conversations.
    """

    __slots__ = ("_blocks", "_latest", "_turns", "conversation_of")

    def __init__(self) -> None:
        self.conversation_of: dict[int, int] = {}  # by block, in use or idle
        self._blocks: dict[int, dict[int, None]] = {}  # by conversation
        # by conversation: its last turn, and the turn at which it is expected to have gone on
        self._turns: dict[int, tuple[int, int]] = {}
        self._latest = 0

    def __bool__(self) -> bool:
        return bool(self.conversation_of)

    def keep(self, block_ids: Sequence[int], conversation: int, *, turn: int, interval: int) -> None:
        """What a conversation keeps from here on, beside what it kept before."""
        of = self.conversation_of
        new = [block_id for block_id in block_ids if of.get(block_id) != conversation]
        self.forget(new)
        self._latest = max(self._latest, turn)
        self._turns[conversation] = turn, turn + interval
        self._blocks.setdefault(conversation, {}).update(dict.fromkeys(new))
        of.update(dict.fromkeys(new, conversation))

    def blocks(self, conversation: int) -> Collection[int]:
        """What it keeps, in the order in which that became its own: of one turn the head first."""
        return self._blocks.get(conversation, ())

    def drop(self, conversation: int) -> None:
        for block_id in self._blocks.pop(conversation, ()):
            del self.conversation_of[block_id]
        self._turns.pop(conversation, None)

    def forget(self, block_ids: Iterable[int]) -> None:
        """These were given up, or another conversation keeps them."""
        taken = self.conversation_of.pop
        for block_id in block_ids:
            conversation = taken(block_id, None)
            if conversation is not None:
                del self._blocks[conversation][block_id]

    def first_victim(self, conversations: Iterable[int]) -> int:
        """The one that will go on last: one that should have long ago, else the one expected last."""

        def expected(conversation: int) -> int:
            turn, due = self._turns[conversation]
            is_overdue = self._latest - due > due - turn
            return due + self._latest if is_overdue else due

        return max(conversations, key=expected)
