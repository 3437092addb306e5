"""Windows, soft caps and sinks of `paged_attention`, against loops in float64."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32 - 1)
WINDOWS = (None, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 1000)


def naive_scores(q: np.ndarray, keys: np.ndarray, *, scale: float, soft_cap: float | None) -> list[float]:
    scores = [scale * float(q @ key) for key in keys]
    return scores if soft_cap is None else [soft_cap * math.tanh(score / soft_cap) for score in scores]


def naive_attention(q, case, layer, scale, *, window=None, soft_cap=None, sinks=None):
    """Token by token and head by head: keys that a token does not see are left out, not masked."""
    num_tokens, num_heads, head_dim = q.shape
    out = np.empty((num_tokens, num_heads, head_dim))
    token = 0
    for context, queries in zip(case.contexts, np.diff(case.batch.query_starts).tolist(), strict=True):
        keys, values = context[layer].astype(np.float64)
        for position in range(keys.shape[1] - queries, keys.shape[1]):
            seen = [p for p in range(position + 1) if window is None or p > position - window]
            for head in range(num_heads):
                kv_head = head * keys.shape[0] // num_heads
                queried = q[token, head].astype(np.float64)
                scores = naive_scores(queried, keys[kv_head][seen], scale=scale, soft_cap=soft_cap)
                highest = max([*scores, -math.inf if sinks is None else float(sinks[head])])
                weights = [math.exp(score - highest) for score in scores]
                of_sink = 0.0 if sinks is None else math.exp(float(sinks[head]) - highest)
                mixed = sum(w * values[kv_head, p] for w, p in zip(weights, seen, strict=True))
                out[token, head] = mixed / (math.fsum(weights) + of_sink)
            token += 1
    return out.reshape(num_tokens, -1)


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS,
    group=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    kinds=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    rows=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 1, 2, 7, 20])), min_size=1, max_size=6),
    window=st.sampled_from(WINDOWS),
    soft_cap=st.sampled_from([None, 0.3, 2.0, 50.0]),
    with_sinks=st.booleans(),
)
def test_scores_of_any_kind_equal_float64(
    run, prepared, check, head_dims, block_sizes, seed, group, num_kv_heads, kinds, rows, window, soft_cap, with_sinks
):
    rng = np.random.default_rng(seed)
    head_dim, block_tokens = head_dims[kinds[0] % len(head_dims)], block_sizes[kinds[1] % len(block_sizes)]
    rows = [(past + queries, queries) for past, queries in rows]
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
    q, case = prepared(rng, rows, num_heads=group * num_kv_heads, **shape)
    sinks = (3 * rng.normal(size=group * num_kv_heads)).astype(np.float32) if with_sinks else None
    asked = {"window": window, "soft_cap": soft_cap, "sinks": sinks}
    out = run(q, case, layer=1, scale=head_dim**-0.5, **asked)
    check(out, naive_attention(q, case, 1, head_dim**-0.5, **asked))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 32, 48])
@pytest.mark.parametrize(("past", "queries"), [(0, 1), (0, 40), (15, 1), (16, 1), (31, 2), (32, 16), (47, 33), (48, 1)])
def test_window_across_block_boundaries(run, prepared, check, head_dim, past, queries, window):
    rng = np.random.default_rng([past, queries, window])
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim(8), "block_tokens": 16}
    q, case = prepared(rng, [(past + queries, queries)], **shape)
    out = run(q, case, layer=0, scale=0.3, window=window)
    check(out, naive_attention(q, case, 0, 0.3, window=window))


@pytest.mark.parametrize("window", [16, 100])
def test_window_of_long_prompts_and_decode_rows_in_one_step(run, prepared, check, head_dim, window):
    """Rows whose windows begin in different blocks, prompts of several tiles of queries, and short ones."""
    rng = np.random.default_rng(window)
    rows = [(700, 1), (40, 1), (12, 12), (333, 200), (701, 1), (16, 1), (129, 129), (690, 1)]
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim(8), "block_tokens": 16}
    q, case = prepared(rng, rows, **shape, num_layers=1)
    sinks = rng.normal(size=4).astype(np.float32)
    asked = {"window": window, "soft_cap": 1.0, "sinks": sinks}
    check(run(q, case, layer=0, scale=0.25, **asked), naive_attention(q, case, 0, 0.25, **asked))


def test_what_the_cache_holds_before_the_windows_changes_nothing(run, prepared, head_dim):
    """Blocks before the first token's window may have gone to other sequences, whatever they hold."""
    rng = np.random.default_rng(4)
    rows, window = [(100, 1), (70, 5), (90, 40), (33, 1), (20, 20)], 18
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim(8), "block_tokens": 16}
    q, case = prepared(rng, rows, **shape)
    whole = run(q, case, layer=1, scale=0.3, window=window)
    cache, tables = case.kv_cache.copy(), case.batch.block_tables[0].copy()
    for row, (context, queries) in enumerate(rows):
        first_seen = max(0, context - queries + 1 - window)
        for position in range(first_seen):
            cache[tables[row, position // 16], :, :, :, position % 16] = np.nan
        tables[row, : first_seen // 16] = 0  # of which nothing is seen
    other = dataclasses.replace(case, kv_cache=cache, batch=dataclasses.replace(case.batch, block_tables=(tables,)))
    np.testing.assert_array_equal(run(q, other, layer=1, scale=0.3, window=window), whole)


def test_window_as_long_as_the_context_is_none(run, prepared, check, head_dim):
    rng = np.random.default_rng(6)
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim(8), "block_tokens": 16}
    q, case = prepared(rng, [(40, 40), (40, 1)], **shape)
    whole = run(q, case, layer=0, scale=0.3)
    check(run(q, case, layer=0, scale=0.3, window=40), whole, rtol=1e-6, atol=1e-6)
    assert np.abs(run(q, case, layer=0, scale=0.3, window=39) - whole)[39:].max() > 1e-3


def test_large_scores_under_a_cap_and_a_large_sink_stay_finite(run, prepared, check, head_dim):
    rng = np.random.default_rng(7)
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim(8), "block_tokens": 16}
    q, case = prepared(rng, [(30, 3)], **shape)
    for asked in (
        {"soft_cap": 50.0},
        {"sinks": np.array([300.0, -300.0], np.float32)},
        {"soft_cap": 20.0, "sinks": np.array([25.0, 0.0], np.float32), "window": 7},
    ):
        expected = naive_attention(q, case, 0, 1e3, **asked)
        check(run(q, case, layer=0, scale=1e3, **asked), expected, rtol=1e-3, atol=1e-4)


def test_not_finite_row_stays_alone_whatever_is_asked(run, prepared, head_dim):
    rng = np.random.default_rng(9)
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim(8), "block_tokens": 16}
    q, case = prepared(rng, [(40, 1), (42, 1), (41, 1)], **shape)
    asked = {"window": 20, "soft_cap": 5.0, "sinks": np.zeros(2, np.float32)}
    clean = run(q, case, layer=0, scale=0.3, **asked)
    q[1] = np.nan
    out = run(q, case, layer=0, scale=0.3, **asked)
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(("name", "block_tokens"), [("full", 16), ("windowed", 16), ("windowed", 32)])
def test_sinks_are_those_of_gpt_oss(run, paged_case, check, name, block_tokens):
    """`eager_attention_forward` of transformers' gpt-oss, with and without a window; `tools/golden/gemma.py`."""
    with np.load(Path(__file__).parent / "sinks.npz", allow_pickle=False) as recorded:
        arrays = dict(recorded)
    keys_and_values = np.stack([arrays["k"], arrays["v"]])  # [2, K, tokens, D]
    _, num_kv_heads, num_tokens, head_dim = keys_and_values.shape
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
    case = paged_case(np.random.default_rng(0), [(num_tokens, num_tokens)], **shape, num_layers=1)
    for position, slot in enumerate(case.batch.cache_slots[0].tolist()):
        case.kv_cache[slot // block_tokens, 0, :, :, slot % block_tokens] = keys_and_values[:, :, position]
    window = int(arrays["window"]) if name == "windowed" else None
    asked = {"scale": float(arrays["scale"]), "sinks": arrays["sinks"], "window": window}
    out = run(arrays["q"], case, layer=0, **asked)
    check(out, arrays[name], rtol=1e-5, atol=1e-6)
    without = run(arrays["q"], case, layer=0, scale=asked["scale"], window=window)
    assert np.abs(without - arrays[name]).max() > 0.1
