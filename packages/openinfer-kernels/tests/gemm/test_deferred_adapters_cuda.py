"""Adapters that the kernel after a product adds, on a Hopper GPU, at the sizes of Qwen3-4B: against float64."""

from typing import Any

import numpy as np
import pytest

from openinfer_kernels import AttentionBatch, CacheFormat, PagedCache
from openinfer_kernels.cpu.attention.cache_formats import fp8_values
from openinfer_kernels.ops.lora import AddedBy, DeltaOperator
from openinfer_kernels.testing.paged import make_batch

pytestmark = pytest.mark.gpu
NUM_SLOTS, RANK, EPS = 4, 16, 1e-6
BY_NORM, BY_HEADS = AddedBy(DeltaOperator.ADD_RMS_NORM), AddedBy(DeltaOperator.QK_NORM_ROPE_APPEND, 128)
TOKENS = (17, 32, 33, 47, 64)


@pytest.fixture
def cuda(ops):
    if ops.name != "cuda" or ops.fused_adapters is None:
        pytest.skip("of Hopper GPUs only")
    return ops


class Product:
    """Drawn arrays on the device; `plain` without adapters, `wanted` with them in float64, of host arrays."""

    def __init__(self, ops: Any, activation: Any, host: Any, heights: tuple[int, ...], inner: int, num_tokens: int):
        rng = np.random.default_rng(num_tokens + inner)
        self.starts = (0, *np.cumsum(heights).tolist())
        rows = self.starts[-1]
        draw = lambda *shape: activation(rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32))  # noqa: E731
        self.x = activation(rng.normal(0, 1, (num_tokens, inner)).astype(np.float32))
        self.weight, self.a, b = (
            draw(rows, inner),
            draw(NUM_SLOTS, len(heights), RANK, inner),
            draw(NUM_SLOTS, rows, RANK),
        )
        self.columns = activation(host(b).transpose(1, 0, 2).reshape(rows, -1))
        slots = np.resize(np.array([2, -1, 0, 3, 0, 1], np.int32), num_tokens)
        self.slots, self.none = ops.upload(slots), slots < 0
        self.plain = ops.linear(self.x, self.weight, make_batch(1))
        x, a, b = (host(each).astype(np.float64) for each in (self.x, self.a, b))
        self.wanted = host(self.plain).astype(np.float64)
        for token, slot in enumerate(slots):
            for piece in range(len(heights) if slot >= 0 else 0):
                of_piece = slice(self.starts[piece], self.starts[piece + 1])
                self.wanted[token, of_piece] += b[slot, of_piece] @ (a[slot, piece] @ x[token])

    def deferred(self, ops: Any, added_by: AddedBy) -> Any:
        given = self.x, self.weight, self.a, self.columns, self.slots
        made = ops.fused_adapters.deferred.linear(*given, starts=self.starts, added_by=added_by)
        assert made is not None
        return made


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("inner", [4096, 9728], ids=["O", "down"])
def test_a_norm_adds_what_adapters_do(cuda, activation, host, inner, num_tokens) -> None:
    product = Product(cuda, activation, host, (2560,), inner, num_tokens)
    rng = np.random.default_rng(1)
    weight = activation(rng.normal(1, 0.1, 2560).astype(np.float32))
    before = rng.normal(0, 1, (num_tokens, 2560)).astype(np.float32)
    without = cuda.upload(before)
    out_without = host(cuda.add_rms_norm(product.plain, without, weight, eps=EPS))
    rows = before + product.wanted
    scaled = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + EPS) * host(weight)
    for _ in range(3):
        residual = cuda.upload(before)
        made = product.deferred(cuda, BY_NORM)
        np.testing.assert_array_equal(host(made.y), host(product.plain))
        out = host(cuda.fused_adapters.deferred.add_rms_norm(made, residual, weight, eps=EPS))
        np.testing.assert_allclose(cuda.download(residual), rows, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(out, scaled, rtol=2**-8, atol=1e-3)
        np.testing.assert_array_equal(out[product.none], out_without[product.none])
        np.testing.assert_array_equal(cuda.download(residual)[product.none], cuda.download(without)[product.none])


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("width", [9728, 12288, 6144], ids=["160", "192", "96"])
def test_gates_add_what_adapters_do(cuda, activation, host, width, num_tokens) -> None:
    """In tiles of so many rows; Qwen3-4B's, 8B's and others."""
    product = Product(cuda, activation, host, (width, width), 2560, num_tokens)
    given = product.x, product.weight, product.a, product.columns, product.slots
    without = host(cuda.linear_swiglu(product.x, product.weight, make_batch(1)))
    gate, up = np.split(product.wanted, 2, axis=1)
    gated = gate / (1 + np.exp(-gate))
    # Gate and up are rounded before and after adapters are added, by a unit more where another product is rounded away.
    sizes = np.abs(host(product.plain).astype(np.float64)) + np.abs(product.wanted)
    of_gate, of_up = np.split(2**-7 * sizes, 2, axis=1)
    bound = 1.1 * np.abs(up) * of_gate + np.abs(gated) * of_up + 2**-7 * np.abs(gated * up) + 1e-3
    for _ in range(3):
        out = cuda.fused_adapters.deferred.linear_swiglu(*given, starts=product.starts)
        assert out is not None
        assert (np.abs(host(out) - gated * up) <= bound).all()
        np.testing.assert_array_equal(host(out)[product.none], without[product.none])


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_heads_add_what_adapters_do(cuda, activation, host, num_tokens) -> None:
    """As the operator without adapters does of sums that were rounded."""
    product = Product(cuda, activation, host, (4096, 1024, 1024), 2560, num_tokens)
    rng = np.random.default_rng(1)
    norms = {name: activation(rng.normal(1, 0.1, 128).astype(np.float32)) for name in ("q_norm", "k_norm")}
    angles = rng.uniform(0, 6, (256, 64))
    rope = cuda.upload(np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32))
    positions = rng.integers(0, 256, num_tokens).astype(np.int32)
    batch = AttentionBatch(
        positions=cuda.upload(positions),
        query_starts=cuda.upload(np.arange(num_tokens + 1, dtype=np.int32)),
        context_lens=cuda.upload(positions + 1),
        block_tables=(),
        cache_slots=(cuda.upload(rng.permutation(64)[:num_tokens].astype(np.int64)),),
        max_query_tokens=1,
        max_context_tokens=256,
    )

    def appended(call: Any, given: Any) -> tuple[np.ndarray, np.ndarray]:
        data = cuda.zeros((4, 1, 2, 8, 16, 128))
        cache = PagedCache(data=data, layer=0, format=CacheFormat.COMPUTE)
        q = call(given, **norms, eps=EPS, rope=rope, cache=cache, batch=batch)
        return host(q), host(data)

    def appended_in_fp8(call: Any, given: Any) -> tuple[np.ndarray, np.ndarray]:
        memory = cuda.upload(np.zeros((4, 1, 2, 8, 16 * (128 + 4)), np.uint8))
        codes, scales = memory[..., : 16 * 128].reshape(4, 1, 2, 8, 16, 128), memory.view(np.float32)[..., 16 * 32 :]
        cache = PagedCache(data=codes, layer=0, format=CacheFormat.FP8, scales=scales)
        q = call(given, **norms, eps=EPS, rope=rope, cache=cache, batch=batch)
        return host(q), fp8_values(cuda.download(codes), cuda.download(scales))

    made = product.deferred(cuda, BY_HEADS)
    np.testing.assert_array_equal(host(made.y), host(product.plain))
    found = appended(cuda.fused_adapters.deferred.qk_norm_rope_append, made)
    rounded = appended(cuda.qk_norm_rope_append, activation(product.wanted.astype(np.float32)))
    for one, other in zip(found, rounded, strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-6, atol=2**-6)
    in_fp8 = appended_in_fp8(cuda.fused_adapters.deferred.qk_norm_rope_append, made)
    np.testing.assert_array_equal(in_fp8[0], found[0])
    np.testing.assert_allclose(in_fp8[1], found[1], rtol=2**-4 + 2**-7, atol=4e-3)
    places = np.unravel_index(cuda.download(batch.cache_slots[0])[product.none], (4, 16))
    for each, with_adapters in ((appended, found), (appended_in_fp8, in_fp8)):
        q_without, cached_without = each(cuda.qk_norm_rope_append, product.plain)
        np.testing.assert_array_equal(with_adapters[0][product.none], q_without[product.none])
        own, without = (cached[places[0], 0, :, :, places[1]] for cached in (with_adapters[1], cached_without))
        np.testing.assert_array_equal(own, without)
