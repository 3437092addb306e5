from openinfer_core.windows import blocks_for_context
from openinfer_kv_cache.windows import first_visible_block


def test_first_visible_block_is_that_of_the_oldest_token_seen():
    for block_tokens in (1, 3, 4):
        for window in range(1, 12):
            for position in range(40):
                seen = [p for p in range(position + 1) if p > position - window]
                assert first_visible_block(position, window, block_tokens) == seen[0] // block_tokens
                assert first_visible_block(position, None, block_tokens) == 0


def test_blocks_for_context_bounds_what_a_token_sees_and_the_next_one():
    for block_tokens in (1, 3, 4):
        for window in range(1, 12):
            for position in range(40):
                first = first_visible_block(position, window, block_tokens)
                held = (position + 1) // block_tokens + 1 - first  # up to the block of the token after it
                assert held <= blocks_for_context(position + 2, [window], block_tokens)
