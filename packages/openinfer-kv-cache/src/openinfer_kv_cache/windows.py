"""Which blocks a window of tokens needs.

A token at position p of a layer with window w sees positions p - w + 1 .. p:

    block      0    │   1    │   2    │   3    │   4
    position  0 1 2 3 4 5 6 7 8 9 ...                    blocks of 4 tokens, window 6
                         ╰─────── p = 11 ──╯
              ╰ void ╯╰────── needed ─────╯              first_visible_block(11, 6, 4) = 1

As later tokens see no earlier ones, what is void once stays void.
"""


def first_visible_block(position: int, window_tokens: int | None, block_size_tokens: int) -> int:
    """The first block that the token at `position` sees; without a window that is block 0."""
    if window_tokens is None:
        return 0
    return max(0, position - window_tokens + 1) // block_size_tokens


def most_seen_blocks(window_tokens: int | None, block_size_tokens: int) -> int:
    """Blocks that the token after a prefix of full blocks sees of it at most; 0 without a window, where that is all."""
    return 0 if window_tokens is None else -(-(window_tokens - 1) // block_size_tokens)
