"""`TrackedRequest`: what the scheduler's side knows of one request of vLLM."""

from array import array
from collections.abc import Sequence
from typing import Any

from openinfer_kv_cache import Digest, PrefixHasher

MAX_QUERIES = 3
"""Of one request: at first, and after preemptions or a partial load."""


class TrackedRequest:
    """Digests, blocks and the state of the one query that may be open.

    Args:
        request: vLLM's; its ids grow while it runs. hasher: of the engine's block size.
    """

    def __init__(self, request: Any, hasher: PrefixHasher) -> None:
        self._request = request
        self._hasher = hasher
        lora = request.lora_request
        self._root = hasher.root(lora_name=None if lora is None else lora.name, cache_salt=request.cache_salt or None)
        self._ids = array("I")
        self._digests: list[Digest] = []
        self.is_text = not request.mm_features and request.prompt_embeds is None
        """Else its KV depends on more than ids, and it is left alone."""
        self.block_ids: list[int] = []
        self.saved_blocks = 0
        self.num_queries = 0
        self.first_block = 0
        """Of the query that is open or answered."""
        self.is_asked = False
        self.found_blocks: int | None = None

    def digests(self, num_blocks: int) -> Sequence[Digest]:
        """Of the first blocks, as far as their ids are known."""
        known = self._request.all_token_ids
        self._ids.extend(known[len(self._ids) : len(known)])
        num_blocks = min(num_blocks, len(self._ids) // self._hasher.block_size_tokens)
        self._hasher.extend_chain(self._digests, self._root, self._ids, num_blocks=num_blocks)
        return self._digests[:num_blocks]

    @property
    def matchable_blocks(self) -> int:
        """Full blocks that leave at least one known token to compute."""
        return max(len(self._request.all_token_ids) - 1, 0) // self._hasher.block_size_tokens

    def forget_answer(self) -> None:
        """The query has served its purpose; another may be asked."""
        self.is_asked = False
        self.found_blocks = None
