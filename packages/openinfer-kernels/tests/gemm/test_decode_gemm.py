"""The products for few tokens: exact sums over every way to divide the work, and nothing read or written beside."""

import itertools

import numpy as np
import pytest

from openinfer_kernels.testing.paged import make_batch

BATCH = make_batch(1)
"""Products do not look at it."""

SHAPES = [  # (n, k): what is special about the division of a tile's K, or of the tiles
    pytest.param(64, 128, id="one chunk"),
    pytest.param(64, 256, id="two blocks share a tile of two chunks"),
    pytest.param(192, 640, id="three blocks share five chunks"),
    pytest.param(4224, 384, id="two blocks share each of 66 tiles"),
    pytest.param(6144, 2560, id="96 tiles"),
    pytest.param(8512, 256, id="133 tiles"),
    pytest.param(17024, 128, id="266 tiles, two for most blocks; gates in tiles of 80 rows, the last of 64"),
    pytest.param(2560, 9728, id="down"),
    pytest.param(19456, 2560, id="gate and up"),
]
POISON = 0x7FC0  # a NaN


def eighths(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers whose products and sums float32 holds exactly, in any order."""
    return (rng.integers(-4, 5, size=shape) / 8).astype(np.float32)


@pytest.fixture
def cuda(ops):
    if ops.name != "cuda":
        pytest.skip("of the CUDA module only")
    return ops


@pytest.fixture
def decode_gemm(cuda):
    from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm

    if not cuda.device.has("decode_gemm"):
        pytest.skip("this GPU is not a Hopper")
    return DecodeGemm(cuda.device)


@pytest.fixture
def poisoned(cuda):
    from openinfer_kernels.cuda.common.libraries import bfloat16

    return lambda *shape: cuda.upload(np.full(shape, POISON, np.uint16).view(bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_decode_gemm_linear_is_exact_but_for_one_rounding(decode_gemm, poisoned, activation, host, rounded, n, k):
    rng = np.random.default_rng(n + k)
    x, weight = eighths(rng, 33, k), eighths(rng, n, k)
    x[32] = np.nan  # beyond the tokens of any call
    x_device, weight_device = activation(x), activation(weight)
    expected = rounded(x[:32] @ weight.T)
    for num_tokens in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32):
        tokens, out = x_device[32 - num_tokens : 32], poisoned(num_tokens + 1, n)
        assert decode_gemm.serves(tokens, weight_device)
        decode_gemm.linear(tokens, weight_device, out[:num_tokens])
        np.testing.assert_array_equal(host(out)[:num_tokens], expected[32 - num_tokens :])
        assert np.isnan(host(out)[num_tokens]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_decode_gemm_swiglu_is_the_gate_of_exact_sums(
    decode_gemm, poisoned, activation, host, rounded, rounded_once, n, k
):
    rng = np.random.default_rng(n + k)
    x, gate_up = eighths(rng, 33, k), eighths(rng, n, k)
    x[32] = np.nan
    x_device, gate_up_device = activation(x), activation(gate_up)
    gate, up = np.split(rounded(x[:32] @ gate_up.T).astype(np.float64), 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    for num_tokens in (1, 5, 8, 13, 16, 27, 32):
        tokens, out = x_device[32 - num_tokens : 32], poisoned(num_tokens + 1, n // 2)
        decode_gemm.linear_swiglu(tokens, gate_up_device, out[:num_tokens])
        rounded_once(host(out)[:num_tokens], expected[32 - num_tokens :])
        assert np.isnan(host(out)[num_tokens]).all()


@pytest.mark.gpu
def test_decode_gemm_token_with_nan_stays_alone(decode_gemm, poisoned, activation, host):
    rng = np.random.default_rng(0)
    x, weight = eighths(rng, 8, 256), activation(eighths(rng, 192, 256))
    clean, dirty = poisoned(8, 192), poisoned(8, 192)
    decode_gemm.linear(activation(x), weight, clean)
    x[3, 17], x[5] = np.nan, np.inf
    decode_gemm.linear(activation(x), weight, dirty)
    others = [0, 1, 2, 4, 6, 7]
    np.testing.assert_array_equal(host(dirty)[others], host(clean)[others])
    assert not np.isfinite(host(dirty)[[3, 5]]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 11, 29])
def test_decode_gemm_chain_overlapped_and_captured_equals_one_by_one(
    decode_gemm, poisoned, activation, host, num_tokens
):
    """Each product reads what the one before wrote, and may start before that one has ended."""
    from openinfer_kernels.cuda.common.libraries import cupy

    rng = np.random.default_rng(num_tokens)
    sizes = [2560, 4096, 256, 6144, 2560]
    weights = [activation(rng.normal(size=(n, k)).astype(np.float32) / k**0.5) for k, n in itertools.pairwise(sizes)]
    gate_up = activation(rng.normal(size=(2 * 512, 2560)).astype(np.float32) / 50)
    x = activation(rng.normal(size=(num_tokens, 2560)).astype(np.float32))

    def chain(outs, wait):
        at = x
        for weight, out in zip(weights, outs, strict=False):
            decode_gemm.linear(at, weight, out)
            wait()
            at = out
        decode_gemm.linear_swiglu(at, gate_up, outs[-1])
        wait()

    def new_outs():
        return [poisoned(num_tokens, n) for n in (*sizes[1:], 512)]

    cupy.cuda.Device().synchronize()  # the stream does not wait for the one that made the inputs
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        expected, captured = new_outs(), new_outs()
        chain(expected, stream.synchronize)
        stream.begin_capture()
        chain(captured, lambda: None)
        graph = stream.end_capture()
        for _ in range(20):
            for out in captured:
                out.view(np.uint16).fill(POISON)
            graph.launch(stream)
            for out, other in zip(captured, expected, strict=True):
                np.testing.assert_array_equal(host(out), host(other))


@pytest.mark.gpu
def test_decode_gemm_serves_few_tokens_and_whole_aligned_tiles(decode_gemm, poisoned):
    x, weight = poisoned(33, 512), poisoned(128, 512)
    assert decode_gemm.serves(x[:32], weight)
    assert not decode_gemm.serves(x, weight)
    assert not decode_gemm.serves(x[:0], weight)
    assert not decode_gemm.serves(x[:4], poisoned(96, 512))
    assert not decode_gemm.serves(x[:4], weight[:0])
    assert not decode_gemm.serves(poisoned(4, 448), poisoned(128, 448))
    assert not decode_gemm.serves(poisoned(4 * 512 + 1)[1:].reshape(4, 512), weight)


@pytest.mark.gpu
def test_linear_of_few_tokens_with_a_bias_adds_it(cuda, activation, host, rounded):
    rng = np.random.default_rng(0)
    x, weight, bias = eighths(rng, 3, 256), eighths(rng, 128, 256), eighths(rng, 128)
    out = cuda.linear(activation(x), activation(weight), BATCH, activation(bias))
    np.testing.assert_array_equal(host(out), rounded(x @ weight.T + bias))


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 8])
def test_tensor_maps_serve_what_is_at_the_address_now(decode_gemm, poisoned, activation, host, rounded, offset):
    """One array is given other contents, and then other sizes at the same address."""
    rng = np.random.default_rng(0)
    memory = activation(np.zeros(8 + 16 * 512, np.float32))
    weight = eighths(rng, 64, 512)
    weight_device, narrow_device = activation(weight), activation(weight[:, :256].copy())
    for x in (eighths(rng, 16, 512), eighths(rng, 16, 512), eighths(rng, 5, 512), eighths(rng, 16, 256)):
        place = memory[offset : offset + x.size].reshape(x.shape)
        place.set(activation(x).get())
        out = poisoned(len(x), 64)
        is_narrow = x.shape[1] == 256
        decode_gemm.linear(place, narrow_device if is_narrow else weight_device, out)
        np.testing.assert_array_equal(host(out), rounded(x @ (weight[:, :256] if is_narrow else weight).T))
