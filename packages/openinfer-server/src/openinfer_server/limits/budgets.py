"""`Budgets`: what the requests of one server share, by owner; `/metrics` shows each."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Self

from openinfer_core.fair_queue import FairQueue
from openinfer_server.http.connections import ConnectionTable
from openinfer_server.http.large_values import CollectorPause
from openinfer_server.limits.descriptors import NEWCOMERS
from openinfer_server.limits.shared_budget import SharedBudget
from openinfer_server.limits.worker_table import WorkerTable
from openinfer_server.observability.metrics_snapshot import BudgetUse
from openinfer_server.options import ServerOptions

# More would only keep the interpreter from the event loop; so would a lower priority of these or of encoding threads,
# since what has the interpreter and no processor is waited for.
READING_THREADS = 2
_UNBOUNDED = 2**62  # of a server that is not ours, or does not listen yet


@dataclass(frozen=True, slots=True)
class Budgets:
    """The budgets of one server.

    Attributes:
        connections: with a request, and without.
        requests: that are being answered, one per connection; how many is known when the server listens.
        body_bytes: of all requests that have not been answered.
        threads: read large requests, fair over owners.
        collector: of garbage, which pauses for them.
        further: what other parts of the server share, as they tell it.
    """

    connections: ConnectionTable
    requests: SharedBudget
    body_bytes: SharedBudget
    threads: FairQueue
    collector: CollectorPause = field(default_factory=CollectorPause)
    further: list[Callable[[], Sequence[BudgetUse]]] = field(default_factory=list[Callable[[], Sequence[BudgetUse]]])

    @classmethod
    def of(cls, options: ServerOptions) -> Self:
        return cls(
            connections=ConnectionTable(_UNBOUNDED),
            requests=SharedBudget("requests", _UNBOUNDED, unit="requests", per_worker=True),
            body_bytes=SharedBudget("body_bytes", options.max_open_body_bytes, unit="bytes of requests"),
            threads=FairQueue("openinfer-read", num_threads=READING_THREADS),
        )

    def share(self, table: WorkerTable) -> None:
        """Makes shares those of all workers."""
        self.requests.share(table)
        self.body_bytes.share(table)

    def close(self) -> None:
        """No further work is taken."""
        self.threads.close()

    def uses(self) -> list[BudgetUse]:
        """What `/metrics` shows."""
        return [
            BudgetUse(
                budget="connections",
                used=self.connections.num_open,
                limit=self.connections.capacity,
                refused=self.connections.num_evicted,
            ),
            *(each.use for each in (self.requests, self.body_bytes)),
            *(use for uses in self.further for use in uses()),
        ]

    def bound_connections(self, num_requests: int) -> None:
        """How many connections may have a request, before the first; a few more may have none."""
        self.requests.limit = num_requests
        self.connections.capacity = num_requests + NEWCOMERS

    @contextlib.contextmanager
    def request(self, owner: str) -> Generator[None]:
        """While one request is answered.

        Raises:
            ApiError: 503 if there are too many, 429 if too many are its owner's.
        """
        self.requests.take(owner, 1)
        try:
            yield
        finally:
            self.requests.give_back(owner, 1)
