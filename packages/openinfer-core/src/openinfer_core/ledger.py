"""The ledger: exactly one terminal event per request, guaranteed by the loop and not by each scheduler.

    unknown ──open()──► open ──record(Finished | Failed)──► closed (forgotten)
                         └──────record(Scheduled | Tokens)──► open

What a scheduler returns passes through `record`. Events of requests that are not open are dropped and counted
(a stop found one step late may produce them), and so is a second `Scheduled` (a preempted request is scheduled again);
a terminal event's counts are replaced by the ledger's own.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import msgspec

from openinfer_core.errors import ContractViolation
from openinfer_core.events import Failed, FailureKind, Finished, Scheduled, TokenEvent, Tokens
from openinfer_core.request import GenerateRequest, RequestId


@dataclass(slots=True)
class _Account:
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None  # cached tokens that the `Scheduled` event told; None before it


class Ledger:
    """The open requests of one engine and what has been delivered to each."""

    def __init__(self) -> None:
        self._open: dict[RequestId, _Account] = {}
        self.dropped_events = 0  # events that named a request which was not open, or repeated its `Scheduled`

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open

    @property
    def open_ids(self) -> tuple[RequestId, ...]:
        return tuple(self._open)

    @property
    def open_view(self) -> AbstractSet[RequestId]:
        return self._open.keys()

    def open(self, request: GenerateRequest) -> None:
        """Begins an account; `ContractViolation` if the id is open already."""
        if request.request_id in self._open:
            raise ContractViolation(f"request id {request.request_id} is in use")
        self._open[request.request_id] = _Account(len(request.prompt_token_ids))

    def record(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Returns the events that may be delivered, terminal counts corrected."""
        return [event for event in map(self._admit, events) if event is not None]

    def fail_all(self, kind: FailureKind, message: str) -> list[TokenEvent]:
        return self.record([Failed(request_id, kind, message) for request_id in self._open])

    def _admit(self, event: TokenEvent) -> TokenEvent | None:
        account = self._open.get(event.request_id)
        if account is None or (type(event) is Scheduled and account.cached_tokens is not None):
            self.dropped_events += 1
            return None
        if type(event) is Tokens:
            account.completion_tokens += len(event.token_ids)
            return event
        if type(event) is Scheduled:
            account.cached_tokens = event.cached_tokens
            return event
        del self._open[event.request_id]
        return _settle(event, account) if type(event) is Finished else event


def _settle(event: Finished, account: _Account) -> Finished:
    return msgspec.structs.replace(
        event,
        prompt_tokens=account.prompt_tokens,
        # The stop token is sampled and counted, and not delivered.
        completion_tokens=account.completion_tokens + (event.stop_token_id is not None),
        cached_tokens=account.cached_tokens or 0,
    )
