"""`SharedBudget`: an amount that several owners draw on, of which none takes what the others need.

An owner may have three times what it leaves free, so one alone gets three quarters, a second three quarters of the
rest, and the last finds something, too: nothing has to be guessed about how many owners there will be. (Dynamic
thresholds of shared-memory switches: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998.)

Owners are tenants, or the addresses of clients where no keys are asked for.
"""

import ipaddress
from collections import Counter

from openinfer_server.http.api_errors import busy, overloaded
from openinfer_server.observability.metrics_snapshot import BudgetUse

_TIMES_WHAT_IS_LEFT = 3
_NETWORK_BITS = 64  # of an IPv6 address: one customer has them all


class SharedBudget:
    """A budget of one server.

    Args:
        name: of what, as `/metrics` has it.
        limit: of all owners together.
        unit: for messages.
    """

    def __init__(self, name: str, limit: int, *, unit: str) -> None:
        self.name = name
        self.limit = limit
        self.used = 0
        self.refused = 0
        self._unit = unit
        self._by_owner: Counter[str] = Counter()

    @property
    def use(self) -> BudgetUse:
        """What `/metrics` shows."""
        return BudgetUse(budget=self.name, used=self.used, limit=self.limit, refused=self.refused)

    def take(self, owner: str, amount: int) -> None:
        """Draws on the budget; the caller gives it back.

        Raises:
            ApiError: 503 if there is not so much, or not for one that has none; 429 if the owner has its share.
        """
        held = self._by_owner.get(owner, 0)
        left = self.limit - self.used - amount
        # One more, so that the last one is taken, too. All of an unused budget may be: it may be less than one needs.
        if left < 0 or (held + amount > _TIMES_WHAT_IS_LEFT * (left + 1) and self.used):
            self.refused += 1
            if held and left >= 0:
                raise overloaded(f"{held} of {self.limit} {self._unit} are yours already; try again later")
            raise busy(f"the server has room for {self.limit} {self._unit} at a time; try again later")
        self._by_owner[owner] = held + amount
        self.used += amount

    def give_back(self, owner: str, amount: int) -> None:
        self.used -= amount
        held = self._by_owner[owner] - amount
        if held:
            self._by_owner[owner] = held
        else:
            del self._by_owner[owner]


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
