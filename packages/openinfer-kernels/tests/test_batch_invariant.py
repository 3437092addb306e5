"""Operators whose rows have the same bits in any batch, chunk and place; and that they compute what the others do."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from openinfer_kernels import AttentionBatch, Ops, PagedCache
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kernels.testing.paged import make_batch

BATCH = make_batch(1)
"""Products do not look at it."""


def cuda_ops() -> Ops:
    from openinfer_kernels.cuda import BatchInvariantCudaOps

    return BatchInvariantCudaOps()


@pytest.fixture(
    scope="module",
    params=[pytest.param(BatchInvariantCpuOps, id="cpu"), pytest.param(cuda_ops, id="cuda", marks=pytest.mark.gpu)],
)
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.param()


@pytest.fixture(scope="module")
def activation(ops: Ops) -> Callable[[np.ndarray], Any]:
    return ops.upload_weight


@pytest.fixture(scope="module")
def host(ops: Ops) -> Callable[[Any], np.ndarray]:
    return lambda array: ops.download(array).astype(np.float32)


@pytest.fixture(scope="module")
def upload(ops: Ops) -> Callable[[AttentionBatch], AttentionBatch]:
    """Copies the arrays of a batch to the device."""

    def uploaded(batch: AttentionBatch) -> AttentionBatch:
        values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        arrays = {name: ops.upload(value) for name, value in values.items() if isinstance(value, np.ndarray)}
        lists = {name: tuple(map(ops.upload, value)) for name, value in values.items() if isinstance(value, tuple)}
        return dataclasses.replace(batch, **arrays, **lists)

    return uploaded


@pytest.fixture(scope="module")
def atol(ops: Ops) -> float:
    """How far results may be from the CPU's in float32: BF16 rounds them."""
    return 2e-2 if ops.name == "cuda" else 1e-5


SHAPES = [(64, 128), (200, 96), (512, 1024)]
"""Rows and columns of a weight."""
MOST_TOKENS = 150


@pytest.mark.parametrize(
    ("operator", "rows", "columns"),
    [
        *((each, *shape) for each in ("linear", "linear_geglu", "linear_swiglu", "logits") for shape in SHAPES),
        # Half of a vocabulary of 257: no algorithm for more than 64 tokens agrees with that for fewer on an H200.
        ("logits", 129, 96),
        ("linear", 129, 96),
    ],
)
def test_product_of_a_token_has_the_same_bits_in_any_batch_and_place(ops, activation, host, operator, rows, columns):
    rng = np.random.default_rng(rows)
    weight = activation(rng.normal(size=(rows, columns)).astype(np.float32))
    x = rng.normal(size=(MOST_TOKENS, columns)).astype(np.float32)
    multiply, batch = getattr(ops, operator), () if operator == "logits" else (BATCH,)
    alone = np.concatenate([host(multiply(activation(x[i : i + 1]), weight, *batch)) for i in range(MOST_TOKENS)])
    for size in (2, 7, 8, 9, 33, 64, 65, MOST_TOKENS):
        for first in (0, 3, MOST_TOKENS - size):
            some = slice(first, min(first + size, MOST_TOKENS))
            np.testing.assert_array_equal(host(multiply(activation(x[some]), weight, *batch)), alone[some])


def test_products_equal_those_of_the_other_operators(ops, activation, host, atol):
    rng = np.random.default_rng(1)
    weight, x = (rng.normal(size=shape).astype(np.float32) / 8 for shape in ((64, 128), (21, 128)))
    bias = rng.normal(size=64).astype(np.float32)
    *arrays, bias_there = (activation(array) for array in (x, weight, bias))
    seen, cpu = [host(array) for array in arrays], CpuOps()
    biased = host(ops.linear(*arrays, BATCH, bias_there))
    np.testing.assert_allclose(biased, cpu.linear(*seen, BATCH, host(bias_there)), rtol=2**-7, atol=atol)
    np.testing.assert_allclose(host(ops.logits(*arrays)), cpu.linear(*seen, BATCH), rtol=1e-4, atol=1e-4)
    gated = host(ops.linear_swiglu(*arrays, BATCH))
    np.testing.assert_allclose(gated, cpu.linear_swiglu(*seen, BATCH), rtol=2**-6, atol=atol)


