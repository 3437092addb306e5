"""A KV cache in FP8: its codes and scales bit for bit, and the operators that write and read it, on the CPU."""

import dataclasses

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, CacheFormat, PagedCache
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kernels.cpu.attention.cache_formats import e4m3_codes, fp8_quantised, fp8_values
from openinfer_kernels.testing.paged import make_paged_case

ml_dtypes = pytest.importorskip("ml_dtypes")


def reference_codes(x):
    """By ml_dtypes, which knows no saturation."""
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def test_codes_are_those_of_ml_dtypes():
    rng = np.random.default_rng(0)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    spread = (rng.normal(size=200_000) * np.exp2(rng.uniform(-140, 20, 200_000))).astype(np.float32)
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.sort(values[np.isfinite(values)])
    ties = (finite[1:] + finite[:-1]) / 2
    around = np.concatenate([np.nextafter(ties, np.float32(end)) for end in (-np.inf, np.inf)])
    for x in (halves[np.isfinite(halves)], spread, finite, ties, around):
        np.testing.assert_array_equal(e4m3_codes(x), reference_codes(x))
    assert e4m3_codes(np.array([1e9, -1e9, np.inf, 464.0], np.float32)).tolist() == [0x7E, 0xFE, 0x7E, 0x7E]
    assert e4m3_codes(np.array([np.nan], np.float32)).tolist() == [0x7F]


@pytest.mark.parametrize("seed", range(5))
def test_values_are_within_half_a_step(seed):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(300, 64)) * np.exp2(rng.uniform(-130, 100, (300, 1)))).astype(np.float32)
    x *= np.exp2(rng.uniform(-12, 0, x.shape)).astype(np.float32)
    codes, scales = fp8_quantised(x)
    np.testing.assert_array_equal(scales, np.maximum(np.abs(x).max(axis=1) / np.float32(448), np.float32(2.0**-126)))
    np.testing.assert_array_equal(codes, reference_codes(x / scales[:, None]))
    error = np.abs(fp8_values(codes, scales).astype(np.float64) - x)
    # Half of the last of 3 bits; below the smallest normal number steps are 2^-9.
    bound = np.maximum(np.abs(x) * 2.0**-4, scales[:, None] * 2.0**-10)
    assert (error <= bound * (1 + 1e-6)).all()


def test_zeros_small_and_bad_numbers():
    x = np.zeros((5, 32), np.float32)
    x[1, 3] = 1e-44
    x[2, 5] = np.nan
    x[3, 7] = np.inf
    x[4, :2] = 3e38, -3e38
    codes, scales = fp8_quantised(x)
    assert scales[0] == 1
    assert scales[1] == 2.0**-126
    assert not codes[:2].any()
    values = fp8_values(codes, scales)
    assert np.isnan(values[2]).all(), "a NaN would have been lost"
    assert not np.isfinite(values[3]).any() or np.isnan(values[3]).any()
    np.testing.assert_allclose(values[4, :2], [3e38, -3e38], rtol=1e-6)


