"""Attention over a KV cache in FP8 as the CUDA kernels compute it, emulated, against the CPU's operator."""

import ctypes
import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, CacheFormat, PagedCache
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.cpu.attention.cache_formats import e4m3_codes, fp8_quantised
from openinfer_kernels.testing.paged import make_paged_case
from openinfer_kernels.weights.code_values import E4M3_VALUES


def fp8_cache(kv_cache, *, layer, table):
    """Codes and scales in one range of bytes for each head, at an address that kernels take."""
    blocks, layers, _, heads, tokens, head_dim = kv_cache.shape
    memory = np.empty(blocks * layers * 2 * heads * tokens * (head_dim + 4) + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: len(memory) - 64].reshape(blocks, layers, 2, heads, -1)
    codes = memory[..., : tokens * head_dim].reshape(kv_cache.shape)
    scales = memory.view(np.float32)[..., tokens * head_dim // 4 :]
    codes[...], scales[...] = fp8_quantised(kv_cache)
    unwritten = np.isnan(kv_cache).any(axis=-1)
    codes[unwritten], scales[unwritten] = 0xFF, np.nan
    return PagedCache(data=codes, layer=layer, table=table, format=CacheFormat.FP8, scales=scales)


class Case:
    """Rows of `(context, query tokens)`; whatever no context has is NaN. Keys and values have sizes of their own."""

    def __init__(self, on_device, rows, *, heads, kv_heads, head_dim, block_tokens=16, seed=0, table=1):
        rng = np.random.default_rng(seed)
        shape = {"num_kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
        case = make_paged_case(rng, rows, **shape, table=table)
        sizes = np.exp2(rng.uniform(-2, 2, case.kv_cache.shape[:-1]))[..., None].astype(np.float32)
        sizes[:, :, 1] *= np.exp2(rng.uniform(-12, 12)).astype(np.float32)
        self.cache = fp8_cache(case.kv_cache * sizes, layer=1, table=table)
        self.batch, self.scale = case.batch, 0.7 * head_dim**-0.5
        self.q = on_device(rng.normal(size=(case.num_tokens, heads, head_dim)) * np.exp2(rng.uniform(-3, 0)))
        self.expected = CpuOps().paged_attention(
            self.q.astype(np.float32), self.cache, batch=self.batch, scale=self.scale
        )

    def check(self, attention):
        out = attention.paged_attention(self.q, self.cache, batch=self.batch, scale=self.scale).astype(np.float32)
        assert np.isfinite(out).all()
        assert np.linalg.norm(out - self.expected) < 1e-2 * np.linalg.norm(self.expected)
        largest = np.abs(self.expected).max()
        np.testing.assert_allclose(out, self.expected, rtol=2**-5, atol=3e-2 * largest)


@pytest.fixture(params=[False, True], ids=["any GPU", "Hopper"])
def hopper(request):
    return request.param


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize(("head_dim", "heads"), [(32, 6), (64, 6), (128, 6), (256, 6), (64, 24), (128, 24)])
def test_steps_of_decode_rows_chunks_and_prompts(make_attention, on_device, hopper, head_dim, heads, block_tokens):
    rows = [(170, 1), (17, 1), (200, 75), (33, 33), (1, 1), (140, 2)]
    case = Case(on_device, rows, heads=heads, kv_heads=2, head_dim=head_dim, block_tokens=block_tokens)
    case.check(make_attention(hopper=hopper))
    case.check(make_attention(hopper=hopper, batch_invariant=True))


@pytest.mark.parametrize(("rows", "head_dim"), [([(1500, 1)], 256), ([(1200, 16), (700, 2)], 64), ([(900, 1)], 128)])
def test_contexts_that_many_blocks_share_and_counters_that_are_left_at_zero(
    make_attention, on_device, hopper, rows, head_dim
):
    attention = make_attention(hopper=hopper, multiprocessors=40)
    case = Case(on_device, rows, heads=4, kv_heads=1, head_dim=head_dim)
    for _ in range(2):
        case.check(attention)


@pytest.mark.parametrize("seed", range(4))
def test_random_rows(make_attention, on_device, hopper, seed):
    rng = random.Random(seed)
    attention = make_attention(hopper=hopper, multiprocessors=rng.choice((1, 4, 13)))
    for _ in range(3):
        kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4, 8, 9))
        rows = []
        for _ in range(rng.randint(1, 4)):
            queries, past = rng.choice((1, 1, 2, 17, 40)), rng.choice((0, 1, 15, 16, 63, 64, 128, 600))
            rows.append((past + queries, queries))
        Case(
            on_device,
            rows,
            heads=group * kv_heads,
            kv_heads=kv_heads,
            head_dim=rng.choice((32, 64, 64, 128)),
            block_tokens=rng.choice((16, 32, 64)),
            seed=seed,
        ).check(attention)


def attended(attention, case, *, context_tokens):
    """With what the host knows of the contexts of longer rows."""
    batch = dataclasses.replace(case.batch, chunk_context_tokens=context_tokens)
    return attention.paged_attention(case.q, case.cache, batch=batch, scale=case.scale)


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize(("head_dim", "heads"), [(64, 6), (128, 6), (256, 6), (128, 24)])
def test_contexts_that_are_brought_to_bfloat16_first_change_no_bit(
    make_attention, on_device, head_dim, heads, block_tokens
):
    rows = [(170, 1), (17, 1), (200, 75), (33, 33), (1, 1), (140, 2)]
    case = Case(on_device, rows, heads=heads, kv_heads=2, head_dim=head_dim, block_tokens=block_tokens)
    attention = make_attention(hopper=True)
    as_stored = attended(attention, case, context_tokens=None)
    brought = attended(attention, case, context_tokens=200 + 33 + 140)
    assert np.isfinite(brought.astype(np.float32)).all()
    assert (as_stored.view(np.uint16) == brought.view(np.uint16)).all()
    case.check(SimpleNamespace(paged_attention=lambda *given, **how: brought))


