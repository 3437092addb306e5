"""`BlockTable`: which block holds which tokens, for the layers of one table of a sequence.

    table 0, no window    | a | b | c | d | e | f |
    table 1, a window     | · | · | · | g | h | i |        num_void 3: nothing later sees those tokens
                                        ▲ position of the first token that later tokens see

A layout says how many tables a sequence has, and how far each one's layers look back (`KvLayout.table_windows`).
"""

import sys
from collections.abc import Iterator, Sequence

from openinfer_kv_cache.windows import first_visible_block

_VOID = 0  # stands where nothing is read


class BlockTable:
    """One block table of a `BlockSequence`, which alone changes it."""

    __slots__ = ("blocks", "found", "index", "num_void", "window_tokens")

    def __init__(self, index: int, window_tokens: int | None, blocks: list[int]) -> None:
        self.index = index
        self.window_tokens = window_tokens
        self.blocks = blocks
        """Position by position, the first `num_void` void: 0, which names no block there. Not to be changed."""
        self.num_void = 0
        """Leading entries that nothing reads any more; it only grows, until the sequence drops all."""
        self.found: set[int] = set()
        """Entries after the sealed ones that were found sealed: of a prefix whose others are being loaded."""

    @property
    def held(self) -> Sequence[int]:
        """The blocks that the sequence uses through this table."""
        return self.blocks[self.num_void :] if self.num_void else self.blocks

    def first_needed(self, num_tokens: int, block_size_tokens: int) -> int:
        """The first entry that the token at position `num_tokens`, and later ones, see."""
        return first_visible_block(num_tokens, self.window_tokens, block_size_tokens)

    def set(self, num_void: int, held: Sequence[int]) -> None:
        # In place: `blocks` was handed out as a live view.
        self.blocks[:] = [*[_VOID] * num_void, *held] if num_void else held
        self.num_void = num_void

    def void(self, end: int) -> list[int]:
        """Makes the entries before `end` void, and returns the blocks that they held."""
        begin = self.num_void
        if end <= begin:
            return []
        freed = self.blocks[begin:end]
        self.blocks[begin:end] = [_VOID] * (end - begin)
        self.num_void = end
        return freed

    def cut(self, keep: int) -> None:
        """Drops the entries after the first `keep`."""
        del self.blocks[keep:]
        self.found.clear()
        self.num_void = min(self.num_void, keep)

    def runs_to_seal(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Entries from `first` to `end` that hold a block which is not sealed, as ranges."""
        begin = max(first, self.num_void)
        for stop in [*sorted(each for each in self.found if begin <= each < end), end]:
            if begin < stop:
                yield begin, stop
            begin = stop + 1

    def frees_at(self, block_size_tokens: int) -> int:
        """The number of computed tokens that makes one more entry void; never without a window."""
        if self.window_tokens is None:
            return sys.maxsize
        return (self.num_void + 1) * block_size_tokens + self.window_tokens - 1


def tail_first(tables: Sequence[BlockTable], keep: int) -> Iterator[int]:
    """The blocks of all tables after the first `keep` entries, last positions first.

    So they are to be released: then a tail is evicted before the head that it is found from, in all tables alike.
    """
    for position in range(max(len(table.blocks) for table in tables) - 1, keep - 1, -1):
        for table in tables:
            if table.num_void <= position < len(table.blocks):
                yield table.blocks[position]
