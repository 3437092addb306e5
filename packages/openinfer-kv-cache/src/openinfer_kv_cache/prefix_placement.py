"""How a block table becomes that of a longer prefix, of which some blocks are in the pool and others are to be loaded.

held before     | s | s | w | w |               s sealed, matched   w writable, reserved
prefix of 6     | · | s | p | w | w | n |       · void   p found in the pool   n new
                            ▲   ▲   ▲ to be loaded
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openinfer_kv_cache.block_table import BlockTable
from openinfer_kv_cache.blocks import BlockPool
from openinfer_kv_cache.digest import Digest, table_digests


@dataclass(frozen=True, slots=True)
class Placement:
    """What one table holds then; `apply` makes it so."""

    table: BlockTable
    num_blocks: int
    first: int
    """The first entry that is not void."""
    kept: Sequence[int]
    """Sealed blocks that the table holds and keeps, from entry `first` on."""
    found: dict[int, int]
    """Entries after those that the pool has."""
    lacking: Sequence[int]
    """Entries after those that are to be loaded."""
    writable: Sequence[int]
    """Blocks that were reserved for entries of the prefix: they are what is loaded into."""
    passed: Sequence[int]
    """Sealed blocks that nothing sees after the prefix."""

    @property
    def num_new(self) -> int:
        return max(len(self.lacking) - len(self.writable), 0)

    @property
    def surplus(self) -> Sequence[int]:
        return self.writable[len(self.lacking) :]

    def apply(self, new_blocks: Iterator[int]) -> None:
        into = iter([*self.writable[: len(self.lacking)], *(next(new_blocks) for _ in range(self.num_new))])
        begin = self.first + len(self.kept)
        entries = [self.found[entry] if entry in self.found else next(into) for entry in range(begin, self.num_blocks)]
        self.table.set(self.first, [*self.kept, *entries, *self.table.blocks[self.num_blocks :]])
        self.table.found = set(self.found)


def placement_of(
    pool: BlockPool, table: BlockTable, digests: Sequence[Digest], *, num_sealed: int, num_blocks: int
) -> Placement:
    """The placement of a prefix of `num_blocks` blocks in a table whose entries before `num_sealed` are sealed."""
    first = table.first_needed(num_blocks * pool.block_size_tokens, pool.block_size_tokens)
    begin = max(first, num_sealed)
    found: dict[int, int] = {}
    lacking: list[int] = []
    for entry, digest in enumerate(table_digests(digests[begin:num_blocks], table.index), begin):
        block_id = pool.find(digest)
        if block_id is None:
            lacking.append(entry)
        else:
            found[entry] = block_id
    return Placement(
        table=table,
        num_blocks=num_blocks,
        first=first,
        kept=table.blocks[first:begin],
        found=found,
        lacking=lacking,
        writable=table.blocks[max(num_sealed, table.num_void) : num_blocks],
        passed=table.blocks[table.num_void : min(first, num_sealed)],
    )
