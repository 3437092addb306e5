"""Prompts with adapters in their products, on a Hopper GPU, at the sizes of Qwen3-4B: against float64."""

from itertools import pairwise

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
NUM_SLOTS, RANK = 4, 16
PRODUCTS = {
    "Q, K and V": ((4096, 1024, 1024), 2560),
    "O": ((2560,), 4096),
    "gate and up": ((9728, 9728), 2560),
    "down": ((2560,), 9728),
}
TOKENS = (513, 768, 1024, 1500, 2048, 3072, 8192)
SAMPLED_TOKENS = 96


@pytest.fixture
def fused(ops):
    if ops.name != "cuda" or ops.fused_adapters is None:
        pytest.skip("of Hopper GPUs only")
    return ops.fused_adapters


def slots_of(kind: str, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Runs of one slot and of none as prompts have them, or each token's own, also of slots that there are not."""
    if kind == "mixed":
        return rng.integers(-2, NUM_SLOTS + 2, num_tokens).astype(np.int32)
    ends = np.sort(rng.integers(0, num_tokens, 6))
    return (np.searchsorted(ends, np.arange(num_tokens), side="right") % (NUM_SLOTS + 1) - 1).astype(np.int32)


@pytest.mark.parametrize("kind", ["runs", "mixed"])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("heights", "inner"), PRODUCTS.values(), ids=PRODUCTS.keys())
def test_prompts_have_what_their_adapters_add(ops, fused, activation, host, heights, inner, num_tokens, kind) -> None:
    """Of some tokens, those next to another slot's among them; and each time the same bits."""
    rng = np.random.default_rng(num_tokens)
    starts = (0, *np.cumsum(heights).tolist())
    draw = lambda *shape: rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)  # noqa: E731
    x, weight = activation(draw(num_tokens, inner) * np.float32(inner**0.5)), activation(draw(starts[-1], inner))
    a, b = activation(draw(NUM_SLOTS, len(heights), RANK, inner)), activation(draw(NUM_SLOTS, starts[-1], RANK))
    columns = activation(np.ascontiguousarray(host(b).transpose(1, 0, 2).reshape(starts[-1], -1)))
    slots = slots_of(kind, num_tokens, rng)
    multiply = fused.linear_swiglu if len(heights) == 2 else fused.linear
    found = [host(multiply(x, weight, a, columns, ops.upload(slots), starts=starts)) for _ in range(3)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    edges = np.flatnonzero(np.diff(slots))[:SAMPLED_TOKENS]
    sampled = np.unique(np.r_[0, edges, edges + 1, rng.integers(0, num_tokens, SAMPLED_TOKENS), num_tokens - 1])
    wide_x, wide_a, wide_b = (host(each).astype(np.float64) for each in (x, a, b))
    wanted = wide_x[sampled] @ host(weight).astype(np.float64).T
    for row, token in enumerate(sampled):
        slot = slots[token]
        for piece, (begin, end) in enumerate(pairwise(starts) if 0 <= slot < NUM_SLOTS else ()):
            wanted[row, begin:end] += wide_b[slot, begin:end] @ (wide_a[slot, piece] @ wide_x[token])
    most = 4e-3
    if len(heights) == 2:
        gate, up = (
            host(activation(each.astype(np.float32))).astype(np.float64) for each in np.split(wanted, 2, axis=1)
        )
        wanted, most = gate / (1 + np.exp(-gate)) * up, 1.5e-2
    errors = np.linalg.norm(found[0][sampled] - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert errors.max() < most
