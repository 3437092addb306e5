"""`ResponseStore`: responses that can be asked for again, in memory, within bounds.

    in the making ──ended──► kept ──deleted, or the oldest when there is no room──► gone

A response belongs to the tenant that asked for it; no other tenant is told that it exists. Responses in the making are
never thrown out, so their number is bounded by refusing new ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from openinfer_server.http.api_errors import ApiError, overloaded
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
        run: its making, where others may look on or cancel it: background responses.
        num_bytes: what it counts for.
    """

    response: ResponseObject
    items: Sequence[InputItem]
    tenant: str
    run: "ResponseRun | None" = None
    num_bytes: int = 0

    @property
    def ended(self) -> bool:
        return self.response.status in ENDED


class ResponseStore:
    """Responses by id; `max_bytes` counts their items and events, as JSON."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._records: dict[str, ResponseRecord] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, record: ResponseRecord) -> None:
        """Keeps a response, and throws out the oldest ones if there is no room.

        Raises:
            ApiError: 429; all that are kept are in the making.
        """
        while len(self._records) >= self._max_responses:
            if not self._throw_out_oldest():
                raise overloaded(f"{len(self._records)} background responses are in the making; try again later")
        self._records[record.response.id] = record
        self.weigh(record)

    def weigh(self, record: ResponseRecord) -> None:
        # when it was added, and again when it has ended: its output grows in between
        if self._records.get(record.response.id) is not record:
            return
        num_bytes = len(msgspec.json.encode((record.response, record.items)))
        if record.run is not None:
            num_bytes += record.run.num_event_bytes
        self._num_bytes += num_bytes - record.num_bytes
        record.num_bytes = num_bytes
        while self._num_bytes > self._max_bytes and self._throw_out_oldest():
            pass

    def find(self, response_id: str, tenant: str) -> ResponseRecord:
        """A tenant's response; it is the youngest now."""
        record = self._records.get(response_id)
        if record is None or record.tenant != tenant:
            message = f"there is no response {response_id[:100]!r}; it was deleted, made room, or never stored"
            raise ApiError(404, message, param="response_id", code="response_not_found")
        self._records[response_id] = self._records.pop(response_id)
        return record

    def remove(self, record: ResponseRecord) -> None:
        if self._records.pop(record.response.id, None) is not None:
            self._num_bytes -= record.num_bytes

    def _throw_out_oldest(self) -> bool:
        oldest = next((record for record in self._records.values() if record.ended), None)
        if oldest is not None:
            self.remove(oldest)
        return oldest is not None