def test_queries_and_keys_of_a_token_have_the_same_bits_in_any_batch(ops, activation, upload, host):
    rng = np.random.default_rng(4)
    num_tokens, head_dim = 90, 64
    qkv = rng.normal(size=(num_tokens, 10 * head_dim)).astype(np.float32)
    norms = [activation(rng.normal(size=head_dim).astype(np.float32)) for _ in range(2)]
    rope = ops.upload(rng.normal(size=(2, num_tokens, head_dim // 2)).astype(np.float32))

    def run(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cache = activation(np.zeros((6, 1, 2, 2, 16, head_dim), np.float32))
        count = len(tokens)
        batch = AttentionBatch(
            positions=tokens.astype(np.int32),
            query_starts=np.array([0, count], np.int32),
            context_lens=np.array([count], np.int32),
            block_tables=(np.zeros((1, 6), np.int32),),
            cache_slots=(tokens.astype(np.int64),),
            max_query_tokens=count,
            max_context_tokens=num_tokens,
        )
        q = ops.qk_norm_rope_append(
            activation(qkv[tokens]),
            q_norm=norms[0],
            k_norm=norms[1],
            eps=1e-6,
            rope=rope,
            cache=PagedCache(data=cache, layer=0),
            batch=upload(batch),
        )
        slots = host(cache)[:, 0].transpose(0, 3, 1, 2, 4).reshape(96, -1)
        return host(q), slots[tokens]

    whole = run(np.arange(num_tokens))
    for size in (1, 5, 64):
        some = rng.permutation(num_tokens)[:size]
        for got, expected in zip(run(some), whole, strict=True):
            np.testing.assert_array_equal(got, expected[some])


def test_norms_of_a_token_have_the_same_bits_in_any_batch(ops, activation, host):
    rng = np.random.default_rng(5)
    x, residual = (rng.normal(size=(70, 320)).astype(np.float32) for _ in range(2))
    weight = activation(rng.normal(size=320).astype(np.float32))

    def run(tokens: slice) -> np.ndarray:
        return host(ops.add_rms_norm(activation(x[tokens]), ops.upload(residual[tokens]), weight, eps=1e-6))

    whole = run(slice(None))
    for tokens in (slice(0, 1), slice(3, 12), slice(69, 70)):
        np.testing.assert_array_equal(run(tokens), whole[tokens])


ROWS = [(1, 1), (200, 1), (64, 64), (129, 65), (300, 17), (65, 1), (128, 9), (511, 100)]
"""Context and query tokens."""
ASKED = [
    {},
    {"window": 50},
    {"window": 64, "soft_cap": 2.0},
    {"sinks": np.linspace(-2, 3, 6).astype(np.float32)},
    {"window": 3, "soft_cap": 1.0, "sinks": np.linspace(-2, 3, 6).astype(np.float32)},
]
"""What `paged_attention` is asked for beside its scale."""


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(asked) or "plain")
def test_attention_of_a_token_has_the_same_bits_in_any_batch_and_chunk(
    ops, paged_case, activation, upload, host, asked
):
    shape = {"num_kv_heads": 2, "head_dim": 64, "block_tokens": 16}
    rng = np.random.default_rng(2)
    case = paged_case(rng, ROWS, **shape)
    q = host(activation(rng.normal(size=(case.num_tokens, 6, 64)).astype(np.float32)))
    cache = PagedCache(data=activation(case.kv_cache), layer=1)
    asked = {name: ops.upload(each) if name == "sinks" else each for name, each in asked.items()}

    def attend(rows: list[tuple[int, int, int]]) -> np.ndarray:
        """Row of the case, first and last of its query tokens."""
        starts = case.batch.query_starts
        tokens = np.concatenate([np.arange(starts[r] + a, starts[r] + b) for r, a, b in rows])
        counts = [b - a for _, a, b in rows]
        batch = type(case.batch)(
            positions=case.batch.positions[tokens],
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lens=np.array([ROWS[r][0] - ROWS[r][1] + b for r, _, b in rows], np.int32),
            block_tables=(np.ascontiguousarray(case.batch.block_tables[0][[r for r, _, _ in rows]]),),
            cache_slots=(case.batch.cache_slots[0][tokens],),
            max_query_tokens=max(counts),
            max_context_tokens=max(context for context, _ in ROWS),
        )
        out = ops.paged_attention(activation(q[tokens]), cache, batch=upload(batch), scale=0.2, **asked)
        return host(out)

    whole = attend([(r, 0, queries) for r, (_, queries) in enumerate(ROWS)])
    starts = case.batch.query_starts
    for row, (_, queries) in enumerate(ROWS):
        mine = whole[starts[row] : starts[row + 1]]
        np.testing.assert_array_equal(attend([(row, 0, queries)]), mine)
        for cut in {1, queries // 3, queries - 1} - {0, queries}:
            chunks = [attend([(row, 0, cut)]), attend([(1, 0, 1), (row, cut, queries)])[1:]]
            np.testing.assert_array_equal(np.concatenate(chunks), mine)
        np.testing.assert_array_equal(attend([(row, queries - 1, queries), (2, 0, 64)])[:1], mine[-1:])


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(asked) or "plain")
def test_attention_equals_that_of_the_other_operators(ops, paged_case, activation, upload, host, atol, asked):
    shape = {"num_kv_heads": 2, "head_dim": 64, "block_tokens": 16}
    rng = np.random.default_rng(3)
    case = paged_case(rng, ROWS, **shape)
    q = host(activation(rng.normal(size=(case.num_tokens, 6, 64)).astype(np.float32)))
    data = host(activation(case.kv_cache))
    expected = CpuOps().paged_attention(q, PagedCache(data=data, layer=1), batch=case.batch, scale=0.2, **asked)
    asked = {name: ops.upload(each) if name == "sinks" else each for name, each in asked.items()}
    cache = PagedCache(data=activation(data), layer=1)
    out = host(ops.paged_attention(activation(q), cache, batch=upload(case.batch), scale=0.2, **asked))
    np.testing.assert_allclose(out, expected, rtol=2**-6, atol=atol)
