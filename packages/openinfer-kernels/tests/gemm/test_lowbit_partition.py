"""How low-bit products are divided among blocks: pure arithmetic, for an H200."""

import pytest

from openinfer_kernels.cuda.lowbit.lowbit_partition import SIZES, Room, partition_product, partitions

CLUSTERS = {
    1: {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15},
    2: {1: 264, 2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 7: 32, 8: 30},
}
"""What the driver says, by blocks on a multiprocessor."""
H200 = Room(132, lambda size, blocks: CLUSTERS[size.blocks][blocks])


def tiles_of(rows: int) -> int:
    return -(-rows // 64) * 2


@pytest.mark.parametrize(("num_tokens", "tokens"), [(1, 8), (8, 8), (9, 16), (17, 32), (33, 64), (65, 128), (128, 128)])
def test_all_tokens_are_in_one_tile_while_one_has_room(num_tokens, tokens):
    partition = partition_product(num_tokens, tiles_of(19456), 20, H200)
    assert (partition.size.tokens, partition.token_tiles) == (tokens, 1)


@pytest.mark.parametrize("num_tokens", [1, 9, 30, 64, 128, 200, 256, 257, 1000, 4096])
@pytest.mark.parametrize("rows", [64, 1088, 2560, 6144, 19456])
@pytest.mark.parametrize("chunks", [1, 3, 20, 76])
def test_every_tile_has_a_block_and_splits_run_all_at_a_time(num_tokens, rows, chunks):
    partition = partition_product(num_tokens, tiles_of(rows), chunks, H200)
    size = partition.size
    assert partition.token_tiles * size.tokens >= num_tokens
    assert partition.row_tiles * size.warpgroups * 64 >= rows
    splits, multicast_ctas = partition.splits, partition.multicast_ctas
    assert splits <= min(chunks, size.most_splits)
    assert 1 in (splits, multicast_ctas) or splits == multicast_ctas  # one cluster has no other size
    assert partition.blocks % max(splits, multicast_ctas) == 0
    assert partition.blocks <= 132 * size.blocks
    assert multicast_ctas == 1 or partition.token_tiles > 1
    if splits > 1:
        left = (partition.token_tiles * partition.wide_tiles - partition.whole_tiles) * multicast_ctas
        assert partition.whole_tiles % (partition.blocks // multicast_ctas) == 0
        assert 0 < left <= partition.blocks // splits <= H200.clusters(size, splits)
    chosen = partitions(num_tokens, tiles_of(rows), chunks, H200)
    assert partition in chosen
    assert len(chosen) == len({*chosen})


def test_k_is_divided_where_tiles_are_few():
    assert partition_product(8, tiles_of(2560), 76, H200).splits == 5
    assert partition_product(8, tiles_of(2560), 32, H200).splits == 4  # a fifth would save one chunk
    assert partition_product(16, tiles_of(2560), 76, H200).splits == 4
    assert partition_product(128, tiles_of(2560), 76, H200).splits == 8
    assert partition_product(8, tiles_of(151936), 20, H200).splits == 1


@pytest.mark.parametrize(
    ("num_tokens", "whole_tiles", "left", "splits"), [(8, 264, 40, 2), (16, 264, 40, 2), (256, 117, 35, 3)]
)
def test_tiles_that_are_left_over_have_their_k_divided(num_tokens, whole_tiles, left, splits):
    partition = partition_product(num_tokens, tiles_of(19456), 20, H200)
    assert (partition.whole_tiles, partition.splits) == (whole_tiles, splits)
    assert partition.row_tiles == whole_tiles + left
    assert whole_tiles == partition.blocks


@pytest.mark.parametrize(("num_tokens", "rows", "whole_tiles", "left"), [(512, 19456, 132, 20), (4096, 2560, 132, 28)])
def test_pairs_that_read_their_tokens_together_divide_what_is_left(num_tokens, rows, whole_tiles, left):
    """Tiles in pairs: 66 of these at a time."""
    partition = partition_product(num_tokens, tiles_of(rows), 20, H200)
    assert (partition.splits, partition.multicast_ctas, partition.whole_tiles) == (2, 2, whole_tiles)
    assert partition.token_tiles * partition.wide_tiles == whole_tiles + left


@pytest.mark.parametrize(
    ("num_tokens", "tokens"), [(129, 192), (160, 192), (192, 192), (193, 256), (256, 256), (384, 192)]
)
def test_tiles_are_as_many_tokens_as_there_are(num_tokens, tokens):
    for rows in (2560, 6144, 19456):
        assert partition_product(num_tokens, tiles_of(rows), 32, H200).size.tokens == tokens


@pytest.mark.parametrize("num_tokens", [8, 300])
def test_without_clusters_nothing_is_divided(num_tokens):
    alone = Room(132, lambda size, blocks: 0)
    assert partition_product(num_tokens, tiles_of(2560), 76, alone).splits == 1


def test_clusters_that_do_not_run_all_at_a_time_are_not_taken():
    narrow = Room(132, lambda size, blocks: 10 if blocks > 2 else 66)
    assert partition_product(128, tiles_of(2560), 76, narrow).splits == 2


def test_prompts_take_the_largest_tiles_in_pairs():
    partition = partition_product(8192, tiles_of(19456), 20, H200)
    assert (partition.size, partition.multicast_ctas) == (SIZES[-1], 2)