def fp8_cache(shape, layer, table=0):
    """A cache in one range of bytes per head, full of NaN."""
    blocks, layers, _, heads, tokens, head_dim = shape
    memory = np.full((blocks, layers, 2, heads, tokens * (head_dim + 4)), 0xFF, np.uint8)
    codes = memory[..., : tokens * head_dim].reshape(shape)
    scales = memory.view(np.float32)[..., tokens * head_dim // 4 :]
    assert np.shares_memory(codes, memory)
    assert np.shares_memory(scales, memory)
    return PagedCache(data=codes, layer=layer, table=table, format=CacheFormat.FP8, scales=scales)


def filled(case, layer):
    """The case's cache in FP8, and what it stands for in float32."""
    cache = fp8_cache(case.kv_cache.shape, layer, case.table)
    codes, scales = fp8_quantised(case.kv_cache)
    cache.data[...], cache.scales[...] = codes, scales
    return cache, dataclasses.replace(case.cache(layer), data=fp8_values(codes, scales))


@pytest.mark.parametrize("ops", [CpuOps(), BatchInvariantCpuOps()], ids=["plain", "batch-invariant"])
@pytest.mark.parametrize(
    "asked", [{}, {"window": 20}, {"soft_cap": 3.0, "window": 33}], ids=["plain", "window", "window and cap"]
)
def test_attention_reads_what_codes_and_scales_stand_for(ops, asked):
    rng = np.random.default_rng(1)
    rows = [(70, 1), (33, 33), (5, 1), (90, 17)]
    case = make_paged_case(rng, rows, num_kv_heads=2, head_dim=32, block_tokens=16, table=1)
    cache, exact = filled(case, 1)
    q = rng.normal(size=(case.num_tokens, 6, 32)).astype(np.float32)
    found = ops.paged_attention(q, cache, batch=case.batch, scale=0.2, **asked)
    np.testing.assert_array_equal(found, ops.paged_attention(q, exact, batch=case.batch, scale=0.2, **asked))
    assert np.isfinite(found).all()
    for part in ("scales", "data"):  # a mistake in either is seen
        wrong = getattr(cache, part).copy()
        wrong[...] = np.roll(wrong, 1, axis=4)
        other = ops.paged_attention(
            q, dataclasses.replace(cache, **{part: wrong}), batch=case.batch, scale=0.2, **asked
        )
        assert not np.allclose(other, found, rtol=1e-2, atol=1e-2)


def rope_of(rotated):
    angles = np.arange(200)[:, None] * 10_000.0 ** (-np.arange(rotated // 2) * 2 / rotated)
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)


def appended(ops, name, qkv, cache, batch, head_dim, rotated):
    rng = np.random.default_rng(3)
    keywords = {"rope": rope_of(rotated), "cache": cache, "batch": batch}
    if name != "rope_append":
        norms = {f"{each}_norm": rng.normal(size=head_dim).astype(np.float32) for each in "qk"}
        keywords |= {**norms, "eps": 1e-6}
    return getattr(ops, name)(qkv, **keywords)


@pytest.mark.parametrize(
    "name",
    ["qk_norm_rope_append", "zero_centred_qk_norm_rope_append", "rope_append", "gated_qk_norm_rope_append"],
)
def test_appended_tokens_are_the_codes_of_what_a_plain_cache_gets(name):
    rng, ops, head_dim = np.random.default_rng(2), CpuOps(), 32
    case = make_paged_case(rng, [(40, 3), (17, 17), (1, 1)], num_kv_heads=2, head_dim=head_dim, block_tokens=16)
    slots = case.batch.cache_slots[0].copy()
    slots[4] = -1
    batch = dataclasses.replace(case.batch, cache_slots=(slots,))
    query_heads = 12 if name.startswith("gated") else 6
    qkv = rng.normal(size=(case.num_tokens, (query_heads + 4) * head_dim)).astype(np.float32)
    rotated = head_dim // 2 if name.startswith("gated") else head_dim
    plain = PagedCache(data=np.full_like(case.kv_cache, np.nan), layer=1)
    cache = fp8_cache(case.kv_cache.shape, 1)
    q = appended(ops, name, qkv, cache, batch, head_dim, rotated)
    np.testing.assert_array_equal(q, appended(ops, name, qkv, plain, batch, head_dim, rotated))
    written = np.isfinite(plain.data).all(axis=-1)
    assert written[:, 1].sum() == 2 * 2 * (case.num_tokens - 1)
    assert not written[:, 0].any()
    codes, scales = fp8_quantised(plain.data[written])
    np.testing.assert_array_equal(cache.data[written], codes)
    np.testing.assert_array_equal(cache.scales[written], scales)
    assert (cache.data[~written] == 0xFF).all()
    assert np.isnan(cache.scales[~written]).all()


def test_cache_without_its_scales_is_refused():
    cache = fp8_cache((3, 1, 2, 2, 16, 32), 0)
    with pytest.raises(ArrayMismatchError, match="has scales none"):
        dataclasses.replace(cache, scales=None).in_fp8()
    with pytest.raises(ArrayMismatchError, match="uint8 and float32"):
        dataclasses.replace(cache, scales=cache.scales.astype(np.float64)).in_fp8()
    with pytest.raises(ArrayMismatchError, match="in fp8"):
        cache.in_compute_dtype()
