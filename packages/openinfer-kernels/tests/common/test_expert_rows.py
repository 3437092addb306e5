"""Rows on their way to other ranks' experts and back: ranks share the GPU, each on a stream of its own."""

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, ExpertChoice

pytestmark = pytest.mark.gpu
WIDTH, CHOSEN, EXPERTS = 2048, 6, 4


@pytest.fixture(scope="module")
def cuda():
    from openinfer_kernels.cuda import CudaOps

    return CudaOps()


@pytest.fixture
def ends(cuda, request, monkeypatch):
    """Of so many ranks on one GPU, which must have room for the blocks of all: many rows take several launches."""
    from openinfer_kernels.cuda.comm import expert_rows
    from openinfer_kernels.cuda.comm.expert_rows import ExpertRows

    monkeypatch.setattr(expert_rows, "MOST_PLACES", 40)
    size = request.param
    made = [ExpertRows(cuda.device, rank=rank, size=size) for rank in range(size)]
    for each in made:
        each.connect_addresses([end.addresses for end in made])
    yield made
    cuda.device.synchronize()
    for each in made:
        each.close()


def bfloat16(values):
    import ml_dtypes

    return np.asarray(values).astype(ml_dtypes.bfloat16)


class Step:
    """Rows of each rank; the sums of a rank's experts are its number + 1 times the row."""

    def __init__(self, cuda, rng, counts):
        self.counts, self.places, size = counts, max(counts), len(counts)
        self.x = [rng.integers(-8, 9, (count, WIDTH)) for count in counts]
        self.ids = [rng.integers(-1, size * EXPERTS, (count, CHOSEN)).astype(np.int32) for count in counts]
        self.weights = [rng.random((count, CHOSEN)).astype(np.float32) for count in counts]
        self.on_gpu = [
            (
                cuda.upload(bfloat16(x)),
                ExpertChoice(ids=cuda.upload(ids), weights=cuda.upload(weights)),
                cuda.upload(bfloat16(x * 2)),
            )
            for x, ids, weights in zip(self.x, self.ids, self.weights, strict=True)
        ]

    def goes(self, owner, rank):
        ids = self.ids[owner]
        return ((ids >= 0) & (ids // EXPERTS == rank)).any(axis=1) | (owner == rank)


@pytest.mark.parametrize("ends", [2, 3], indirect=True)
def test_chosen_rows_come_and_their_sums_go_back_over_many_turns(cuda, ends):
    from openinfer_kernels.cuda.common.graphs import Stream

    rng, size = np.random.default_rng(5), len(ends)
    streams = [Stream(cuda.device) for _ in ends]
    counts = [[int(count) for count in rng.integers(0, 33, size)] for _ in range(20)]
    counts = [each if any(each) else [1] * size for each in counts] + [[9, 100, *[0] * (size - 2)], [1] * size]
    steps = [Step(cuda, rng, each) for each in counts]
    cuda.device.synchronize()
    for step in steps:
        dispatched, sums = [None] * size, [None] * size
        for rank in rng.permutation(size).tolist():
            with streams[rank]:
                x, choice, shared = step.on_gpu[rank]
                dispatched[rank] = ends[rank].dispatch(x, choice, shared=shared, places=step.places, experts=EXPERTS)
        cuda.device.synchronize()
        found = [[cuda.download(each) for each in arrays] for arrays in dispatched]
        parts = [x.astype(np.float32) * (rank + 1) + added.astype("f4") for rank, (x, _, _, added) in enumerate(found)]
        on_gpu = [cuda.upload(each) for each in parts]
        cuda.device.synchronize()
        for rank in rng.permutation(size).tolist():
            with streams[rank]:
                ids, tokens = dispatched[rank][1], step.counts[rank]
                sums[rank] = ends[rank].combine(on_gpu[rank], ids, tokens=tokens, experts=EXPERTS)
        cuda.device.synchronize()
        for rank, (brought, ids, weights, _) in enumerate(found):
            for owner, count in enumerate(step.counts):
                at = slice(owner * step.places, owner * step.places + count)
                expected = step.x[owner] * step.goes(owner, rank)[:, None]
                assert np.array_equal(brought[at].astype(np.float32), expected)
                assert np.array_equal(ids[at], step.ids[owner])
                assert np.array_equal(weights[at], step.weights[owner])
            factor = sum((each + 1) * step.goes(rank, each) for each in range(size)) + 2
            assert np.array_equal(cuda.download(sums[rank]), step.x[rank] * factor[:, None])


@pytest.mark.parametrize("ends", [2], indirect=True)
def test_a_rank_whose_peer_never_comes_is_ended_by_abort_and_what_does_not_fit_is_refused(cuda, ends):
    first, _ = ends
    step = Step(cuda, np.random.default_rng(1), [8, 8])
    x, choice, shared = step.on_gpu[0]
    first.abort()
    first.dispatch(x, choice, shared=shared, places=8, experts=EXPERTS)
    cuda.device.synchronize()
    assert first.fits(x, choice)
    assert not first.fits(cuda.zeros((8, WIDTH), np.float32), choice)
    assert not first.fits(cuda.zeros((8, WIDTH + 4)), choice)
    with pytest.raises(ArrayMismatchError, match="rows"):
        first.dispatch(x, choice, shared=shared, places=4, experts=EXPERTS)
    with pytest.raises(ArrayMismatchError, match="sums"):
        first.combine(cuda.zeros((16, WIDTH)), choice.ids, tokens=8, experts=EXPERTS)
