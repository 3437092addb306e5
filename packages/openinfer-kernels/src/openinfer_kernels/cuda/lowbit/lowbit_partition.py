"""How products of quantised matrices are divided among blocks of `csrc/lowbit/lowbit_gemm.cuh`.

up to 128 tokens    all tokens in one tile, each weight read once; K divided where there are few tiles
more                tiles of 128, 192 or 256 tokens, whichever keep the multiprocessors busy

Tiles that are left over after whole rounds have their K divided, too: else most multiprocessors are idle in the last.
Where there are several tiles of tokens, pairs of blocks read theirs together, also before they divide what is left.
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
    """Of a weight times a token, by measurement from 160 to 4,096 tokens."""
    most_leftover_splits: int = 8
    """The same of tiles that are left over after whole rounds, by measurement: clusters of four start later."""
    chunks_for_fifth_split: int = 0
    """That it must save: clusters of five start later."""
    exchange_chunks: int = 0
    """Chunks of K that could be multiplied while splits add up their sums, with one tile of tokens."""
    multicasts: bool = False
    """Whether two blocks read their tokens together, where there are several tiles of tokens."""
    most_split_token_tiles: int = 1 << 30
    """Of which K is divided without that: each block reads all of its tokens alone."""

    @property
    def threads(self) -> int:
        return 128 * max(2, self.warpgroups) + (128 if self.tokens >= 64 else 64)

    @property
    def boxes(self) -> int:
        """Of 64 columns, in a slot of activations: `kBoxes`."""
        return 1 if self.tokens > 64 else 4 if self.warpgroups == 1 else 2


SIZES = (
    Size(8, 1, 2, 113, 5, most_leftover_splits=2, chunks_for_fifth_split=2),
    Size(16, 1, 2, 113, 4, most_leftover_splits=2),
    Size(32, 2, 2, 105, 8),
    Size(64, 3, 1, 225, 8),
    Size(128, 3, 1, 225, 8, 1.35, exchange_chunks=5),
    Size(192, 2, 1, 225, 6, 1.05, exchange_chunks=2, multicasts=True, most_split_token_tiles=2),
    Size(256, 2, 1, 225, 6, exchange_chunks=2, multicasts=True),
)
_MOST_TOKENS_OF_ONE_TILE = 128
_EXCHANGE_CHUNKS = 2
"""The same with several tiles of tokens."""
_MOST_CHEAP_SPLITS = 4
_COST_OF_READING_ALONE = 1.1
"""Of blocks that could have read their tokens in pairs."""


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
    """Blocks of a cluster that read their tokens together: 1, or all of them."""
    whole_tiles: int = 0
    """Wide tiles that splits multiply whole, before each cluster divides K of a tile of those left."""

    @property
    def wide_tiles(self) -> int:
        """Tiles along the rows, of multicast CTAs together."""
        return -(-self.row_tiles // self.multicast_ctas)


def partition_product(num_tokens: int, weight_tiles: int, chunks: int, room: Room) -> Partition:
    """The partition of a product of T tokens, at least 1, and a weight of so many tiles along its rows and along K."""
    return min(partitions(num_tokens, weight_tiles, chunks, room), key=lambda partition: _cost(partition, chunks))


def partitions(num_tokens: int, weight_tiles: int, chunks: int, room: Room) -> Sequence[Partition]:
    """All that are considered, at least one."""
    return [each for size in _sizes(num_tokens) for each in _ways(size, num_tokens, weight_tiles, chunks, room)]


def _sizes(num_tokens: int) -> Sequence[Size]:
    """The kernels that may multiply so many tokens: all in one tile while one has room for them."""
    smallest = next((size for size in SIZES if num_tokens <= size.tokens), SIZES[-1])
    if smallest.tokens <= _MOST_TOKENS_OF_ONE_TILE:
        return (smallest,)
    return [size for size in SIZES if size.tokens >= _MOST_TOKENS_OF_ONE_TILE]


def _ways(size: Size, num_tokens: int, weight_tiles: int, chunks: int, room: Room) -> Iterator[Partition]:
    token_tiles = -(-num_tokens // size.tokens)
    row_tiles = -(-weight_tiles // (_WEIGHT_TILES * size.warpgroups))
    slots = size.blocks * room.multiprocessors
    multicast_ctas = _MULTICAST_CTAS if size.multicasts and token_tiles > 1 else 1
    made = Partition(size, token_tiles, row_tiles, 0, 1, multicast_ctas)
    tiles = token_tiles * made.wide_tiles
    yield made._replace(blocks=min(slots // multicast_ctas, tiles) * multicast_ctas)
    most_splits = min(size.most_splits, chunks)
    if token_tiles <= size.most_split_token_tiles:
        for splits in range(2, most_splits + 1):
            if token_tiles * row_tiles <= room.clusters(size, splits):
                yield made._replace(blocks=token_tiles * row_tiles * splits, splits=splits, multicast_ctas=1)
    most_leftover_splits = min(most_splits, size.most_leftover_splits)
    for splits in range(2, most_leftover_splits + 1) if multicast_ctas == 1 else (multicast_ctas,):
        # Clusters that divide K run all at a time, or the last of them begin when others have ended.
        clusters = room.clusters(size, splits)
        at_a_time = clusters * splits // multicast_ctas
        whole = tiles // at_a_time * at_a_time if clusters else 0
        if whole and splits <= most_splits and 0 < (tiles - whole) * multicast_ctas <= clusters:
            yield made._replace(blocks=clusters * splits, splits=splits, whole_tiles=whole)


def _cost(partition: Partition, chunks: int) -> float:
    """Of the multiprocessor that has most to do: tokens, times rows, times chunks."""
    size, splits, tiles = partition.size, partition.splits, partition.token_tiles * partition.wide_tiles
    at_a_time = partition.blocks // partition.multicast_ctas
    if splits == 1:
        each = -(-tiles // at_a_time) * chunks
    else:
        exchange = size.exchange_chunks if partition.token_tiles == 1 else _EXCHANGE_CHUNKS
        exchange += size.chunks_for_fifth_split if splits > _MOST_CHEAP_SPLITS else 0
        each = partition.whole_tiles // at_a_time * chunks + -(-chunks // splits) + exchange
    reads_alone = size.multicasts and partition.token_tiles > 1 and partition.multicast_ctas == 1
    cost = each * size.tokens * size.warpgroups * size.relative_cost
    return cost * _COST_OF_READING_ALONE if reads_alone else cost
