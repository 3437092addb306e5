"""How products of quantised matrices are divided among blocks of `csrc/lowbit/lowbit_gemm.cuh`.

up to 128 tokens    all tokens in one tile, each weight read once; K divided where there are few tiles
more                tiles of 128 or 256 tokens, whichever keeps the multiprocessors busy
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_WEIGHT_TILES = 2
"""Of 32 rows, that a warpgroup multiplies together."""
_MULTICAST_CTAS = 2
MOST_TOKENS_OF_SUMS = 64
"""For which codes are multiplied and sums scaled: with more tokens there are too many sums."""


class Size(NamedTuple):
    """Of a kernel, as `Sizes` of its source."""

    tokens: int
    warpgroups: int
    """With 64 rows each; one stands for two that divide K."""
    blocks: int
    """On a multiprocessor."""
    shared_kib: int
    most_splits: int
    """Blocks of a cluster that divide K: more of them take longer to add up their sums than they save."""
    relative_cost: float = 1.0
    """Of a weight times a token, by measurement at 512 tokens."""

    @property
    def multicasts(self) -> bool:
        """Whether two blocks read their tokens together, where there are several tiles of tokens."""
        return self.most_splits == 1

    @property
    def threads(self) -> int:
        return 128 * max(2, self.warpgroups) + (128 if self.tokens >= 64 else 64)


SIZES = (
    Size(8, 1, 2, 113, 4),
    Size(16, 1, 2, 113, 4),
    Size(32, 2, 2, 105, 8),
    Size(64, 3, 1, 225, 8),
    Size(128, 3, 1, 225, 8, 1.25),
    Size(256, 2, 1, 225, 1),
)
_MOST_TOKENS_OF_ONE_TILE = 128
_EXCHANGE_CHUNKS = 5
"""Chunks of K that could be multiplied while splits add up their sums."""


class Room(NamedTuple):
    """What runs at a time on a device."""

    multiprocessors: int
    clusters: Callable[[Size, int], int]
    """Clusters of so many blocks of a kernel."""


class Partition(NamedTuple):
    """How a product is divided among blocks."""

    size: Size
    token_tiles: int
    row_tiles: int
    blocks: int
    """In all clusters."""
    splits: int
    """Blocks of a cluster that divide K."""
    multicast_ctas: int
    """Blocks of a cluster that read their tokens together."""


def partition_product(num_tokens: int, weight_tiles: int, chunks: int, room: Room) -> Partition:
    """The partition of a product of T tokens, at least 1, and a weight of so many tiles along its rows and along K."""
    candidates = [each for size in _sizes(num_tokens) for each in _ways(size, num_tokens, weight_tiles, chunks, room)]
    return min(candidates, key=lambda partition: _cost(partition, chunks))


def _sizes(num_tokens: int) -> Sequence[Size]:
    """The kernels that may multiply so many tokens: all in one tile while one has room for them."""
    smallest = next((index for index, size in enumerate(SIZES) if num_tokens <= size.tokens), len(SIZES) - 1)
    return SIZES[-2:] if SIZES[smallest].tokens > _MOST_TOKENS_OF_ONE_TILE else SIZES[smallest : smallest + 1]


def _ways(size: Size, num_tokens: int, weight_tiles: int, chunks: int, room: Room) -> Iterator[Partition]:
    token_tiles = -(-num_tokens // size.tokens)
    row_tiles = -(-weight_tiles // (_WEIGHT_TILES * size.warpgroups))
    slots, tiles = size.blocks * room.multiprocessors, token_tiles * row_tiles
    if size.multicasts and token_tiles > 1:
        clusters = min(slots // _MULTICAST_CTAS, token_tiles * -(-row_tiles // _MULTICAST_CTAS))
        yield Partition(size, token_tiles, row_tiles, clusters * _MULTICAST_CTAS, 1, _MULTICAST_CTAS)
        return
    yield Partition(size, token_tiles, row_tiles, min(slots, tiles), 1, 1)
    for splits in range(2, min(size.most_splits, slots // tiles, chunks) + 1):
        # Clusters that divide K run all at a time, or the last of them begin when others have ended.
        if tiles <= room.clusters(size, splits):
            yield Partition(size, token_tiles, row_tiles, tiles * splits, splits, 1)


def _cost(partition: Partition, chunks: int) -> float:
    """Of the multiprocessor that has most to do: tokens, times rows, times chunks."""
    size, splits = partition.size, partition.splits
    rounds = -(-partition.token_tiles * partition.row_tiles * splits // partition.blocks)
    exchange = _EXCHANGE_CHUNKS if splits > 1 and size.tokens > MOST_TOKENS_OF_SUMS else 0
    return rounds * size.tokens * size.warpgroups * size.relative_cost * (-(-chunks // splits) + exchange)
