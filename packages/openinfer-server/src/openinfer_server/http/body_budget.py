"""`Intake`: how many bytes of request bodies the server holds, over all requests that have not been answered.

One body is bounded by `max_body_bytes`; this bounds all of them together, so that no number of connections, each within
its own bound, can fill the memory.
"""

from openinfer_server.http.api_errors import busy


class Intake:
    """A budget of bytes that requests draw on while they are read and until they are answered.

    Args:
        max_bytes: of all bodies together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What open requests have drawn."""
        return self._held_bytes

    def take(self, num_bytes: int) -> None:
        """Draws on the budget; whoever does gives it back.

        Raises:
            ApiError: 503; the other requests leave less than that.
        """
        if self._held_bytes + num_bytes > self._max_bytes:
            raise busy("the server holds as many bytes of requests as it may; try again later")
        self._held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Returns what was drawn."""
        self._held_bytes -= num_bytes
