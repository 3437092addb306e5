"""How products of quantised matrices are divided among blocks of `csrc/lowbit/lowbit_gemm.cuh`.

up to 128 tokens    all tokens in one tile, each weight read once; K divided where there are few tiles
more                tiles of 128 or 256 tokens, whichever keeps the multiprocessors busy

Tiles that are left over after whole rounds have their K divided, too: else most multiprocessors are idle in the last.
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
    most_leftover_splits: int = 8
    """The same of tiles that are left over after whole rounds, by measurement: clusters of four start later."""
    multicasts: bool = False
    """Whether two blocks read their tokens together, where there are several tiles of tokens."""

    @property
    def threads(self) -> int:
        return 128 * max(2, self.warpgroups) + (128 if self.tokens >= 64 else 64)


SIZES = (
    Size(8, 1, 2, 113, 4, most_leftover_splits=2),
    Size(16, 1, 2, 113, 4, most_leftover_splits=2),
    Size(32, 2, 2, 105, 8),
    Size(64, 3, 1, 225, 8),
    Size(128, 3, 1, 225, 8, 1.25),
    Size(256, 2, 1, 225, 4, multicasts=True),
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
    whole_tiles: int = 0
    """Tiles that splits multiply alone, before each cluster divides K of one of those left."""


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
    for splits in range(2, min(size.most_splits, chunks) + 1):
        # Clusters that divide K run all at a time, or the last of them begin when others have ended.
        clusters = room.clusters(size, splits)
        whole = tiles // (clusters * splits) * (clusters * splits) if clusters else 0
        if 0 < tiles - whole <= clusters and not (whole and splits > size.most_leftover_splits):
            used = clusters if whole else tiles
            yield Partition(size, token_tiles, row_tiles, used * splits, splits, 1, whole)


def _cost(partition: Partition, chunks: int) -> float:
    """Of the multiprocessor that has most to do: tokens, times rows, times chunks."""
    size, splits, tiles = partition.size, partition.splits, partition.token_tiles * partition.row_tiles
    if splits == 1:
        rounds = -(-tiles // partition.blocks)
        each = rounds * chunks
    else:
        exchange = _EXCHANGE_CHUNKS if size.tokens > MOST_TOKENS_OF_SUMS else 0
        each = partition.whole_tiles // partition.blocks * chunks + -(-chunks // splits) + exchange
    return each * size.tokens * size.warpgroups * size.relative_cost
