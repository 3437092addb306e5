"""`ConnectionTable`: all connections of one server, and which of them makes room for a newcomer.

    accepted ──► waiting ──head complete──► asking ──answered──► waiting ──► closed
                    └──evicted──► closed          └──refused, and still sending──► spent ──evicted, or over──► closed

One that makes room is of the client that has most without a request: a spent one, else the one that waits for longest.
Waiting are those without a request: handshakes, silent connections, unfinished heads, kept alive ones. Clients that
hold connections open without asking anything can only drive out each other's, and first their own.
"""

from collections.abc import Callable


class _Group:
    """Connections of one owner that have no request, in the order in which they came to have none."""

    __slots__ = ("spent", "waiting")

    def __init__(self) -> None:
        self.spent: dict[Slot, None] = {}
        self.waiting: dict[Slot, None] = {}

    def __len__(self) -> int:
        return len(self.spent) + len(self.waiting)

    def first(self) -> "Slot":
        return next(iter(self.spent or self.waiting))


def _nothing() -> None:
    pass


class Slot:
    """One connection, from its acceptance until its descriptor is closed.

    Attributes:
        abort: ends it at once; set by what the connection is at the moment.
    """

    __slots__ = ("_table", "abort", "owner")

    def __init__(self, table: "ConnectionTable", owner: str) -> None:
        self._table = table
        self.owner = owner
        self.abort: Callable[[], object] = _nothing

    @property
    def is_told_to_end(self) -> bool:
        """It made room for a newcomer."""
        return self._table.is_closing(self)

    def asks(self) -> None:
        """It has a request."""
        self._table.asks(self)

    def waits(self) -> None:
        """It has none, or none any more."""
        self._table.waits(self)

    def is_spent(self) -> None:
        """It was answered while its request was still coming, and is only read to its end."""
        self._table.waits(self, is_spent=True)


class ConnectionTable:
    """Connections of one server, by owner; one thread uses it.

    Args:
        capacity: so many live ones at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_evicted = 0
        self._open: set[Slot] = set()  # whose descriptors are not closed
        self._waiting: dict[str, _Group] = {}
        self._owners: dict[int, dict[str, None]] = {}  # by how many waiting ones they have
        self._most = 0
        self._num_waiting = 0
        self._closing: set[Slot] = set()

    @property
    def num_open(self) -> int:
        """Descriptors in use."""
        return len(self._open)

    @property
    def num_live(self) -> int:
        """Connections that have not been told to end."""
        return len(self._open) - len(self._closing)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def is_closing(self, slot: Slot) -> bool:
        return slot in self._closing

    def enter(self, owner: str) -> Slot:
        slot = Slot(self, owner)
        self._open.add(slot)
        self.waits(slot)
        return slot

    def leave(self, slot: Slot) -> None:
        """Its descriptor is closed; does nothing if it has left."""
        self.asks(slot)
        self._open.discard(slot)
        self._closing.discard(slot)

    def waits(self, slot: Slot, *, is_spent: bool = False) -> None:
        self.asks(slot)
        if slot not in self._open or slot in self._closing:
            return
        group = self._waiting.setdefault(slot.owner, _Group())
        (group.spent if is_spent else group.waiting)[slot] = None
        self._num_waiting += 1
        self._recount(slot.owner, before=len(group) - 1, now=len(group))

    def asks(self, slot: Slot) -> None:
        group = self._waiting.get(slot.owner)
        if group is None:
            return
        for slots in (group.spent, group.waiting):
            if slot in slots:
                del slots[slot]
                self._num_waiting -= 1
                self._recount(slot.owner, before=len(group) + 1, now=len(group))
                return

    def evict(self) -> bool:
        """Ends one without a request, of the owner that has most of them; whether there was one."""
        if not self._most:
            return False
        owner = next(iter(self._owners[self._most]))
        slot = self._waiting[owner].first()
        self.asks(slot)
        self._closing.add(slot)
        self.num_evicted += 1
        slot.abort()
        return True

    def _recount(self, owner: str, *, before: int, now: int) -> None:
        if before:
            del self._owners[before][owner]
            if not self._owners[before]:
                del self._owners[before]
        if now:
            self._owners.setdefault(now, {})[owner] = None
        else:
            del self._waiting[owner]
        if now > before:
            self._most = max(self._most, now)
        elif self._most not in self._owners:  # it had most of all, and has one less
            self._most = now
