"""Finds the longest prefix that all block tables of a sequence can begin with.

    table 0, no window    | ■ | ■ | ■ | ■ | ■ | ■ | □ |        ■ cached   □ not
    table 1, a window     | □ | □ | ■ | ■ | ■ | □ | □ |
                                            ▲ a prefix of 5 blocks: table 1 needs two blocks before it

A table without a window needs the whole prefix, one with a window what the token after the prefix still sees.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from openinfer_kv_cache.block_table import BlockTable
from openinfer_kv_cache.blocks import BlockPool
from openinfer_kv_cache.digest import Digest, table_digest, table_digests


class PrefixMatch(NamedTuple):
    """A prefix that can be found in the pool now."""

    num_blocks: int
    held: Sequence[list[int]]
    """For each table the blocks that it needs; they end where the prefix does."""

    def all_blocks(self) -> list[int]:
        return self.held[0] if len(self.held) == 1 else [block_id for held in self.held for block_id in held]


def cut_to_tables(
    pool: BlockPool, tables: Sequence[BlockTable], digests: Sequence[Digest], chain: Sequence[int], end: int
) -> PrefixMatch:
    """The longest prefix of at most `end` blocks that every table can begin with.

    Args:
        pool: holds the blocks.
        tables: of the sequence.
        digests: of its chain, `end` or more.
        chain: blocks of the first table without a window, if there is one: `end` of them.
        end: the blocks that a prefix can have.
    """
    chains: dict[int, Sequence[int]] = {}
    for table in tables:
        if table.window_tokens is None:
            found = pool.find_prefix(table_digests(digests[:end], table.index)) if chains else chain
            chains[table.index], end = found, len(found)
    windowed = [table for table in tables if table.window_tokens is not None]
    end = _longest_with_windows(pool, windowed, digests, end)
    return PrefixMatch(end, [_needed(pool, table, digests[:end], chains) for table in tables])


def _needed(
    pool: BlockPool, table: BlockTable, digests: Sequence[Digest], chains: Mapping[int, Sequence[int]]
) -> list[int]:
    if table.index in chains:
        return list(chains[table.index][: len(digests)])
    first = table.first_needed(len(digests) * pool.block_size_tokens, pool.block_size_tokens)
    return pool.find_prefix(table_digests(digests[first:], table.index))


def _longest_with_windows(pool: BlockPool, tables: Sequence[BlockTable], digests: Sequence[Digest], end: int) -> int:
    """The most blocks, at most `end`, after which each of these tables still has all that is seen."""
    block_tokens = pool.block_size_tokens
    begins = [end] * len(tables)  # each table has all from there to `end`, so that no block is looked up twice
    agreed = 0
    while agreed < len(tables):
        for place, table in enumerate(tables):
            begin = min(begins[place], end)
            first = table.first_needed(end * block_tokens, block_tokens)
            while begin > first and pool.find(table_digest(digests[begin - 1], table.index)) is not None:
                begin -= 1
            begins[place] = begin
            if begin > first:  # block `begin - 1` is missing, so nothing can begin after it
                begins[place] = end = begin - 1
                agreed = 0
            else:
                agreed += 1
    return end
