"""The products for more tokens than decode_gemm serves: exact sums over every partition of the work."""

import numpy as np
import pytest

from openinfer_kernels.cuda.gemm.tiles import CHUNK, TILES, Epilogue, Partition, Room, Tile, partition_product
from openinfer_kernels.testing.paged import make_batch

BATCH = make_batch(1)
"""Products do not look at it."""

TOKENS = (33, 63, 64, 65, 127, 129, 255, 256, 257, 700, 1000)
POISON = 0x7FC0  # a NaN
H200 = Room(132, {1: 132, 2: 66, 3: 42, 4: 30}.__getitem__)


def partition_of(epilogue: Epilogue, num_tokens: int, num_rows: int, num_columns: int = 2560) -> Partition | None:
    return partition_product(epilogue, num_tokens, num_rows, num_columns, H200)


def test_divide_cuts_k_where_there_are_few_tiles_and_clusters_fit():
    assert partition_of(Epilogue.STORE, 64, 2560) == Partition(Tile(64, 96), 1, 4)
    assert partition_of(Epilogue.STORE, 33, 6144) == Partition(Tile(64, 96), 1, 2)
    assert partition_of(Epilogue.STORE, 65, 4096) == Partition(Tile(128, 112), 1, 3)
    assert partition_of(Epilogue.STORE, 64, 2560, 130) is None


@pytest.mark.parametrize(("num_rows", "columns"), [(12288, 96), (19456, 160), (24576, 192), (34816, 96)])
@pytest.mark.parametrize(("num_tokens", "tokens"), [(33, 64), (64, 64), (65, 128), (128, 128), (192, 192)])
def test_divide_gives_the_gates_product_tiles_that_fill_the_multiprocessors(num_tokens, tokens, num_rows, columns):
    assert partition_of(Epilogue.SWIGLU, num_tokens, num_rows) == Partition(Tile(tokens, columns), 1, 1)


@pytest.mark.parametrize(
    ("epilogue", "num_tokens", "num_rows", "expected"),
    [
        (Epilogue.STORE, 256, 2560, None),
        (Epilogue.STORE, 8192, 2560, Partition(Tile(256, 160), 2, 1)),
        (Epilogue.STORE, 8192, 6144, None),
        (Epilogue.STORE, 8500, 2560, None),
        (Epilogue.SWIGLU, 64, 6144, None),
        (Epilogue.SWIGLU, 256, 19456, Partition(Tile(256, 160), 1, 1)),
        (Epilogue.SWIGLU, 8192, 19456, Partition(Tile(256, 160), 2, 1)),
        (Epilogue.SWIGLU, 384, 19456, None),
        (Epilogue.FLOAT32, 128, 151936, Partition(Tile(128, 128), 1, 1)),
        (Epilogue.FLOAT32, 129, 151936, None),
    ],
)
def test_divide_takes_what_keeps_the_multiprocessors_busy(epilogue, num_tokens, num_rows, expected):
    assert partition_of(epilogue, num_tokens, num_rows) == expected


