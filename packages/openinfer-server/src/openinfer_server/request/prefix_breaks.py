"""`PrefixBreaks`: conversations whose next turn does not go on from the last one, so that it is computed anew.

A client that writes its history otherwise than before (a date in the system prompt, thinking left out, tools in another
order, a summary) changes its prefix without knowing it, and so does a template. Turns of one `prompt_cache_key` are
compared: a turn is to begin with the whole prompt of the one before, but for its end, where the template asks for the
answer. Where it shares a beginning with that prompt and then differs, that is a break, and its place is known to
`CHUNK_TOKENS`. A turn that is shorter, or that has no chunk in common, is another conversation under the same key.

What is kept of a turn is a digest for each chunk, under a secret of this process. A worker compares what came to it.
"""

import hashlib
import logging
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openinfer_core.owned_cache import OwnedCache

logger = logging.getLogger("openinfer.server")

CHUNK_TOKENS = 128
END_TOKENS = 64
"""Of a prompt, that the next turn may write otherwise: the beginning of an answer."""
MAX_BYTES = 16 * 2**20
"""Of digests: 900 conversations of 142,000 tokens, divided between owners."""
LOG_EVERY_S = 10.0
_DIGEST_BYTES = 16
_ENTRY_BYTES = 256


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """Where a turn leaves the one before.

    Attributes:
        position: the first token that may differ; that of the first chunk that does.
        lost_tokens: of the turn before, from there on: they are computed again, unless something else has them cached.
    """

    position: int
    lost_tokens: int


class PrefixBreaks:
    """Of one worker; used from several threads.

    Attributes:
        count: breaks since the start.
        lost_tokens: of all of them.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = secrets.token_bytes(32)
        self._turns: OwnedCache[bytes, _Turn] = OwnedCache(max_bytes, size_of=_Turn.num_bytes)
        self._lock = threading.Lock()
        self._clock = clock
        self._logged_s = -LOG_EVERY_S
        self._unlogged = 0
        self.count = self.lost_tokens = 0

    def note(self, owner: str, conversation: Sequence[str | None], token_ids: Sequence[int]) -> PrefixBreak | None:
        """The next turn of a conversation; says whether it leaves the last one, and where.

        Args:
            owner: whose share what is kept is taken from.
            conversation: what names it: its key, salt and adapter.
            token_ids: the whole prompt.
        """
        name = self._digest(repr(tuple(conversation)).encode("utf-8", "surrogatepass"))
        turn = _Turn(len(token_ids), self._chunks(token_ids))
        with self._lock:
            before = self._turns.get(owner, name)
            found = None if before is None else turn.leaves(before)
            self._turns.drop(owner, name)
            self._turns.put(owner, name, turn)
            if found is not None:
                self.count += 1
                self.lost_tokens += found.lost_tokens
                self._log(owner, found, turn.num_tokens)
        return found

    def _chunks(self, token_ids: Sequence[int]) -> bytes:
        """A digest for each whole chunk of a prompt but its end; each binds all before it."""
        data = memoryview(array("I", token_ids)).cast("B")
        size, parent, chunks = CHUNK_TOKENS * 4, b"", bytearray()
        for begin in range(0, len(data) - END_TOKENS * 4 - size + 1, size):
            parent = self._digest(parent + bytes(data[begin : begin + size]))
            chunks += parent
        return bytes(chunks)

    def _digest(self, message: bytes) -> bytes:
        return hashlib.blake2b(message, digest_size=_DIGEST_BYTES, key=self._key).digest()

    def _log(self, owner: str, found: PrefixBreak, num_tokens: int) -> None:
        now_s = self._clock()
        if now_s - self._logged_s < LOG_EVERY_S:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} more since the last such line" if self._unlogged else ""
        self._logged_s, self._unlogged = now_s, 0
        logger.warning(
            "prefix_break owner=%r token=%d lost_tokens=%d prompt_tokens=%d: the turn of this prompt_cache_key differs "
            "from the one before from about there on, so what follows is computed anew%s",
            owner,
            found.position,
            found.lost_tokens,
            num_tokens,
            more,
        )


@dataclass(frozen=True, slots=True)
class _Turn:
    num_tokens: int
    chunks: bytes

    def num_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.chunks)

    def leaves(self, before: "_Turn") -> PrefixBreak | None:
        size = _DIGEST_BYTES
        if len(self.chunks) < len(before.chunks):
            return None  # a shorter one is no next turn
        num_before = len(before.chunks) // size
        for chunk in range(num_before):
            if self.chunks[chunk * size : chunk * size + size] != before.chunks[chunk * size : chunk * size + size]:
                position = chunk * CHUNK_TOKENS
                return PrefixBreak(position, before.num_tokens - position) if chunk else None
        return None
