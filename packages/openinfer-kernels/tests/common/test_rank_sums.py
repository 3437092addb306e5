"""What collectives of several GPUs are made of, on one GPU: sums over ranks, exchanged axes, one-shot sums.

Ranks of the one-shot sums share the GPU, each on a stream of its own.
"""

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cuda():
    from openinfer_kernels.cuda import CudaOps

    return CudaOps()


@pytest.fixture(scope="module")
def arrays(cuda):
    from openinfer_kernels.cuda.comm.rank_arrays import RankArrays

    return RankArrays(cuda.device)


def bfloat16(values):
    import ml_dtypes

    return np.asarray(values).astype(ml_dtypes.bfloat16)


def total_of(ranks):
    """In float32, in order of ranks, rounded once."""
    total = ranks[0].astype(np.float32)
    for each in ranks[1:]:
        total = total + each.astype(np.float32)
    return total.astype(ranks.dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(1, 8), (3, 7), (5, 4096)])
def test_sums_are_rounded_once_in_order_of_ranks(cuda, arrays, size, shape):
    values = np.random.default_rng(size).standard_normal((size, *shape)) * 10
    for ranks in (bfloat16(values), values.astype(np.float32)):
        out = cuda.zeros(shape, ranks.dtype)
        arrays.sum(cuda.upload(ranks), out)
        assert np.array_equal(cuda.download(out).astype(np.float64), total_of(ranks).astype(np.float64))


def test_sums_of_integers_are_refused(cuda, arrays):
    with pytest.raises(ArrayMismatchError, match="bfloat16 or float32, not of int32"):
        arrays.sum(cuda.upload(np.ones((2, 4), np.int32)), cuda.zeros((4,), np.int32))


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 2), (8, 1, 16), (2, 70_000, 2), (1, 5, 3), (4, 0, 2)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
def test_axes_are_exchanged(cuda, arrays, shape, dtype):
    values = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    assert np.array_equal(cuda.download(arrays.exchange_axes(cuda.upload(values))), values.swapaxes(0, 1))


@pytest.fixture
def ends(cuda, request):
    """One-shot ends of so many ranks on one GPU."""
    from openinfer_kernels.cuda.comm.one_shot import OneShot

    size = request.param
    made = [OneShot(cuda.device, rank=rank, size=size, most_bytes=1 << 16) for rank in range(size)]
    for each in made:
        each.connect_addresses([end.address for end in made])
    yield made
    cuda.device.synchronize()
    for each in made:
        each.close()


@pytest.mark.parametrize("ends", [2, 3, 4], indirect=True)
def test_one_shot_sums_agree_over_many_turns_of_changing_sizes(cuda, ends):
    from openinfer_kernels.cuda.common.graphs import Stream

    rng, size = np.random.default_rng(7), len(ends)
    streams = [Stream(cuda.device) for _ in ends]
    sizes = [8 * int(rng.integers(1, 2048)) for _ in range(60)]
    given = [rng.integers(-8, 9, (size, count)).astype(np.float32) for count in sizes]
    given = [values if turn % 3 else bfloat16(values) for turn, values in enumerate(given)]
    for values in given:
        values[0, ::3] = -0.0  # the bits that stand for nothing
    uploaded = [[cuda.upload(values[rank]) for rank in range(size)] for values in given]
    cuda.device.synchronize()
    for turn in uploaded:
        for rank in rng.permutation(size).tolist():
            with streams[rank]:
                ends[rank].all_reduce(turn[rank])
    cuda.device.synchronize()
    for values, turn in zip(given, uploaded, strict=True):
        expected = total_of(values).astype(np.float32)
        for found in turn:
            assert np.array_equal(cuda.download(found).astype(np.float32), expected)


@pytest.mark.parametrize("ends", [2], indirect=True)
def test_a_rank_that_waits_for_nobody_is_ended_by_abort(cuda, ends):
    first, _ = ends
    array = cuda.zeros((8,))
    first.all_reduce(array)
    first.abort()
    cuda.device.synchronize()
    assert not first.fits(cuda.zeros((7,)))
    assert not first.fits(cuda.zeros((8,), np.int32))
