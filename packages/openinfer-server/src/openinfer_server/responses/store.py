"""`ResponseStore`: responses that can be asked for again, in memory, within bounds.

    in the making ──ended──► kept ──deleted, or the oldest when there is no room──► gone

A response belongs to the tenant that asked for it; no other tenant is told that it exists. What makes room is the
oldest of the owner with most: one tenant, or address without keys, can only throw out its own. Responses in the making
are never thrown out, so their number is bounded by refusing new ones, and divided between owners.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec

from openinfer_server.http.api_errors import ApiError, busy, overloaded
from openinfer_server.limits.shared_budget import is_share
from openinfer_server.observability.metrics_snapshot import BudgetUse
from openinfer_server.responses.eviction_order import EvictionOrder
from openinfer_server.responses.items import InputItem
from openinfer_server.responses.objects import ENDED, ResponseObject

if TYPE_CHECKING:
    from openinfer_server.responses.run import ResponseRun


@dataclass(slots=True)
class ResponseRecord:
    """One response and what it answers.

    Attributes:
        response: as it is now.
        items: everything its prompt was made of, but the instructions.
        tenant: whose it is.
        owner: in whose share it is kept: the tenant, or a client's address without one.
        run: its making, where others may look on or cancel it: background responses.
        num_bytes: what it counts for.
        is_in_the_making: whether the store counts it as not ended.
    """

    response: ResponseObject
    items: Sequence[InputItem]
    tenant: str
    owner: str
    run: "ResponseRun | None" = None
    num_bytes: int = 0
    is_in_the_making: bool = False

    @property
    def ended(self) -> bool:
        return self.response.status in ENDED


class ResponseStore:
    """Responses by id; `max_bytes` counts their items and events, as JSON."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._records: dict[str, ResponseRecord] = {}
        self._making: Counter[str] = Counter()  # responses that have not ended, by owner
        self._num_making = 0
        self._by_number = EvictionOrder()
        self._by_bytes = EvictionOrder()
        self._num_uses = 0
        self._thrown_out = 0
        self._refused = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        return self._by_bytes.total

    def uses(self) -> list[BudgetUse]:
        """What `/metrics` shows: responses, of which some were refused, and their bytes, of which some were dropped."""
        num_records = len(self._records)
        return [
            BudgetUse(budget="stored_responses", used=num_records, limit=self._max_responses, refused=self._refused),
            BudgetUse(
                budget="stored_response_bytes", used=self.num_bytes, limit=self._max_bytes, refused=self._thrown_out
            ),
        ]

    def add(self, record: ResponseRecord) -> None:
        """Keeps a response, and throws out old ones if there is no room.

        Raises:
            ApiError: 429 or 503; what is in the making is all that is kept, or the owner's share of it.
        """
        if not record.ended:
            self._check_share(record.owner)
        while len(self._records) >= self._max_responses:
            if not self._throw_out_oldest(self._by_number):
                self._refuse(record.owner)
        self._records[record.response.id] = record
        self._by_number.add(record.owner, 1)
        if record.ended:
            self._use(record)
        else:
            self._count_making(record, is_begun=True)
        self.weigh(record)

    def weigh(self, record: ResponseRecord) -> None:
        """Counts what a response is now; to be called once it has ended, since its output grew: then it may go, too."""
        if self._records.get(record.response.id) is not record:
            return
        if record.is_in_the_making and record.ended:
            self._count_making(record, is_begun=False)
            self._use(record)
        num_bytes = len(msgspec.json.encode((record.response, record.items)))
        if record.run is not None:
            num_bytes += record.run.num_event_bytes
        self._by_bytes.add(record.owner, num_bytes - record.num_bytes)
        record.num_bytes = num_bytes
        while self.num_bytes > self._max_bytes and self._throw_out_oldest(self._by_bytes):
            pass

    def find(self, response_id: str, tenant: str) -> ResponseRecord:
        """A tenant's response; it is the youngest now."""
        record = self._records.get(response_id)
        if record is None or record.tenant != tenant:
            message = f"there is no response {response_id[:100]!r}; it was deleted, made room, or never stored"
            raise ApiError(404, message, param="response_id", code="response_not_found")
        if not record.is_in_the_making:
            self._use(record)
        return record

    def remove(self, record: ResponseRecord) -> None:
        if self._records.pop(record.response.id, None) is None:
            return
        if record.is_in_the_making:
            self._count_making(record, is_begun=False)
        for order, amount in ((self._by_number, 1), (self._by_bytes, record.num_bytes)):
            order.drop(record.owner, record.response.id)
            order.add(record.owner, -amount)

    def _use(self, record: ResponseRecord) -> None:
        self._num_uses += 1
        for order in (self._by_number, self._by_bytes):
            order.use(record.owner, record.response.id, self._num_uses)

    def _count_making(self, record: ResponseRecord, *, is_begun: bool) -> None:
        record.is_in_the_making = is_begun
        self._num_making += 1 if is_begun else -1
        self._making[record.owner] += 1 if is_begun else -1
        if not self._making[record.owner]:
            del self._making[record.owner]

    def _check_share(self, owner: str) -> None:
        if not is_share(self._making[owner], 1, used=self._num_making, limit=self._max_responses):
            self._refuse(owner)

    def _refuse(self, owner: str) -> NoReturn:
        self._refused += 1
        message = f"{self._num_making} background responses are in the making"
        if self._making[owner]:
            raise overloaded(f"{message}; {self._making[owner]} of them are yours; try again later")
        raise busy(f"{message}; try again later")

    def _throw_out_oldest(self, order: EvictionOrder) -> bool:
        """Throws out the oldest ended response of the owner that has most, of those that have one."""
        name = order.first()
        if name is None:
            return False
        self.remove(self._records[name])
        self._thrown_out += 1
        return True
