"""Which tiles multiply a product by `csrc/gemm/gemm.cu`, and how many blocks work together.

The reasons and measurements are in docs/notes/kernels.md.

    up to 192 tokens     all tokens in one tile, each weight read once; K divided where there are few tiles
    more                 tiles of 256 tokens, in pairs that share their tokens, for arithmetic

A multiprocessor holds one block. What decides is how much of their time the multiprocessors are busy: below a share,
cuBLASLt is faster.
"""

import math
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

CHUNK = 64
"""Of K, that is read at a time: a split has at least one."""
LARGE_TOKENS = 256
"""Of a tile where several have the tokens."""
_MOST_SPLIT_K = 4
_MULTICAST_CTAS = 2
_LEAST_BUSY = 0.75
_LEAST_OF_SEVERAL = 128
"""Tokens of a tile where there are several tiles of them."""
_LEAST_OF_A = 64
_READ_COST = 40
"""Of a row of a chunk, in products: what makes a tile of 256 x 160 better than one of 128 x 112."""


_MOST_PARTS = 5
"""Of A x, that every tile adds up: `kMostParts`."""
_WAY_OF_A = 60
"""In chunks, what a part of A x takes through memory, with all that waits for it: with 15 an engine of 64 rows has
fewer parts and more splits of K, and takes 1.25 times as long as without adapters; with 60 1.20."""


class Epilogue(StrEnum):
    """What becomes of the sums, as in the names of the kernels."""

    STORE = "store"
    SWIGLU = "swiglu"
    FLOAT32 = "float32"


_LEAST_BUSY_LARGE = {Epilogue.STORE: 0.96, Epilogue.SWIGLU: 0.85}
"""The gate's product saves a kernel besides."""


class Tile(NamedTuple):
    """Tokens and rows of the weight that a block multiplies at a time: `Sizes` of the kernel."""

    tokens: int
    columns: int

    @property
    def threads(self) -> int:
        return 384 if self.tokens == LARGE_TOKENS else 2 * self.tokens + 32


SHARED_BYTES = 225 << 10
"""Of a block."""
TILES = {
    Epilogue.STORE: (*(Tile(tokens, columns) for tokens in (64, 128, 192) for columns in (96, 112)), Tile(256, 160)),
    Epilogue.SWIGLU: (
        *(Tile(tokens, columns) for tokens in (64, 128, 192) for columns in (96, 160, 192)),
        Tile(256, 160),
    ),
    Epilogue.FLOAT32: (Tile(64, 128), Tile(128, 128)),
}
"""All that are compiled, by tokens."""
TILES_BESIDE = tuple(Tile(64, columns) for columns in (96, 112, 160, 192))
"""Those that are compiled with tiles of A beside them; the wide ones are for gate and up, one tile a block."""


PROMPT_TILES = {
    Epilogue.STORE: (Tile(128, 160), Tile(128, 192), Tile(256, 160), Tile(256, 192)),
    Epilogue.SWIGLU: (Tile(128, 160), Tile(192, 160), Tile(256, 160)),
}
"""Those of prompts with adapters. In pairs that share their tokens those for stores fill the multiprocessors with 1,024
tokens of 2,560 rows and with 8,192 of 6,144, which without adapters are cuBLASLt's.
"""


class Partition(NamedTuple):
    """How a product is divided among blocks."""

    tile: Tile
    multicast_ctas: int
    """Blocks of a cluster that read their tokens together."""
    split_k: int
    """Blocks of a cluster that divide K."""


class AdaptedPartition(NamedTuple):
    """Of a product with adapters."""

    partition: Partition
    shrinks: bool
    """Whether tiles of A are in the launch."""


class PartsPartition(NamedTuple):
    """Of a product with adapters of which one tile has all tokens."""

    partition: Partition
    parts: int
    """Into which K of A x is divided, besides what a cluster divides it into."""


class Room(NamedTuple):
    """What runs at a time on a device."""

    multiprocessors: int
    clusters: Callable[[int], int]
    """Clusters of so many blocks, with a multiprocessor for each block: fewer than the multiprocessors would hold."""


