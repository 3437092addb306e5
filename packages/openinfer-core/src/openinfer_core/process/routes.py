"""`Routes`: which client a request belongs to, when several clients share one engine.

Ids are each client's own: two of them may use the same number. A request keeps its number inside the engine if it
is free there, which is always so with one client; otherwise it runs under a spare one, and its events are renamed
on their way back. A number is taken until its terminal event, also when its client has gone.
"""

import threading
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

import msgspec

from openinfer_core.errors import ContractViolation
from openinfer_core.events import Failed, Finished, TokenEvent
from openinfer_core.request import RequestId

ClientT = TypeVar("ClientT", bound=Hashable)

_FIRST_SPARE_ID = 1 << 62


class Routes(Generic[ClientT]):
    """The requests of all clients of one engine. Used from the loop's thread (`sort`) and the links' (the rest)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare_ids = count(_FIRST_SPARE_ID)
        # Engine's id -> its client, or None when it has gone.
        self._owners: dict[RequestId, ClientT | None] = {}
        self._renamed: dict[RequestId, RequestId] = {}  # engine's id -> the client's, where they differ
        self._inner_ids: dict[ClientT, dict[RequestId, RequestId]] = {}  # client -> its id -> the engine's

    def add(self, client: ClientT, request_id: RequestId) -> RequestId:
        """Notes a request of a client; returns its id inside the engine.

        Raises:
            ContractViolation: the client uses the id already.
        """
        with self._lock:
            inner_ids = self._inner_ids.setdefault(client, {})
            if request_id in inner_ids:
                raise ContractViolation(f"request id {request_id} is in use")
            inner_id = request_id
            while inner_id in self._owners:
                inner_id = RequestId(next(self._spare_ids))
            if inner_id != request_id:
                self._renamed[inner_id] = request_id
            self._owners[inner_id] = client
            inner_ids[request_id] = inner_id
            return inner_id

    def find(self, client: ClientT, request_id: RequestId) -> RequestId | None:
        """The id inside the engine of a client's request; None if it has ended or never was."""
        with self._lock:
            return self._inner_ids.get(client, {}).get(request_id)

    def sort(self, events: list[TokenEvent]) -> dict[ClientT, list[TokenEvent]]:
        """Each client's events, under its own ids; those of clients that have gone are left out."""
        batches: dict[ClientT, list[TokenEvent]] = {}
        with self._lock:
            for event in events:
                client = self._owners.get(event.request_id)
                if client is not None:
                    batches.setdefault(client, []).append(self._rename(event))
                if type(event) is Finished or type(event) is Failed:
                    self._forget(event.request_id, client)
        return batches

    def drop(self, client: ClientT) -> list[RequestId]:
        """Forgets a client that has gone; returns the engine's ids of the requests to abort."""
        with self._lock:
            inner_ids = list(self._inner_ids.pop(client, {}).values())
            for inner_id in inner_ids:
                self._owners[inner_id] = None
            return inner_ids

    def _rename(self, event: TokenEvent) -> TokenEvent:
        outer_id = self._renamed.get(event.request_id)
        return event if outer_id is None else msgspec.structs.replace(event, request_id=outer_id)

    def _forget(self, inner_id: RequestId, client: ClientT | None) -> None:
        self._owners.pop(inner_id, None)
        outer_id = self._renamed.pop(inner_id, inner_id)
        if client is not None:
            del self._inner_ids[client][outer_id]
