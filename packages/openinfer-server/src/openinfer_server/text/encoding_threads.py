"""`EncodingThreads`: where and when long texts are encoded: fair over owners, bounded, not for clients that have left.

What has begun cannot be stopped, so texts of three sizes have threads of their own: none waits for a much longer one.

    up to 2^16 characters   some 16k tokens of prose
    up to 2^20              what contexts hold
    longer                  one thread: an encoding takes up to 200 bytes for each character while it is made

A text whose beginning is known waits as long as what is new of it, and takes as much room (`run_rest`).

Texts of more than 2^20 characters are taken only by models whose context may hold them, at 8 characters a token.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from openinfer_core.fair_queue import FairQueue
from openinfer_core.process.processors import usable_processors
from openinfer_server.http.api_errors import ApiError
from openinfer_server.limits.queued_work import Client, run_for
from openinfer_server.limits.shared_budget import SharedBudget


class Begun(Protocol):
    """What was found out about a text before it is encoded."""

    @property
    def new_characters(self) -> int:
        """That are to be encoded."""
        ...


T = TypeVar("T")
B = TypeVar("B", bound=Begun)

LONG_CHARACTERS = 2**16
HUGE_CHARACTERS = 2**20
CHARACTERS_PER_CONTEXT_TOKEN = 8  # prose has 4 to 5
CHARACTERS_PER_THREAD = 2**24  # as many as the longest prompt that a body makes; some 16 s of a processor's work
LOOK_UPS_PER_ENCODING = 64
_PROCESSORS_PER_LONG_THREAD = 4
_MAX_LONG_THREADS = 4


class ThisProcess:
    """A `Client` that is no client: it has one share, and never leaves."""

    owner = ""

    async def disconnected(self) -> None:
        await asyncio.get_running_loop().create_future()


THIS_PROCESS = ThisProcess()


class EncodingThreads:
    """Threads that encode.

    Args:
        num_processors: that there are; None asks the system.

    Attributes:
        max_characters: of one text.
        characters: of texts that wait for a thread or are in one.
        texts: the queue of those of up to 2^16 characters.
        long_texts: of up to 2^20.
        huge_texts: of longer ones.
    """

    def __init__(self, *, num_processors: int | None = None) -> None:
        if num_processors is None:
            num_processors = usable_processors()
        num_long = max(1, min(_MAX_LONG_THREADS, num_processors // _PROCESSORS_PER_LONG_THREAD))
        self.max_characters = HUGE_CHARACTERS
        limit = CHARACTERS_PER_THREAD * num_long
        self.characters = SharedBudget("encode_characters", limit, unit="characters of text to encode", per_worker=True)
        self.texts = FairQueue("openinfer-encode", num_threads=2 * num_long)
        self.long_texts = FairQueue("openinfer-encode-long", num_threads=num_long)
        self.huge_texts = FairQueue("openinfer-encode-huge")

    def cover(self, max_model_tokens: int) -> None:
        """Takes what a context of so many tokens may hold."""
        self.max_characters = max(HUGE_CHARACTERS, CHARACTERS_PER_CONTEXT_TOKEN * max_model_tokens)

    async def run(self, client: Client, num_characters: int, work: Callable[[], T]) -> T:
        """Encodes a text of so many characters in a thread.

        Raises:
            ApiError: 413; it is too long. 429 or 503; too much text of this client's owner, or of all, waits.
            ClientDisconnected: the client has left; what was not begun is not done.
        """
        with self._room(client, num_characters):
            return await run_for(client, self._queue(num_characters), work)

    async def run_rest(
        self, client: Client, num_characters: int, *, look_up: Callable[[], B], encode: Callable[[B], T]
    ) -> T:
        """Encodes what is new of a text of so many characters, in the thread for a text of that size.

        Args:
            client: as for `run`.
            num_characters: of the whole text.
            look_up: finds what is known of it, in a thread, too: it takes about a hundredth of the time to encode it.
            encode: the rest of what was found.

        Of a long text it takes room for what it is about to do: 25 conversations of 500 KB at once were all that one
        client could have, however little of them was new.

        Raises:
            ApiError, ClientDisconnected: as `run`.
        """
        if num_characters <= LONG_CHARACTERS:
            return await self.run(client, num_characters, lambda: encode(look_up()))
        self._check_length(num_characters)
        begun = await self.run(client, num_characters // LOOK_UPS_PER_ENCODING, look_up)
        return await self.run(client, begun.new_characters, lambda: encode(begun))

    @contextlib.contextmanager
    def _room(self, client: Client, num_characters: int) -> Generator[None]:
        self._check_length(num_characters)
        owner = client.owner
        self.characters.take(owner, num_characters)
        try:
            yield
        finally:
            self.characters.give_back(owner, num_characters)

    def _check_length(self, num_characters: int) -> None:
        if num_characters > self.max_characters:
            message = f"the text has {num_characters} characters; at most {self.max_characters} are encoded"
            raise ApiError(413, message, code="text_too_long")

    def _queue(self, num_characters: int) -> FairQueue:
        if num_characters <= LONG_CHARACTERS:
            return self.texts
        return self.long_texts if num_characters <= HUGE_CHARACTERS else self.huge_texts

    def close(self) -> None:
        """Nothing more is encoded; what has begun ends."""
        for queue in (self.texts, self.long_texts, self.huge_texts):
            queue.close()