def eighths(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers whose products and sums float32 holds exactly, in any order."""
    return (rng.integers(-4, 5, size=shape) / 8).astype(np.float32)


@pytest.fixture
def cuda(ops):
    if ops.name != "cuda":
        pytest.skip("of the CUDA module only")
    return ops


@pytest.fixture
def gemm(cuda):
    from openinfer_kernels.cuda.gemm.gemm import Gemm

    if not cuda.device.has("gemm"):
        pytest.skip("this GPU is not a Hopper")
    return Gemm(cuda.device)


@pytest.fixture
def poisoned(cuda):
    from openinfer_kernels.cuda.common.libraries import bfloat16

    def make(*shape: int, dtype: str = "bfloat16"):
        if dtype == "float32":
            return cuda.upload(np.full(shape, np.nan, np.float32))
        return cuda.upload(np.full(shape, POISON, np.uint16).view(bfloat16))

    return make


PARTITIONS = [
    pytest.param(
        epilogue,
        Partition(tile, multicast_ctas, split_k),
        id=f"{epilogue}-{tile.tokens}x{tile.columns}-{multicast_ctas}-{split_k}",
    )
    for epilogue, tiles in TILES.items()
    for tile in tiles
    for multicast_ctas, split_k in ((1, 1), (2, 1), (1, 2), (1, 3), (1, 4))
    if split_k == 1 or epilogue is Epilogue.STORE
]
SHAPES = [  # (n, k)
    pytest.param(16, 8, id="less than a tile and a chunk"),
    pytest.param(304, 200, id="tiles and chunks that end beyond"),
    pytest.param(2560, 1024, id="more tiles than multiprocessors"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("epilogue", "partition"), PARTITIONS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gemm_is_exact_but_for_one_rounding(
    gemm, poisoned, activation, host, rounded, rounded_once, epilogue, partition, n, k
):
    if partition.split_k > -(-k // CHUNK):
        pytest.skip("more splits than chunks of K")
    rng = np.random.default_rng(n + k)
    x, weight = eighths(rng, TOKENS[-1] + 1, k), eighths(rng, n, k)
    x[-1] = np.nan  # beyond the tokens of any call
    x_device, weight_device = activation(x), activation(weight)
    sums = x[:-1] @ weight.T
    for num_tokens in TOKENS:
        tokens, expected = x_device[-1 - num_tokens : -1], sums[len(sums) - num_tokens :]
        width = n // 2 if epilogue is Epilogue.SWIGLU else n
        out = poisoned(num_tokens + 1, width, dtype="float32" if epilogue is Epilogue.FLOAT32 else "bfloat16")
        gemm.multiply(epilogue, partition, tokens, weight_device, out[:num_tokens])
        found = host(out)
        assert np.isnan(found[num_tokens]).all()
        if epilogue is Epilogue.SWIGLU:
            gate, up = np.split(rounded(expected).astype(np.float64), 2, axis=1)
            rounded_once(found[:num_tokens], gate / (1 + np.exp(-gate)) * up)
        else:
            exact = expected if epilogue is Epilogue.FLOAT32 else rounded(expected)
            np.testing.assert_array_equal(found[:num_tokens], exact)


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_gemm_rows_have_the_same_bits_for_any_number_of_tokens_where_k_is_whole(
    gemm, poisoned, activation, host, epilogue
):
    rng = np.random.default_rng(1)
    x, weight = (activation(rng.normal(size=(rows, 1216)).astype(np.float32)) for rows in (600, 640))
    width, dtype = (320, "bfloat16") if epilogue is Epilogue.SWIGLU else (640, "bfloat16")
    dtype = "float32" if epilogue is Epilogue.FLOAT32 else dtype
    results = []
    for tile in TILES[epilogue]:
        for multicast_ctas, num_tokens in ((1, 600), (2, 600), (1, 40)):
            out = poisoned(num_tokens, width, dtype=dtype)
            gemm.multiply(epilogue, Partition(tile, multicast_ctas, 1), x[:num_tokens], weight, out)
            results.append(host(out)[:40])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("split_k", [1, 2, 3, 4])
def test_gemm_token_with_nan_stays_alone(gemm, poisoned, activation, host, split_k):
    rng = np.random.default_rng(0)
    x, weight = eighths(rng, 40, 512), activation(eighths(rng, 192, 512))
    partition = Partition(TILES[Epilogue.STORE][0], 1, split_k)
    clean, dirty = poisoned(40, 192), poisoned(40, 192)
    gemm.multiply(Epilogue.STORE, partition, activation(x), weight, clean)
    x[3, 17], x[35] = np.nan, np.inf
    gemm.multiply(Epilogue.STORE, partition, activation(x), weight, dirty)
    others = [i for i in range(40) if i not in (3, 35)]
    np.testing.assert_array_equal(host(dirty)[others], host(clean)[others])
    assert not np.isfinite(host(dirty)[[3, 35]]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [33, 64, 100, 300])
def test_linear_chain_overlapped_and_captured_equals_one_by_one(cuda, activation, host, num_tokens):
    """Each product reads what the one before wrote, and may start before that one has ended."""
    from openinfer_kernels.cuda.common.libraries import cupy

    rng = np.random.default_rng(num_tokens)

    def random(*shape: int):
        return activation(rng.normal(size=shape).astype(np.float32) / shape[-1] ** 0.5)

    weights, gate_up, head = [random(2560, 4096), random(4096, 2560)], random(5120, 2560), random(6144, 2560)
    x, norm = random(num_tokens, 4096), random(2560)

    def chain(wait):
        at = x
        for _ in range(3):
            at = cuda.linear(at, weights[0], BATCH)
            wait()
            at = cuda.linear_swiglu(cuda.rms_norm(at, norm, eps=1e-6), gate_up, BATCH)
            wait()
            at = cuda.linear(at, weights[1], BATCH)
            wait()
        return cuda.logits(cuda.linear(at, weights[0], BATCH), head)

    cupy.cuda.Device().synchronize()  # the stream does not wait for the one that made the inputs
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        expected = host(chain(stream.synchronize))
        stream.begin_capture()
        captured = chain(lambda: None)
        graph = stream.end_capture()
        for _ in range(20):
            captured.fill(np.nan)
            graph.launch(stream)
            np.testing.assert_array_equal(host(captured), expected)


@pytest.mark.gpu
def test_gemm_serves_aligned_arrays_only(gemm, poisoned):
    x, weight = poisoned(40, 512), poisoned(2560, 512)
    assert gemm.serves(Epilogue.STORE, x, weight)
    assert not gemm.serves(Epilogue.STORE, x[:0], weight)
    assert not gemm.serves(Epilogue.STORE, x, poisoned(2552, 512))
    assert not gemm.serves(Epilogue.STORE, poisoned(40, 508), poisoned(2560, 508))
    assert not gemm.serves(Epilogue.STORE, poisoned(40 * 512 + 1)[1:].reshape(40, 512), weight)
