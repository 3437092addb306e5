"""`BlockListener`: is told which prefixes can be found in a pool from now on, and which no longer.

What a router needs to send a request where its prefix is. A pool without a listener pays one comparison per call.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from openinfer_kv_cache.digest import Digest


class StoredBlocks(NamedTuple):
    """Blocks that follow each other in one prefix, of one block table."""

    parent: Digest | None
    """The digest of the block before them in their table; None at the beginning of a prefix."""
    digests: Sequence[Digest]
    token_ids: "array[int]"
    """The ids of all these blocks, uint32."""
    lora_name: str | None
    cache_salt: str | None
    table: int = 0
    """Which block table; `digests` and `parent` are those of its blocks (`table_digest`)."""


class BlockListener(Protocol):
    """Hears of a pool's content in the order in which it changes, on the thread of the pool; it must not block."""

    def stored(self, blocks: StoredBlocks) -> None:
        """These prefixes can be found from now on; a block is named once until it is removed."""
        ...

    def removed(self, digests: Sequence[Digest]) -> None:
        """These were found until now: evicted, or expired."""
        ...

    def cleared(self) -> None:
        """Nothing can be found any more."""
        ...
