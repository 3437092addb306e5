"""`DescriptorBudget`: how many connections the system's limit of open files leaves room for.

    limit (ulimit -n, raised to what the system allows)
      - own files: those open now and 48 more, at least 64; 3 for each further worker, for large requests, too
        (of the 48, 32 are for large requests on their way to the process that answers them: see MAX_WAITED_FOR)
      - 32: connections that have just come and may ask for /health, and those that are being closed
      = max_connections at most

The process for large requests has less room: with each connection comes a link, until its front needs to know no more.

The engine's process has a limit of its own, of the same size: segments of disk tiers and pipes to ranks are its files.
"""

from dataclasses import dataclass
from typing import Self

from openinfer_core.process.descriptors import open_descriptors, raise_descriptor_limit
from openinfer_server.errors import TooManyConnections
from openinfer_server.options import ServerOptions

DEFAULT_CONNECTIONS = 4096
NEWCOMERS = 16  # connections beyond `max_connections` that have no request yet
CLOSING = 16  # connections whose end the event loop has not carried out
MAX_WAITED_FOR = 16  # handed-over requests whose first byte a front waits for: each takes a descriptor more
MAX_KEPT = 8  # of these, requests whose bytes are kept: each takes one more
MAX_SENDING = 8  # those that are being handed over, of each front: each takes a link, and a connection where it arrives
_LEAST_FILES = 64
_FURTHER_FILES = MAX_WAITED_FOR + MAX_KEPT + MAX_SENDING + 16
_FILES_OF_A_FRONT = MAX_WAITED_FOR + MAX_KEPT + 2 * MAX_SENDING
_FILES_PER_WORKER = 3
_NO_LIMIT = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptorBudget:
    """The descriptors of a server's process.

    Attributes:
        limit: that it may have open.
        own: that it needs for other things than connections.
    """

    limit: int
    own: int

    @classmethod
    def of_this_process(cls, options: ServerOptions, *, takes_large: bool = False) -> Self:
        """Raises this process's limit, and looks at what is open; `takes_large` is the one for large requests."""
        further = options.workers - 1 + options.large_request_workers - 1
        own = max(_LEAST_FILES, open_descriptors() + _FURTHER_FILES) + _FILES_PER_WORKER * further
        if takes_large:
            own += _FILES_OF_A_FRONT * options.workers
        return cls(limit=raise_descriptor_limit() or _NO_LIMIT, own=own)

    def connections_at_most(self, asked: int | None) -> int:
        """As `connections`, but where there is room for fewer than were asked for, that is what it is."""
        room = self.connections(None)
        return room if asked is None else min(room, asked)

    def connections(self, asked: int | None) -> int:
        """What `max_connections` is: what was asked for, or as many as there is room for, up to 4096.

        Raises:
            TooManyConnections: there is room for fewer than were asked for, or for none.
        """
        room = self.limit - self.own - NEWCOMERS - CLOSING
        if room < 1 or (asked is not None and asked > room):
            wanted = "one connection" if asked is None else f"max_connections {asked}"
            raise TooManyConnections(
                f"{wanted} needs more open files than this process may have: {self.limit} (ulimit -n), of which "
                f"{self.own} are for its own files and {NEWCOMERS + CLOSING} for connections that come and go; "
                f"{max(room, 0)} connections are possible"
            )
        return min(room, DEFAULT_CONNECTIONS) if asked is None else asked
