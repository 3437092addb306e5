import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_kernels import PagedCache, RopeParameters, rope_table

THETA = 1e4
OPERATORS = {
    "qk_norm_rope_append": lambda weight: weight,
    "zero_centred_qk_norm_rope_append": lambda weight: 1 + weight.astype(np.float64),
    "rope_append": lambda weight: None,
}
"""Each operator, and what its norms multiply by; None: it has none."""


def naive_head(x: np.ndarray, weight: np.ndarray | None, eps: float, position: int) -> list[float]:
    """Norm and rotation of one head of one token, in float64."""
    size, half = len(x), len(x) // 2
    normed = x.astype(np.float64).tolist()
    if weight is not None:
        scale = 1 / math.sqrt(math.fsum(v * v for v in normed) / size + eps)
        normed = (x.astype(np.float64) * scale * weight.astype(np.float64)).tolist()
    out = [0.0] * size
    for pair in range(half):
        angle = position * THETA ** (-2 * pair / size)
        first, second = normed[pair], normed[pair + half]
        out[pair] = first * math.cos(angle) - second * math.sin(angle)
        out[pair + half] = second * math.cos(angle) + first * math.sin(angle)
    return out


@dataclasses.dataclass
class Outcome:
    """What the operator returned and left in the cache, and what it should have."""

    q: np.ndarray
    expected_q: np.ndarray
    cache: np.ndarray
    expected_cache: np.ndarray


@pytest.fixture(scope="session")
def outcome(ops, upload, activation, host):
    """Runs one of `OPERATORS` in layer 1 of 3 on random values; `case` is a `PagedCase`."""

    def run(rng: np.random.Generator, case, *, group: int, operator: str = "qk_norm_rope_append") -> Outcome:
        _, _, _, num_kv_heads, block_tokens, head_dim = case.kv_cache.shape
        num_heads = group * num_kv_heads
        qkv = activation(
            rng.normal(size=(case.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)).astype(np.float32)
        )
        q_norm, k_norm = map(activation, rng.normal(size=(2, head_dim)).astype(np.float32))
        cache = activation(case.kv_cache)
        expected_cache = host(cache).copy()
        table = rope_table(RopeParameters(theta=THETA), head_dim=head_dim, positions=32)
        keywords = {"rope": upload(table), "cache": PagedCache(data=cache, layer=1), "batch": upload(case.batch)}
        q_weight, k_weight = OPERATORS[operator](host(q_norm)), OPERATORS[operator](host(k_norm))
        if q_weight is not None:
            keywords |= {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}
        out = getattr(ops, operator)(qkv, **keywords)
        expected_q = np.empty((case.num_tokens, num_heads, head_dim))
        heads = host(qkv).reshape(case.num_tokens, -1, head_dim)
        for token, (position, slot) in enumerate(zip(case.batch.positions, case.batch.cache_slots[0], strict=True)):
            for head in range(num_heads):
                expected_q[token, head] = naive_head(heads[token, head], q_weight, 1e-6, int(position))
            if slot < 0:
                continue
            block, offset = divmod(int(slot), block_tokens)
            for head in range(num_kv_heads):
                k = naive_head(heads[token, num_heads + head], k_weight, 1e-6, int(position))
                expected_cache[block, 1, 0, head, offset] = k
                expected_cache[block, 1, 1, head, offset] = heads[token, num_heads + num_kv_heads + head]
        return Outcome(q=host(out), expected_q=expected_q, cache=host(cache), expected_cache=expected_cache)

    return run


def check(outcome: Outcome, *, bfloat16: bool) -> None:
    """Values, also by their error as a whole; K and V of the other layers and slots, NaN included, bit for bit."""
    rotated = outcome.expected_cache[:, 1, 0]
    for got, expected in ((outcome.q, outcome.expected_q), (outcome.cache[:, 1, 0], rotated)):
        largest = np.nanmax(np.abs(expected), initial=1.0)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2.0**-7 * largest if bfloat16 else 1e-5)
        error = np.linalg.norm(np.nan_to_num(got - expected)) / np.linalg.norm(np.nan_to_num(expected))
        of_one_rounding = 2e-3 if expected.size >= 1000 else 2.0**-8  # 1.5e-3 in the mean square, 2^-8 at most
        assert error < (of_one_rounding if bfloat16 else 1e-6)
    np.testing.assert_array_equal(outcome.cache[:, 1, 1], outcome.expected_cache[:, 1, 1])
    np.testing.assert_array_equal(outcome.cache[:, [0, 2]], outcome.expected_cache[:, [0, 2]])


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 6, 10, 16, 32]),
    block_tokens=st.sampled_from([1, 2, 3, 4, 16]),
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=4),
)
def test_qk_norm_rope_append_equals_float64(
    ops, outcome, paged_case, seed, group, num_kv_heads, head_dim, block_tokens, rows
):
    rng = np.random.default_rng(seed)
    rows = [(past + queries, queries) for past, queries in rows]
    case = paged_case(rng, rows, num_kv_heads=num_kv_heads, head_dim=head_dim, block_tokens=block_tokens, num_layers=3)
    for operator in OPERATORS:
        check(outcome(rng, case, group=group, operator=operator), bfloat16=ops.name == "cuda")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize(("group", "num_kv_heads"), [(4, 8), (5, 1), (1, 3)])
def test_qk_norm_rope_append_of_a_models_heads_equals_float64(ops, outcome, paged_case, head_dim, group, num_kv_heads):
    rng = np.random.default_rng([head_dim, group])
    rows = [(17, 3), (5, 1), (1, 1)]
    case = paged_case(rng, rows, num_kv_heads=num_kv_heads, head_dim=head_dim, block_tokens=16, num_layers=3)
    for operator in OPERATORS:
        check(outcome(rng, case, group=group, operator=operator), bfloat16=ops.name == "cuda")


def test_qk_norm_rope_append_padding_is_written_nowhere(ops, outcome, paged_case):
    rng = np.random.default_rng(3)
    case = paged_case(rng, [(9, 4), (5, 2)], num_kv_heads=2, head_dim=128, block_tokens=4, num_layers=3)
    case.batch.cache_slots[0][[1, 5]] = -1
    check(outcome(rng, case, group=2), bfloat16=ops.name == "cuda")


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
            cache=PagedCache(data=upload(case.kv_cache), layer=0),
            batch=upload(case.batch),
        )
