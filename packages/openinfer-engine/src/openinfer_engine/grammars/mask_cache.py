"""`MaskCache`: masks of states that requests stood in lately, so that what stands there next takes them."""

import threading
from collections import OrderedDict
from hashlib import blake2b

from openinfer_core.grammars import MaskWords

CACHE_BYTES = 16 * 2**20  # 800 masks of 160,000 tokens
CACHE_MASKS = 4096
"""Of small vocabularies: 16 MiB are 65,000 masks of 2,048 tokens, which take half an hour of traffic to gather, and
twice their bytes with what Python keeps of each; requests share masks of the last steps."""


def state_after(state: bytes, token_id: int) -> bytes:
    """The digest of what a matcher was made from and all tokens since, of which `token_id` is the last."""
    return blake2b(state + token_id.to_bytes(8, "little", signed=True), digest_size=16).digest()


class MaskCache:
    """Masks by digest of their state, for any thread; the least recently used make room. They are not to be changed."""

    def __init__(self, max_bytes: int = CACHE_BYTES, max_masks: int = CACHE_MASKS) -> None:
        self._max_bytes = max_bytes
        self._max_masks = max_masks
        self._lock = threading.Lock()
        self._masks: OrderedDict[bytes, MaskWords] = OrderedDict()
        self._num_bytes = 0

    def get(self, state: bytes) -> MaskWords | None:
        with self._lock:
            found = self._masks.get(state)
            if found is not None:
                self._masks.move_to_end(state)
            return found

    def put(self, state: bytes, words: MaskWords) -> None:
        with self._lock:
            if state in self._masks:
                return
            self._masks[state] = words
            self._num_bytes += words.nbytes
            while self._num_bytes > self._max_bytes or len(self._masks) > self._max_masks:
                self._num_bytes -= self._masks.popitem(last=False)[1].nbytes
