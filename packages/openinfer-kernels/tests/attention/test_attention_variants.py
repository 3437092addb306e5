"""Windows, soft caps and sinks at the sizes of published models, at the borders of the kernels' tiles, and divided.

Sizes are those of kernels on a GPU: KV tiles of 16 tokens and work tiles of 64 in decoding, tiles of 32, 64 or 128 keys
and 128 query rows in prompts. The reference is float64 over whole rows.
"""

import numpy as np
import pytest

ALL = {"window": 100, "soft_cap": 2.0, "sinks": True}


def masked_attention(q, context, scale, *, window=None, soft_cap=None, sinks=None):
    """One row in float64: `q [S, H, D]` over `context [2, K, C, D]`; keys that are not seen weigh nothing."""
    keys, values = context.astype(np.float64)
    group, num_keys = q.shape[1] // keys.shape[0], keys.shape[1]
    by_head = q.astype(np.float64).reshape(len(q), keys.shape[0], group, -1)
    scores = np.einsum("skgd,kcd->kgsc", by_head, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    position, key = num_keys - len(q) + np.arange(len(q))[:, None], np.arange(num_keys)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    scores[..., hidden] = -np.inf
    highest = scores.max(axis=-1, keepdims=True)
    of_sink = np.zeros(1)
    if sinks is not None:
        by_kv_head = sinks.astype(np.float64).reshape(keys.shape[0], group, 1, 1)
        highest = np.maximum(highest, by_kv_head)
        of_sink = np.exp(by_kv_head - highest)
    weights = np.exp(scores - highest)
    weights /= weights.sum(axis=-1, keepdims=True) + of_sink
    return np.einsum("kgsc,kcd->skgd", weights, values).reshape(len(q), -1)


@pytest.fixture(scope="session")
def check_rows(run, prepared, check):
    """Runs rows of `(context, query tokens)` with what is asked and checks each against the reference."""

    def compare(rows, *, heads, kv_heads, head_dim, seed=0, block_tokens=16, sinks=False, **asked):
        rng = np.random.default_rng([seed, heads, head_dim, len(rows)])
        shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
        q, case = prepared(rng, rows, **shape, num_layers=2)
        if sinks:  # about as heavy as the sum of a row's weights
            asked["sinks"] = (4 + 2 * rng.normal(size=heads)).astype(np.float32)
        scale = 1.5 * head_dim**-0.5
        out = run(q, case, layer=1, scale=scale, **asked)
        for row, context in enumerate(case.contexts):
            tokens = slice(*case.batch.query_starts[row : row + 2])
            check(out[tokens], masked_attention(q[tokens], context[1], scale, **asked), atol=1e-4)
        return q, case, out

    return compare


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "asked"),
    [
        (8, 4, 256, {"window": 300, "soft_cap": 50.0}),  # Gemma-2 2B and 9B
        (8, 4, 256, {"soft_cap": 50.0}),
        (8, 4, 128, {"window": 300, "soft_cap": 50.0}),  # Gemma-2 27B
        (4, 1, 256, {"window": 512}),  # Gemma-3 1B
        (4, 2, 128, {"window": 256}),  # Gemma-3 27B
        (16, 2, 64, {"window": 128, "sinks": True}),  # gpt-oss
        (16, 2, 64, {"sinks": True}),
    ],
)
def test_rows_of_published_shapes(check_rows, head_dim, heads, kv_heads, dim, asked):
    rows = [(1100, 1), (3, 1), (700, 270), (130, 130), (513, 1), (64, 64), (600, 5)]
    check_rows(rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim(dim), **asked)


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_windows_at_the_borders_of_tiles(check_rows, head_dim, dim, window):
    """Decode rows whose windows begin at, before and after multiples of 16, 64 and 128, and chunks likewise."""
    contexts = [c for border in (64, 128, 256, 384) for c in (border - 1, border, border + 1, border + 16)]
    rows = [(context, 1) for context in contexts]
    rows += [(context, queries) for context in (128, 129, 255, 320, 385) for queries in (2, 64, 127)]
    check_rows(rows, heads=4, kv_heads=2, head_dim=head_dim(dim), window=window)


@pytest.mark.parametrize("group", [1, 3, 8, 12, 16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_groups_of_query_heads_with_all_that_can_be_asked(check_rows, head_dim, group, dim):
    rows = [(300, 1), (90, 1), (260, 130), (100, 7), (41, 41)]
    check_rows(rows, heads=2 * group, kv_heads=2, head_dim=head_dim(dim), seed=group, **ALL)


@pytest.mark.parametrize("block_tokens", [32, 64, 128])
def test_larger_blocks(check_rows, head_dim, block_tokens):
    rows = [(300, 1), (90, 1), (260, 130), (129, 1)]
    check_rows(rows, heads=4, kv_heads=2, head_dim=head_dim(64), block_tokens=block_tokens, **ALL)


@pytest.mark.parametrize(
    "asked", [{"sinks": True}, {"soft_cap": 3.0}, {"window": 4000}, {"window": 6001, "sinks": True}]
)
@pytest.mark.parametrize("dim", [64, 256])
def test_decode_rows_that_many_blocks_share(run, check_rows, head_dim, asked, dim):
    """One row alone is divided among all blocks of a GPU; its sink counts once, in whichever part it is."""
    for rows in ([(9001, 1)], [(9001, 1), (1, 1), (4100, 1)]):
        q, case, out = check_rows(rows, heads=4, kv_heads=1, head_dim=head_dim(dim), **asked)
        again = dict(asked)
        if again.pop("sinks", False):
            continue
        np.testing.assert_array_equal(run(q, case, layer=1, scale=1.5 * head_dim(dim) ** -0.5, **again), out)


@pytest.mark.parametrize("asked", [{"window": 1500}, {"window": 1024, "sinks": True}, {"soft_cap": 3.0, "sinks": True}])
@pytest.mark.parametrize("rows", [[(3000, 16)], [(2000, 5), (2600, 33), (900, 1), (40, 40)], [(1800, 130), (1700, 2)]])
def test_pieces_of_prompts_that_many_blocks_share(check_rows, head_dim, asked, rows):
    for dim in (64, 128, 256):
        check_rows(rows, heads=8, kv_heads=2, head_dim=head_dim(dim), **asked)


def test_block_ids_before_the_window_are_never_used(run, prepared, head_dim):
    """They may be no block's at all; what the blocks of the window hold before it may be NaN."""
    rng = np.random.default_rng(5)
    rows, window = [(500, 1), (430, 140), (77, 1), (300, 20)], 90
    for dim in (32, 64, 128, 256):
        shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim(dim), "block_tokens": 16}
        q, case = prepared(rng, rows, **shape)
        expected = run(q, case, layer=1, scale=0.2, window=window)
        for row, (context, queries) in enumerate(rows):
            first_seen = max(0, context - queries + 1 - window)
            begin = case.batch.block_tables[0][row, first_seen // 16]
            case.kv_cache[begin, :, :, :, : first_seen % 16] = np.nan
            case.batch.block_tables[0][row, : first_seen // 16] = -1
        np.testing.assert_array_equal(run(q, case, layer=1, scale=0.2, window=window), expected)


def test_many_decode_rows_of_all_lengths(check_rows, head_dim):
    rng = np.random.default_rng(6)
    rows = [(int(context), 1) for context in rng.integers(1, 700, size=60)]
    for dim in (64, 256):
        check_rows(rows, heads=4, kv_heads=2, head_dim=head_dim(dim), **ALL)
