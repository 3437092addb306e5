"""`KeptGrammars`: recent grammars by digest, as many as their memory allows, and recent refusals."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from openinfer_core import Grammar, InvalidRequest
from openinfer_engine.grammars.guard import GrammarTooCostly

KEPT_BYTES = 256 * 2**20
REFUSAL_KEPT_S = 300.0  # of one for its cost: limits, and what else the machine did, may change
# llguidance tells no sizes. Fitted to what the memory of a process grew by, per character of schemas with hundreds of
# properties, alternatives and patterns (50 to 90 bytes, `tests/grammars/test_kept.py`) and for what use adds.
_BYTES, _BYTES_PER_CHARACTER = 256 * 2**10, 100
_REFUSAL_BYTES = 1024


Compiled = TypeVar("Compiled")


class _Entry(NamedTuple, Generic[Compiled]):
    value: Compiled | InvalidRequest
    num_bytes: int
    until_s: float


def bytes_of(grammar: Grammar) -> int:
    """What keeping a compiled grammar costs, about."""
    return _BYTES + _BYTES_PER_CHARACTER * len(grammar.text)


class KeptGrammars(Generic[Compiled]):
    """For the engine's thread and the one that compiles; the least recently used make room.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, max_bytes: int = KEPT_BYTES, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry[Compiled]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: bytes) -> Compiled | InvalidRequest | None:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            if found.until_s <= self._clock():
                self._drop(key)
                return None
            self._entries.move_to_end(key)
            return found.value

    def put(self, key: bytes, grammar: Grammar, value: Compiled | InvalidRequest) -> None:
        """A compiled grammar of more than all bytes is not kept."""
        is_refusal = isinstance(value, InvalidRequest)
        until_s = self._clock() + REFUSAL_KEPT_S if isinstance(value, GrammarTooCostly) else float("inf")
        num_bytes = 2 * len(str(value)) + _REFUSAL_BYTES if is_refusal else bytes_of(grammar)
        entry: _Entry[Compiled] = _Entry(value, num_bytes, until_s)
        with self._lock:
            if key in self._entries:
                self._drop(key)
            self._entries[key] = entry
            self._num_bytes += entry.num_bytes
            while self._num_bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
