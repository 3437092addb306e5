"""`ToldPrefixes`: what a replica says that it holds, and what was sent there lately and will be held."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

_HASH_BYTES = 8
_MEDIA = {"GPU": 1, "CPU": 2, "STORAGE": 4}


def block_hash(digest: bytes) -> int:
    """What KV events call a block."""
    return int.from_bytes(digest[-_HASH_BYTES:], "big")


class ToldPrefixes:
    """Implements `openinfer_core.replicas.PrefixHoldings`.

    A block counts while the replica has it in its pool or in a KV tier. One that was sent there counts, too, until the
    replica tells of it: its prompt is waiting, or being computed. A prompt may never be computed, so what was sent is
    forgotten beyond `num_blocks`, the oldest first.

    Args:
        num_blocks: of the replica's pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._told: dict[int, int] = {}  # hash -> media that hold the block, as bits
        self._expected: OrderedDict[int, None] = OrderedDict()

    @property
    def num_told(self) -> int:
        """Blocks that the replica has told of, and has."""
        return len(self._told)

    def by_medium(self) -> dict[str, list[int]]:
        """The blocks that it has, by where they are."""
        return {medium: [each for each, bits in self._told.items() if bits & bit] for medium, bit in _MEDIA.items()}

    def count(self, digests: Sequence[bytes]) -> int:
        for index, digest in enumerate(digests):
            known = block_hash(digest)
            if known not in self._told and known not in self._expected:
                return index
        return len(digests)

    def note(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests):  # of a chain the end is forgotten before its beginning
            known = block_hash(digest)
            if known not in self._told:
                self._expected[known] = None
                self._expected.move_to_end(known)
        while len(self._expected) > self._num_blocks:
            self._expected.popitem(last=False)

    def stored(self, hashes: Iterable[int], medium: str | None) -> None:
        """The replica has these blocks; a medium that is not known is none that it could use."""
        bit = _MEDIA.get(medium or "", 0)
        for each in hashes if bit else ():
            self._told[each] = self._told.get(each, 0) | bit
            self._expected.pop(each, None)

    def removed(self, hashes: Iterable[int], medium: str | None) -> None:
        """It has them there no longer."""
        bit = _MEDIA.get(medium or "", 0)
        for each in hashes if bit else ():
            left = self._told.get(each, 0) & ~bit
            if left:
                self._told[each] = left
            else:
                self._told.pop(each, None)

    def clear(self) -> None:
        """Nothing is known of what it has; what was sent is on its way all the same."""
        self._told.clear()
