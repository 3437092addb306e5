import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_kernels import RopeParameters, rope_table

THETA = 1e4


def naive_head(x: list[float], weight: list[float], eps: float, position: int) -> list[float]:
    """Norm and rotation of one head of one token."""
    size, half = len(x), len(x) // 2
    scale = 1 / math.sqrt(math.fsum(v * v for v in x) / size + eps)
    normed = [w * v * scale for v, w in zip(x, weight, strict=True)]
    out = [0.0] * size
    for pair in range(half):
        angle = position * THETA ** (-2 * pair / size)
        first, second = normed[pair], normed[pair + half]
        out[pair] = first * math.cos(angle) - second * math.sin(angle)
        out[pair + half] = second * math.cos(angle) + first * math.sin(angle)
    return out


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 6, 10, 16]),
    block_tokens=st.sampled_from([1, 2, 3, 4, 16]),
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=4),
)
def test_qk_norm_rope_append_equals_float64(
    ops, upload, paged_case, seed, group, num_kv_heads, head_dim, block_tokens, rows
):
    rng = np.random.default_rng(seed)
    rows = [(past + queries, queries) for past, queries in rows]
    case = paged_case(rng, rows, num_kv_heads=num_kv_heads, head_dim=head_dim, block_tokens=block_tokens, num_layers=3)
    num_heads = group * num_kv_heads
    qkv = rng.normal(size=(case.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)).astype(np.float32)
    q_norm, k_norm = rng.normal(size=(2, head_dim)).astype(np.float32)
    cache = upload(case.kv_cache)
    table = rope_table(RopeParameters(theta=THETA), head_dim=head_dim, positions=32)
    out = ops.qk_norm_rope_append(
        upload(qkv),
        q_norm=upload(q_norm),
        k_norm=upload(k_norm),
        eps=1e-6,
        rope=upload(table),
        kv_cache=cache,
        layer=1,
        batch=upload(case.batch),
    )

    expected_cache = case.kv_cache.copy()
    expected_q = np.empty((case.num_tokens, num_heads, head_dim))
    heads = qkv.reshape(case.num_tokens, -1, head_dim)
    for token, (position, slot) in enumerate(zip(case.batch.positions, case.batch.cache_slots, strict=True)):
        block, offset = divmod(int(slot), block_tokens)
        for head in range(num_heads):
            expected_q[token, head] = naive_head(heads[token, head].tolist(), q_norm.tolist(), 1e-6, int(position))
        for head in range(num_kv_heads):
            k = naive_head(heads[token, num_heads + head].tolist(), k_norm.tolist(), 1e-6, int(position))
            expected_cache[block, 1, 0, head, offset] = k
            expected_cache[block, 1, 1, head, offset] = heads[token, num_heads + num_kv_heads + head]
    np.testing.assert_allclose(ops.download(out), expected_q, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ops.download(cache), expected_cache, rtol=1e-5, atol=1e-5)
    others = [0, 2]
    np.testing.assert_array_equal(ops.download(cache)[:, others], case.kv_cache[:, others])


def test_qk_norm_rope_append_position_beyond_the_table_raises(ops, upload, paged_case):
    if ops.name != "cpu":
        pytest.skip("a GPU kernel cannot raise: the engine admits no position beyond its table")
    case = paged_case(np.random.default_rng(0), [(9, 1)], num_kv_heads=1, head_dim=4, block_tokens=4)
    weight = upload(np.ones(4, np.float32))
    with pytest.raises(IndexError):
        ops.qk_norm_rope_append(
            upload(np.ones((1, 12), np.float32)),
            q_norm=weight,
            k_norm=weight,
            eps=1e-6,
            rope=upload(rope_table(RopeParameters(theta=THETA), head_dim=4, positions=8)),
            kv_cache=upload(case.kv_cache),
            layer=0,
            batch=upload(case.batch),
        )
