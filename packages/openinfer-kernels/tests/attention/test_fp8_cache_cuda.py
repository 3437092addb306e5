"""A KV cache in FP8 on a GPU: what is appended, and attention over it, against the CPU's operators.

Where the kernels for Hopper serve, those for any GPU are tried as well.
"""

import dataclasses

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, CacheFormat, PagedCache
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.cpu.attention.cache_formats import fp8_quantised, fp8_values
from openinfer_kernels.testing.paged import make_paged_case

pytestmark = pytest.mark.gpu
CPU = CpuOps()


@pytest.fixture
def cuda(ops):
    if ops.name != "cuda":
        pytest.skip("of the CUDA module only")
    return ops


def make_cache(upload, shape, *, layer, codes=None, scales=None):
    """Full of NaN, or of these; in one range of bytes for each head."""
    tokens, head_dim = shape[4:]
    memory = np.full((*shape[:4], tokens * (head_dim + 4)), 0xFF, np.uint8)
    if codes is not None:
        memory[..., : tokens * head_dim] = codes.reshape(*shape[:4], -1)
        memory.view(np.float32)[..., tokens * head_dim // 4 :] = scales
    there = upload(memory)
    return PagedCache(
        data=there[..., : tokens * head_dim].reshape(shape),
        layer=layer,
        format=CacheFormat.FP8,
        scales=there.view(np.float32)[..., tokens * head_dim // 4 :],
        is_first_layer=layer == 0,
    )


def uploaded(cuda, batch):
    def there(value):
        if isinstance(value, tuple):
            return tuple(map(there, value))
        return cuda.upload(value) if isinstance(value, np.ndarray) else value

    return dataclasses.replace(
        batch, **{each.name: there(getattr(batch, each.name)) for each in dataclasses.fields(batch)}
    )


def activation(cuda, array):
    return cuda.upload_weight(np.ascontiguousarray(array.reshape(len(array), -1))).reshape(array.shape)


def rounded(cuda, array):
    return cuda.download(activation(cuda, array)).astype(np.float32)


APPENDS = ["qk_norm_rope_append", "zero_centred_qk_norm_rope_append", "rope_append", "gated_qk_norm_rope_append"]


@pytest.mark.parametrize("num_tokens", [7, 700])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", APPENDS)
def test_appended_codes_and_scales_are_the_cpus(cuda, name, head_dim, num_tokens):
    rng = np.random.default_rng(head_dim + num_tokens)
    rows = [(40, 3), (num_tokens - 3, num_tokens - 4), (1, 1)]
    case = make_paged_case(rng, rows, num_kv_heads=2, head_dim=head_dim, block_tokens=16 if num_tokens < 10 else 32)
    slots = case.batch.cache_slots[0].copy()
    slots[2] = -1
    batch = dataclasses.replace(case.batch, cache_slots=(slots,))
    is_gated = name.startswith("gated")
    qkv = rng.normal(size=(case.num_tokens, ((12 if is_gated else 6) + 4) * head_dim)).astype(np.float32)
    qkv[1] = 0
    qkv = rounded(cuda, qkv)
    rotated = head_dim // 2 if is_gated else head_dim
    angles = np.arange(2000)[:, None] * 10_000.0 ** (-np.arange(rotated // 2) * 2 / rotated)
    host = {"rope": np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)}
    norms = {f"{each}_norm": rounded(cuda, rng.normal(size=(1, head_dim)).astype(np.float32))[0] for each in "qk"}
    norms = {} if name == "rope_append" else norms
    eps = {"eps": 1e-6} if norms else {}
    expected, found = (make_cache(upload, case.kv_cache.shape, layer=1) for upload in (np.array, cuda.upload))
    q = getattr(CPU, name)(qkv, **host, **norms, **eps, cache=expected, batch=batch)
    device_norms = {key: cuda.upload_weight(value[None])[0] for key, value in norms.items()}
    device = {"rope": cuda.upload(host["rope"]), **device_norms, **eps, "batch": uploaded(cuda, batch)}
    got = getattr(cuda, name)(cuda.upload_weight(qkv), **device, cache=found)
    np.testing.assert_allclose(cuda.download(got).astype(np.float32), q, rtol=2**-7, atol=1e-2)
    codes, scales = cuda.download(found.data), cuda.download(found.scales)
    np.testing.assert_array_equal(codes[:, :, 1], expected.data[:, :, 1])  # values, which nothing is computed of
    np.testing.assert_array_equal(scales[:, :, 1], expected.scales[:, :, 1])
    np.testing.assert_array_equal(np.isnan(scales), np.isnan(expected.scales))
    np.testing.assert_allclose(scales, expected.scales, rtol=1e-5)
    written = ~np.isnan(scales)
    ours, theirs = codes[written], expected.data[written]
    # A key next to the middle of two codes may be rounded to either.
    assert (ours != theirs).mean() < 1e-3
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1
    assert (codes[~written] == 0xFF).all(), "written where nothing was to be"


class Case:
    def __init__(self, cuda, rows, *, heads, kv_heads, head_dim, block_tokens=16, seed=0):
        rng = np.random.default_rng(seed)
        shape = {"num_kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
        case = make_paged_case(rng, rows, **shape)
        sizes = np.exp2(rng.uniform(-2, 2, case.kv_cache.shape[:-1]))[..., None].astype(np.float32)
        codes, scales = fp8_quantised(case.kv_cache * sizes)
        unwritten = np.isnan(case.kv_cache).any(axis=-1)
        codes[unwritten], scales[unwritten] = 0xFF, np.nan
        self.cache = make_cache(cuda.upload, codes.shape, layer=1, codes=codes, scales=scales)
        self.scale, self.batch = 0.7 * head_dim**-0.5, uploaded(cuda, case.batch)
        q = rng.normal(size=(case.num_tokens, heads, head_dim)).astype(np.float32)
        self.q = activation(cuda, q)
        exact = dataclasses.replace(case.cache(1), data=fp8_values(codes, scales))
        q = cuda.download(self.q).astype(np.float32)
        self.expected = CPU.paged_attention(q, exact, batch=case.batch, scale=self.scale)
        self.cuda = cuda

    def run(self, attention):
        return attention.paged_attention(self.q, self.cache, batch=self.batch, scale=self.scale)

    def check(self, attention):
        out = self.cuda.download(self.run(attention)).astype(np.float32)
        assert np.isfinite(out).all()
        error = np.linalg.norm(out - self.expected) / np.linalg.norm(self.expected)
        assert error < 1e-2, error
        np.testing.assert_allclose(out, self.expected, rtol=2**-5, atol=3e-2 * np.abs(self.expected).max())


class AnyGpu:
    """A device whose kernels for Hopper are not used."""

    def __init__(self, device):
        self._device = device

    def has(self, stem):
        return "hopper" not in stem and self._device.has(stem)

    def __getattr__(self, name):
        return getattr(self._device, name)


def kinds_of(cuda):
    from openinfer_kernels.cuda.attention.paged import Attention, OneKernelAttention

    for device in (cuda.device, AnyGpu(cuda.device)):
        yield Attention(device)
        yield OneKernelAttention(device)


SHAPES = [(32, 6, 2), (64, 6, 2), (128, 8, 2), (128, 24, 2), (256, 8, 1)]


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), SHAPES)
def test_attention_is_the_cpus(cuda, head_dim, heads, kv_heads, block_tokens):
    rows = [(170, 1), (17, 1), (500, 275), (33, 33), (1, 1), (140, 2), (2100, 1)]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
    case, decode = Case(cuda, rows, **sizes), Case(cuda, [(n, 1) for n in (1, 16, 900, 33, 3000)], **sizes)
    for attention in kinds_of(cuda):
        for _ in range(2):  # counters are left at zero
            case.check(attention)
            decode.check(attention)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_contexts_that_blocks_share_are_the_same_twice(cuda, head_dim):
    for rows in ([(9000, 1), (5000, 1)], [(9000, 16)], [(4100, 2048)]):
        case = Case(cuda, rows, heads=8, kv_heads=2, head_dim=head_dim)
        case.check(cuda)
        first, second = (cuda.download(case.run(cuda)).view(np.uint16) for _ in range(2))
        np.testing.assert_array_equal(first, second)


def test_wrong_scales_are_noticed(cuda):
    for kind in (0, 1):
        case = Case(cuda, [(170, 1), (100, 60)], heads=8, kv_heads=2, head_dim=128)
        host = cuda.download(case.cache.scales)
        case.cache.scales[:, :, kind] = cuda.upload(np.roll(host[:, :, kind], 1, axis=-1))
        for attention in kinds_of(cuda):
            with pytest.raises(AssertionError):
                case.check(attention)


def test_windows_are_refused(cuda):
    case = Case(cuda, [(20, 1)], heads=2, kv_heads=2, head_dim=64)
    with pytest.raises(ArrayMismatchError, match="no kernel that reads a cache in FP8"):
        cuda.paged_attention(case.q, case.cache, batch=case.batch, scale=1.0, window=5)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [[(170, 1), (500, 275), (33, 33), (140, 2)], [(2100, 2048), (3000, 1)], [(4096, 700)]])
def test_contexts_that_are_brought_to_bfloat16_first_change_no_bit(cuda, rows, head_dim):
    """By the length of contexts that the host knows."""
    case = Case(cuda, rows, heads=8, kv_heads=2, head_dim=head_dim)
    as_stored = cuda.download(case.run(cuda)).view(np.uint16)
    known = sum(context for context, tokens in rows if tokens > 1)
    case.batch = dataclasses.replace(case.batch, chunk_context_tokens=known)
    case.check(cuda)
    np.testing.assert_array_equal(cuda.download(case.run(cuda)).view(np.uint16), as_stored)
