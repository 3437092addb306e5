"""`SharedBudget`: an amount that several owners draw on, of which none takes what the others need.

An owner may have three times what it leaves free, so one alone gets three quarters, a second three quarters of the
rest, and the last finds something, too: nothing has to be guessed about how many owners there will be. (Dynamic
thresholds of shared-memory switches: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998.)

Owners are tenants, or the addresses of clients where no keys are asked for. With several workers (`share`), an owner's
share is of all of them: a limit that each worker has, such as its descriptors, is theirs together, too.
"""

import ipaddress
from collections import Counter
from collections.abc import Callable

from openinfer_server.http.api_errors import busy, overloaded
from openinfer_server.limits.worker_table import BUDGETS, WorkerTable
from openinfer_server.observability.metrics_snapshot import BudgetUse

_TIMES_WHAT_IS_LEFT = 3
_NETWORK_BITS = 64  # of an IPv6 address: one customer has them all


class SharedBudget:
    """A budget of one server.

    Args:
        name: of what, as `/metrics` has it.
        limit: of all owners together; what tells it where it changes.
        unit: for messages.
        per_worker: whether each of several workers has as much; else they have it together.
    """

    def __init__(self, name: str, limit: int | Callable[[], int], *, unit: str, per_worker: bool = False) -> None:
        self.name = name
        self._limit = limit
        self.used = 0
        self.refused = 0
        self._unit = unit
        self._per_worker = per_worker
        self._table: WorkerTable | None = None
        self._place = 0
        self._by_owner: Counter[str] = Counter()

    @property
    def limit(self) -> int:
        return self._limit if isinstance(self._limit, int) else self._limit()

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit

    @property
    def use(self) -> BudgetUse:
        """What `/metrics` shows, which adds the workers up."""
        is_told = self._per_worker or self._table is None or self._table.is_first
        return BudgetUse(budget=self.name, used=self.used, limit=self.limit if is_told else 0, refused=self.refused)

    @property
    def used_by_all(self) -> int:
        """What is taken in all workers."""
        return self.used if self._table is None else self.used + self._table.elsewhere(self._place, "")[1]

    def share(self, table: WorkerTable) -> None:
        """Makes shares those of all workers; nothing has been taken yet."""
        self._table, self._place = table, BUDGETS.index(self.name)

    def take(self, owner: str, amount: int) -> None:
        """Draws on the budget; the caller gives it back.

        Raises:
            ApiError: 503 if there is not so much, or not for one that has none; 429 if the owner has its share.
        """
        if not self.has_room(owner, amount):
            self.refused += 1
            if self.held(owner) and amount <= self.limit - self.used_here:
                raise overloaded(f"{self.held(owner)} of {self.limit} {self._unit} are yours already; try again later")
            raise busy(f"the server has room for {self.limit} {self._unit} at a time; try again later")
        self.hold(owner, amount)

    def held(self, owner: str) -> int:
        """What an owner has taken, in all workers."""
        held = self._by_owner.get(owner, 0)
        return held if self._table is None else held + self._table.elsewhere(self._place, owner)[0]

    @property
    def used_here(self) -> int:
        """Of the limit, what is taken: of this worker's, or of what all have together."""
        return self.used if self._per_worker else self.used_by_all

    def has_room(self, owner: str, amount: int) -> bool:
        """Whether an owner may take so much."""
        here = self._by_owner.get(owner, 0)
        if self._table is None:
            return is_share(here, amount, used=self.used, limit=self.limit)
        held, used = self._table.elsewhere(self._place, owner)
        if self._per_worker and not is_share(here, amount, used=self.used, limit=self.limit):
            return False
        limit = self.limit * (self._table.num_workers if self._per_worker else 1)
        return is_share(here + held, amount, used=self.used + used, limit=limit)

    def hold(self, owner: str, amount: int) -> None:
        """Takes so much, whether there is room or not."""
        self._by_owner[owner] += amount
        self.used += amount
        if self._table is not None:
            self._table.add(self._place, owner, amount)

    def give_back(self, owner: str, amount: int) -> None:
        self.used -= amount
        if self._table is not None:
            self._table.add(self._place, owner, -amount)
        held = self._by_owner[owner] - amount
        if held:
            self._by_owner[owner] = held
        else:
            del self._by_owner[owner]


def is_share(held: int, amount: int, *, used: int, limit: int) -> bool:
    """Whether an owner that holds so much may have more, of a limit of which all owners have used so much."""
    left = limit - used - amount
    if left < 0:
        return False
    # One more, so that the last one is taken, too. All of an unused budget may be: it may be less than one needs.
    return not used or held + amount <= _TIMES_WHAT_IS_LEFT * (left + 1)


def owner_of(address: str) -> str:
    """Whose connections those of an address are: of an IPv6 one, those of its network."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((parsed, _NETWORK_BITS), strict=False))
    return str(parsed)