def partition_product(
    epilogue: Epilogue,
    num_tokens: int,
    num_rows: int,
    num_columns: int,
    room: Room,
    *,
    least_busy: float | None = None,
) -> Partition | None:
    """The partition of a product of `[T, K]` and `[rows, K]`, T at least 1; None where cuBLASLt is faster.

    `least_busy`: the share of the multiprocessors' time below which that is; by default what was measured.
    """
    tokens = next((tile.tokens for tile in TILES[epilogue] if num_tokens <= tile.tokens), LARGE_TOKENS)
    tiles = [tile for tile in TILES[epilogue] if tile.tokens == tokens]
    if tokens == LARGE_TOKENS:
        least = _LEAST_BUSY_LARGE[epilogue] if least_busy is None and tiles else least_busy or 0.0
        return _partition_large(tiles[0], num_tokens, num_rows, room, least_busy=least) if tiles else None
    most_split_k = min(_MOST_SPLIT_K, -(-num_columns // CHUNK)) if epilogue is Epilogue.STORE else 1
    candidates = [
        (_share_busy(tile, split_k, num_rows, room), Partition(tile, 1, split_k))
        for tile in tiles
        for split_k in range(1, most_split_k + 1)
    ]
    busy, partition = max(candidates)
    return partition if busy >= (_LEAST_BUSY if least_busy is None else least_busy) else None


def partition_adapted(
    epilogue: Epilogue, num_tokens: int, num_rows: int, num_columns: int, room: Room, *, shrink_rows: int
) -> AdaptedPartition:
    """The partition of a product with adapters, by what a block reads and multiplies.

    `num_rows` is 0 in a launch of tiles of A alone, whose rows are `shrink_rows`.
    """
    one_tile = [tile.tokens for tile in TILES[epilogue] if num_tokens <= tile.tokens < LARGE_TOKENS]
    # Tiles of A alone are few, and the product waits for all of them: small ones are on more multiprocessors.
    least = one_tile[0] if one_tile else _LEAST_OF_SEVERAL if num_rows else _LEAST_OF_A
    tiles = [tile for tile in TILES[epilogue] if tile.tokens == least or (not one_tile and tile.tokens > least)]
    most_split_k = min(_MOST_SPLIT_K, -(-num_columns // CHUNK)) if epilogue is Epilogue.STORE else 1
    candidates = [
        Partition(tile, _MULTICAST_CTAS if tile.tokens == LARGE_TOKENS < num_tokens else 1, split_k)
        for tile in tiles
        for split_k in range(1, 1 + (1 if tile.tokens == LARGE_TOKENS else most_split_k))
        if num_rows or tile.tokens < LARGE_TOKENS
    ]
    return min(_costs(each, num_tokens, num_rows, room, shrink_rows=shrink_rows) for each in candidates)[1]


def partition_prompt(epilogue: Epilogue, num_tokens: int, num_rows: int, room: Room) -> Partition:
    """The partition of a product with adapters of more tokens than a tile has, whose A x a launch ahead makes."""
    candidates = [
        Partition(tile, multicast_ctas, 1) for tile in PROMPT_TILES[epilogue] for multicast_ctas in (1, _MULTICAST_CTAS)
    ]

    def cost(partition: Partition) -> int:
        tile, multicast_ctas, _ = partition
        clusters = -(-num_tokens // tile.tokens) * -(-num_rows // (tile.columns * multicast_ctas))
        rounds = -(-clusters // room.clusters(multicast_ctas))
        return rounds * (tile.tokens * tile.columns + _READ_COST * (tile.tokens // multicast_ctas + tile.columns))

    return min(candidates, key=cost)


def partition_in_parts(
    epilogue: Epilogue, num_tokens: int, num_rows: int, num_columns: int, room: Room, *, shrink_rows: int
) -> PartsPartition | None:
    """The partition where A x is made in parts by blocks next to those of the weight; None for more than one tile."""
    tokens = next((tile.tokens for tile in TILES[epilogue] if num_tokens <= tile.tokens < LARGE_TOKENS), None)
    chunks = -(-num_columns // CHUNK)
    most_split_k = min(_MOST_SPLIT_K, chunks) if epilogue is Epilogue.STORE else 1
    found: list[tuple[float, int, PartsPartition]] = []
    for tile in (each for each in TILES[epilogue] if each.tokens == tokens):
        tiles, shrink_tiles = (-(-rows // tile.columns) for rows in (num_rows, shrink_rows))
        for split_k in range(1, most_split_k + 1):
            for parts in range(1, 1 + min(_MOST_PARTS, chunks // split_k)):
                left = room.clusters(split_k) - parts * shrink_tiles  # clusters for tiles: none may wait for room
                rounds = -(-tiles // left) if left > 0 else 0
                if not rounds or (split_k > 1 < rounds):  # a cluster that divides K has one tile
                    continue
                steps = max(rounds * chunks / split_k, chunks / (split_k * parts) + _WAY_OF_A)
                cost = steps * (tile.tokens + tile.columns)
                found.append((cost, parts, PartsPartition(Partition(tile, 1, split_k), parts)))
    return min(found)[2] if found else None


def has_room_beside(partition: Partition, num_rows: int, room: Room, *, shrink_rows: int) -> bool:
    """Whether tiles of A run beside those of a product of one tile of tokens, and no block has more tiles for them."""
    tiles, shrink_tiles = (-(-rows // partition.tile.columns) for rows in (num_rows, shrink_rows))
    most = room.clusters(partition.split_k)
    left = most - shrink_tiles
    return left > 0 and partition.multicast_ctas == 1 and -(-tiles // left) == -(-tiles // most)


def partition_gates_beside(num_rows: int, room: Room, *, shrink_rows: int) -> Partition | None:
    """The partition of gate and up, at most 64 tokens, with tiles of A beside it, of which a block reads least.

    K is not divided: sums are those of `partition_product`'s for `SWIGLU`, whatever the tile. None if there is no room.
    """
    found = [
        (-(-num_rows // (tile.columns * room.multiprocessors)) * (tile.tokens + tile.columns), Partition(tile, 1, 1))
        for tile in TILES_BESIDE
        if has_room_beside(Partition(tile, 1, 1), num_rows, room, shrink_rows=shrink_rows)
    ]
    return min(found)[1] if found else None


def _costs(
    partition: Partition, num_tokens: int, num_rows: int, room: Room, *, shrink_rows: int
) -> tuple[float, AdaptedPartition]:
    """In products of a chunk's column: those of a block, and what it reads, in all of its rounds."""
    tile, multicast_ctas, split_k = partition
    token_tiles, most = -(-num_tokens // tile.tokens), room.clusters(multicast_ctas * split_k)
    column_tiles, shrink_tiles = -(-num_rows // (tile.columns * multicast_ctas)), -(-shrink_rows // tile.columns)
    # Tiles that wait for others have blocks of their own, after those that they wait for; and pairs would read A twice.
    shrinks = not num_rows or (multicast_ctas == 1 and token_tiles * (column_tiles + shrink_tiles) <= most)
    clusters = token_tiles * (column_tiles + (shrink_tiles if shrinks else 0))
    rounds = -(-clusters // most)
    fits = split_k == 1 or rounds <= 1  # a cluster that divides K has one tile
    cost = rounds * (tile.tokens * tile.columns + _READ_COST * (tile.tokens + tile.columns)) / split_k
    return cost if fits else math.inf, AdaptedPartition(partition, shrinks)


def _share_busy(tile: Tile, split_k: int, num_rows: int, room: Room) -> float:
    """Of the multiprocessors' time; 0 where clusters do not run all at a time, which they must to divide K."""
    num_tiles = -(-num_rows // tile.columns)
    if split_k > 1:
        return (
            num_rows * split_k / (room.multiprocessors * tile.columns) if num_tiles <= room.clusters(split_k) else 0.0
        )
    rounds = -(-num_tiles // room.multiprocessors)
    return num_rows / (rounds * room.multiprocessors * tile.columns)


def _partition_large(tile: Tile, num_tokens: int, num_rows: int, room: Room, *, least_busy: float) -> Partition | None:
    token_tiles = -(-num_tokens // tile.tokens)
    multicast_ctas = 1 if token_tiles == 1 else _MULTICAST_CTAS
    clusters = token_tiles * -(-num_rows // (tile.columns * multicast_ctas))
    rounds = -(-clusters // room.clusters(multicast_ctas))
    busy = num_tokens * num_rows / (rounds * room.multiprocessors * tile.tokens * tile.columns)
    return Partition(tile, multicast_ctas, 1) if busy >= least_busy else None
