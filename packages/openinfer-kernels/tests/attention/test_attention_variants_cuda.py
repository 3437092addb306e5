"""Windows, soft caps and sinks in captured steps: replayed on rows of other lengths, padding left alone.

What the operator computes is held against float64 by `test_attention_variants.py`; here it is held against itself,
called without padding on the rows alone.
"""

import dataclasses

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, PagedCache
from openinfer_kernels.testing.paged import make_paged_case

pytestmark = pytest.mark.gpu

ROWS, LONGEST = 8, 3000
DECODE_STEPS = ([3000] * 8, [1, 2, 3, 2999, 16, 17, 1000, 64], [1] * 8, [640] * 8, [0, 0, 100, 0, 5, 0, 0, 900])
"""Contexts of rows with one token; 0: padding."""
PIECES = ([(3000, 16)], [(2999, 13), (20, 3)], [(2000, 2), (16, 12), (1500, 1), (1, 1)], [(5, 5), (1400, 11)])
"""Context and query tokens of rows that have 16 tokens together."""
ASKED = [{"window": 200}, {"window": 1000, "soft_cap": 2.0}, {"soft_cap": 2.0, "sinks": True}, {"sinks": True}]


@pytest.fixture
def cuda(ops):
    if ops.name != "cuda":
        pytest.skip("of the CUDA module only")
    return ops


class Attend:
    """Attention over one cache in a captured launch, whose batch can be changed, and without a graph."""

    def __init__(self, cuda, *, head_dim, num_tokens, asked):
        rng = np.random.default_rng([head_dim, num_tokens])
        case = make_paged_case(rng, [(LONGEST, 1)] * ROWS, num_kv_heads=2, head_dim=head_dim, block_tokens=16)
        self.cuda, self.asked = cuda, dict(asked)
        if self.asked.pop("sinks", False):
            self.asked["sinks"] = cuda.upload((2 * rng.normal(size=8)).astype(np.float32))
        blocks = case.kv_cache.reshape(len(case.kv_cache), -1)
        self.cache = PagedCache(data=cuda.upload_weight(blocks).reshape(case.kv_cache.shape), layer=1)
        q = rng.normal(size=(num_tokens, 8 * head_dim)).astype(np.float32)
        self.q = cuda.upload_weight(q).reshape(num_tokens, 8, head_dim)
        (self.tables,) = case.batch.block_tables
        self.host_batch = case.batch

    def batch(self, rows, *, max_query_tokens):
        """Rows of `(context, query tokens)`, each over the blocks of the row of the cache with its number."""
        starts = np.cumsum([0, *(queries for _, queries in rows)]).astype(np.int32)
        return dataclasses.replace(
            self.host_batch,
            query_starts=self.cuda.upload(starts),
            context_lens=self.cuda.upload(np.array([context for context, _ in rows], np.int32)),
            block_tables=(self.cuda.upload(np.ascontiguousarray(self.tables[: len(rows)])),),
            max_query_tokens=max_query_tokens,
        )

    def run(self, q, batch):
        return self.cuda.paged_attention(q, self.cache, batch=batch, scale=0.1, **self.asked)

    def captured(self, batch):
        """A graph and its stream, and what it writes."""
        from openinfer_kernels.cuda.common.libraries import cupy

        self.run(self.q, batch)
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            out = self.run(self.q, batch)
            graph = stream.end_capture()
        return graph, stream, out

    def host(self, array):
        return self.cuda.download(array).astype(np.float32)


@pytest.mark.parametrize("asked", ASKED, ids="-".join)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_captured_decode_step_serves_other_contexts(cuda, head_dim, asked):
    attend = Attend(cuda, head_dim=head_dim, num_tokens=ROWS, asked=asked)
    batch = attend.batch([(LONGEST, 1)] * ROWS, max_query_tokens=1)
    graph, stream, out = attend.captured(batch)
    for contexts in DECODE_STEPS:
        batch.context_lens.set(np.array(contexts, np.int32))
        attend.cuda.device.synchronize()  # the stream does not wait for the copies
        for _ in range(2):  # counters are left as they were found
            graph.launch(stream)
        stream.synchronize()
        got = attend.host(out)
        for row, context in enumerate(contexts):
            if context == 0:
                continue
            one = attend.batch([(context, 1)], max_query_tokens=1)
            one.block_tables[0].set(np.ascontiguousarray(attend.tables[row : row + 1]))
            require_close(got[row : row + 1], attend.host(attend.run(attend.q[row : row + 1], one)))


@pytest.mark.parametrize("asked", ASKED, ids="-".join)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_captured_pieces_serve_other_divisions_into_rows(cuda, head_dim, asked):
    attend = Attend(cuda, head_dim=head_dim, num_tokens=16, asked=asked)
    batch = attend.batch([(LONGEST, 4)] * 4, max_query_tokens=16)
    graph, stream, out = attend.captured(batch)
    for rows in PIECES:
        alone = attend.batch(rows, max_query_tokens=16)
        padded = [*rows, *[(0, 0)] * (4 - len(rows))]
        batch.query_starts.set(np.cumsum([0, *(queries for _, queries in padded)]).astype(np.int32))
        batch.context_lens.set(np.array([context for context, _ in padded], np.int32))
        attend.cuda.device.synchronize()
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        require_close(attend.host(out), attend.host(attend.run(attend.q, alone)))


class WithoutHopper:
    """A device of which attention takes the kernels for any GPU."""

    def __init__(self, device):
        self.num_multiprocessors, self.kernel = device.num_multiprocessors, device.kernel

    def has(self, stem):
        return False


@pytest.mark.parametrize("asked", ASKED, ids="-".join)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_for_any_gpu_agree_with_this_ones(cuda, head_dim, asked):
    from openinfer_kernels.cuda.attention.paged import Attention

    for rows in ([(3000, 1), (17, 1), (640, 1), (1, 1)], [(3000, 16)], [(500, 200), (33, 1), (129, 129)]):
        num_tokens = sum(queries for _, queries in rows)
        attend = Attend(cuda, head_dim=head_dim, num_tokens=num_tokens, asked=asked)
        batch = attend.batch(rows, max_query_tokens=max(queries for _, queries in rows))
        expected = attend.host(attend.run(attend.q, batch))
        other = Attention(WithoutHopper(cuda.device))
        attended = other.paged_attention(attend.q, attend.cache, batch=batch, scale=0.1, **attend.asked)
        require_close(attend.host(attended), expected)


def require_close(got, expected):
    """Keys may be divided otherwise: off by a rounding or two to BF16."""
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - expected) < 6e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"window": 0}, "a window of 0 keys"),
        ({"soft_cap": 0.0}, "a soft cap of 0.0"),
        ({"soft_cap": float("inf")}, "a soft cap of inf"),
    ],
)
def test_what_cannot_be_asked_is_refused(cuda, asked, message):
    attend = Attend(cuda, head_dim=64, num_tokens=1, asked=asked)
    with pytest.raises(ArrayMismatchError, match=message):
        attend.run(attend.q, attend.batch([(9, 1)], max_query_tokens=1))


def test_sinks_of_other_heads_are_refused(cuda):
    attend = Attend(cuda, head_dim=64, num_tokens=1, asked={})
    batch = attend.batch([(9, 1)], max_query_tokens=1)
    for sinks, message in ((np.zeros(7, np.float32), "7 sinks for 8"), (np.zeros(8), "sinks must be")):
        attend.asked["sinks"] = cuda.upload(sinks)
        with pytest.raises(ArrayMismatchError, match=message):
            attend.run(attend.q, batch)
