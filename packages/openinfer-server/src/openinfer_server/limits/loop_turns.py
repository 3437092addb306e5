"""`LoopTurns`: large work of the event loop in slices, one of all requests in each of its turns."""

import asyncio

SLICE_CHOICES = 16  # of a request, that are made or handed over at once: 2 ms
SLICE_TOKENS = 2**15  # of their prompts


class LoopTurns:
    """Where requests wait between two slices of their work.

    `asyncio.sleep(0)` alone would let ten requests do ten slices in a turn, and a stream would wait for all of them.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def next(self) -> None:
        """Returns in a later turn of the loop, in which no other request's slice was begun."""
        async with self._one:
            await asyncio.sleep(0)


class Slices:
    """The work of one request, counted in choices and prompt tokens."""

    def __init__(self, turns: LoopTurns) -> None:
        self._turns = turns
        self._num_choices = 0
        self._num_tokens = 0

    async def before(self, *, num_tokens: int) -> None:
        """Called before the work of each choice: a full slice ends here, and the loop has its turn."""
        if self._num_choices and (self._num_choices >= SLICE_CHOICES or self._num_tokens + num_tokens > SLICE_TOKENS):
            self._num_choices = self._num_tokens = 0
            await self._turns.next()
        self._num_choices += 1
        self._num_tokens += num_tokens