def test_contexts_are_brought_where_their_length_is_known_and_there_is_room(make_attention, on_device):
    case = Case(on_device, [(170, 1), (200, 75)], heads=4, kv_heads=2, head_dim=128)
    attention, codes = make_attention(hopper=True), case.cache.data.copy()
    given = attention._contexts  # noqa: SLF001 - which way is taken shows in no result
    assert given.in_bfloat16(case.cache, case.batch, num_tokens=76, least_tokens=2) is None
    batch = dataclasses.replace(case.batch, chunk_context_tokens=200)
    cache, found = given.in_bfloat16(case.cache, batch, num_tokens=76, least_tokens=2)
    assert (case.cache.data == codes).all()
    assert cache.data.shape[:3] == (200 // 16 + 2, 1, 2)
    assert found.block_tables[0][1, :13].tolist() == list(range(13))
    assert given.in_bfloat16(case.cache, batch, num_tokens=3, least_tokens=2) is None


def test_scales_of_another_token_are_noticed_in_contexts_that_are_brought(make_attention, on_device):
    case = Case(on_device, [(170, 1), (100, 60)], heads=4, kv_heads=2, head_dim=128)
    case.cache.scales[:, :, 1] = np.roll(case.cache.scales[:, :, 1], 1, axis=-1)
    found = attended(make_attention(hopper=True), case, context_tokens=100)
    with pytest.raises(AssertionError):
        case.check(SimpleNamespace(paged_attention=lambda *given, **how: found))


@pytest.mark.parametrize("what", ["keys", "values"])
def test_scales_of_another_token_are_noticed(make_attention, on_device, hopper, what):
    case = Case(on_device, [(170, 1), (100, 60)], heads=4, kv_heads=2, head_dim=128)
    kind = 0 if what == "keys" else 1
    case.cache.scales[:, :, kind] = np.roll(case.cache.scales[:, :, kind], 1, axis=-1)
    with pytest.raises(AssertionError):
        case.check(make_attention(hopper=hopper))


def test_what_has_no_kernel_is_refused(make_attention, on_device):
    case = Case(on_device, [(20, 1)], heads=2, kv_heads=2, head_dim=64)
    with pytest.raises(ArrayMismatchError, match="no kernel that reads a cache in FP8"):
        make_attention(hopper=True).paged_attention(case.q, case.cache, batch=case.batch, scale=1.0, window=5)
    apart = PagedCache(
        data=case.cache.data.copy(), layer=1, table=1, format=CacheFormat.FP8, scales=case.cache.scales.copy()
    )
    with pytest.raises(ArrayMismatchError, match="must follow its codes"):
        make_attention(hopper=True).paged_attention(case.q, apart, batch=case.batch, scale=1.0)


def test_conversions_are_those_of_the_cpu(compile_emulated):
    """Those in integers, for GPUs without the instructions."""
    path = compile_emulated(
        "fp8_conversions",
        """#include "fibers.hpp"
#include "attention_fp8/fp8_cache.cuh"
extern "C" __attribute__((visibility("default"))) void convert(const float* x, int n, uint8_t* codes) {
  for (int i = 0; i + 1 < n; i += 2) {
    const uint32_t two = attention::e4m3_codes(x[i], x[i + 1]);
    codes[i] = two, codes[i + 1] = two >> 8;
  }
}
extern "C" __attribute__((visibility("default"))) void values(float* as_halves, float* as_floats) {
  for (uint32_t code = 0; code < 256; code++) {
    as_halves[code] = emulated::half_float_of(attention::e4m3_halves(code << 8 | (code ^ 1)), 1);
    as_floats[code] = attention::e4m3_value(code);
  }
}
extern "C" __attribute__((visibility("default"))) float scale(float largest) {
  return attention::scale_of(__float_as_uint(largest));
}
""",
    )
    library = ctypes.CDLL(str(path))
    rng = np.random.default_rng(0)
    x = (rng.normal(size=100_000) * np.exp2(rng.uniform(-30, 12, 100_000))).astype(np.float32)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = np.concatenate([x, halves[~np.isnan(halves)][: 2 * 30_000]])
    codes = np.zeros(len(x), np.uint8)
    library.convert(x.ctypes.data_as(ctypes.c_void_p), len(x), codes.ctypes.data_as(ctypes.c_void_p))
    np.testing.assert_array_equal(codes, e4m3_codes(x))
    found = np.zeros((2, 256), np.float32)
    library.values(*(row.ctypes.data_as(ctypes.c_void_p) for row in found))
    np.testing.assert_array_equal(found, np.broadcast_to(E4M3_VALUES, found.shape))
    library.scale.restype, library.scale.argtypes = ctypes.c_float, [ctypes.c_float]
    assert [library.scale(each) for each in (0.0, 448.0, 1e-44)] == [1.0, 1.0, 2.0**-126]
    assert np.isnan(library.scale(np.nan))
