"""`PrefixHit`: a beginning of a chain that tiers hold for the caller, in chunks that are transferred side by side."""

from collections.abc import Sequence

from openinfer_kv_cache import TierHit


class PrefixHit:
    """Neighbouring chunks of a chain, none of them empty, held until they are loaded or closed."""

    __slots__ = ("hits",)

    def __init__(self, hits: Sequence[TierHit]) -> None:
        self.hits = list(hits)

    @property
    def num_blocks(self) -> int:
        return sum(len(hit.digests) for hit in self.hits)

    def take_back(self, num_blocks: int) -> int:
        """Gives back the chunks that go beyond `num_blocks`; returns how many blocks are held still."""
        while self.num_blocks > num_blocks:
            self.hits.pop().close()
        return self.num_blocks

    def close(self) -> None:
        self.take_back(0)
