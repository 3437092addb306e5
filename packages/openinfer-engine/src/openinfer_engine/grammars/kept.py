"""`KeptGrammars`: recent grammars by digest, as many as their memory allows, fair over tenants; and recent refusals."""

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from openinfer_core import Grammar, InvalidRequest
from openinfer_core.owned_cache import OwnedCache
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
    """For the engine's thread and the one that compiles.

    Where memory is short, the owner that has most gives up what was not used for longest, so that one with less than
    its share loses nothing (`OwnedCache`). What several have asked for is there once and counts for the one of them
    that had least when it asked: to ask for what another keeps does not put it among one's own flood.

    Args:
        clock: monotonic seconds.

    Attributes:
        num_evicted: so many have made room.
    """

    def __init__(self, max_bytes: int = KEPT_BYTES, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.num_evicted = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._cache: OwnedCache[bytes, _Entry[Compiled]] = OwnedCache(max_bytes, size_of=lambda entry: entry.num_bytes)
        self._owners: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def num_bytes(self) -> int:
        return self._cache.num_bytes

    @property
    def num_owners(self) -> int:
        """Tenants that something is kept for."""
        return self._cache.num_owners

    def get(self, key: bytes, owner: str) -> Compiled | InvalidRequest | None:
        """What is kept, asked for by an owner."""
        with self._lock:
            holder = self._owners.get(key)
            found = None if holder is None else self._cache.get(holder, key)
            if holder is None or found is None:
                return None
            if found.until_s <= self._clock():
                self._drop(key)
                return None
            if self._cache.held_bytes(owner) < self._cache.held_bytes(holder):
                self._drop(key)
                self._keep(key, found, owner)
            else:
                self._cache.touch(holder, (key,))
            return found.value

    def put(self, key: bytes, grammar: Grammar, value: Compiled | InvalidRequest, *, owner: str) -> None:
        """A compiled grammar of more than all bytes is not kept."""
        is_refusal = isinstance(value, InvalidRequest)
        until_s = self._clock() + REFUSAL_KEPT_S if isinstance(value, GrammarTooCostly) else float("inf")
        num_bytes = 2 * len(str(value)) + _REFUSAL_BYTES if is_refusal else bytes_of(grammar)
        with self._lock:
            self._drop(key)
            self._keep(key, _Entry(value, num_bytes, until_s), owner)

    def _keep(self, key: bytes, entry: _Entry[Compiled], owner: str) -> None:
        evicted = self._cache.put(owner, key, entry)
        if self._cache.get(owner, key) is not None:
            self._owners[key] = owner
        for each in evicted:
            self._owners.pop(each, None)
        self.num_evicted += len(evicted)

    def _drop(self, key: bytes) -> None:
        holder = self._owners.pop(key, None)
        if holder is not None:
            self._cache.drop(holder, key)
