import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_kernels import PagedCache

SEEDS = st.integers(0, 2**32 - 1)


def naive_attention(q: np.ndarray, case, layer: int, scale: float) -> np.ndarray:
    """Token by token and head by head over the unpaged keys and values, in float64."""
    num_tokens, num_heads, head_dim = q.shape
    out = np.empty((num_tokens, num_heads, head_dim))
    token = 0
    for context, queries in zip(case.contexts, np.diff(case.batch.query_starts).tolist(), strict=True):
        keys, values = context[layer].astype(np.float64)
        for position in range(keys.shape[1] - queries, keys.shape[1]):
            for head in range(num_heads):
                kv_head = head * keys.shape[0] // num_heads
                scores = [scale * float(q[token, head] @ keys[kv_head, p]) for p in range(position + 1)]
                weights = [math.exp(score - max(scores)) for score in scores]
                mixed = sum(w * values[kv_head, p] for p, w in enumerate(weights))
                out[token, head] = mixed / math.fsum(weights)
            token += 1
    return out.reshape(num_tokens, -1)


@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS,
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    kind=st.integers(0, 4),
    block_kind=st.integers(0, 4),
    rows=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 7])), min_size=1, max_size=6),
)
def test_paged_attention_rows_of_any_length_equal_float64(
    run, prepared, check, head_dims, block_sizes, seed, group, num_kv_heads, kind, block_kind, rows
):
    rng = np.random.default_rng(seed)
    head_dim, block_tokens = head_dims[kind % len(head_dims)], block_sizes[block_kind % len(block_sizes)]
    rows = [(past + queries, queries) for past, queries in rows]
    q, case = prepared(
        rng,
        rows,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
    )
    out = run(q, case, layer=1, scale=head_dim**-0.5)
    assert out.shape == (case.num_tokens, group * num_kv_heads * head_dim)
    check(out, naive_attention(q, case, 1, head_dim**-0.5))


@pytest.mark.parametrize("past", [0, 1, 15, 16, 17, 31])
@pytest.mark.parametrize("queries", [1, 2, 15, 16, 17, 33])
def test_paged_attention_across_block_boundaries(run, prepared, check, head_dim, past, queries):
    rng = np.random.default_rng([past, queries])
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim(8), "block_tokens": 16}
    q, case = prepared(rng, [(past + queries, queries)], **shape)
    out = run(q, case, layer=0, scale=0.3)
    check(out, naive_attention(q, case, 0, 0.3))


def test_paged_attention_large_scores_pick_one_value(run, prepared, check, head_dim, block_tokens):
    rng = np.random.default_rng(5)
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim(4), "block_tokens": block_tokens(4)}
    q, case = prepared(rng, [(20, 3)], **shape)
    out = run(q, case, layer=0, scale=1e4)
    check(out, naive_attention(q, case, 0, 1e4), rtol=1e-3, atol=1e-4)


def vectorised_attention(q: np.ndarray, context: np.ndarray, scale: float) -> np.ndarray:
    """One row in float64 without paging, for shapes that are too large for loops."""
    keys, values = context.astype(np.float64)
    group = q.shape[1] // keys.shape[0]
    scores = np.einsum("qhd,hkd->hqk", q.astype(np.float64), np.repeat(keys, group, axis=0)) * scale
    past = keys.shape[1] - len(q)
    scores[:, np.arange(keys.shape[1])[None] > (past + np.arange(len(q)))[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,hkd->qhd", weights, np.repeat(values, group, axis=0)).reshape(len(q), -1)


@pytest.mark.parametrize(("context", "queries"), [(700, 700), (1500, 333), (4000, 40)])
def test_paged_attention_long_prompt_chunk(run, prepared, check, head_dim, context, queries):
    rng = np.random.default_rng(context)
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": head_dim(16), "block_tokens": 16}
    q, case = prepared(rng, [(context, queries)], **shape, num_layers=1)
    out = run(q, case, layer=0, scale=0.25)
    check(out, vectorised_attention(q, case.contexts[0][0], 0.25))


def test_paged_attention_many_rows_of_mixed_kinds(run, prepared, check, head_dim):
    rng = np.random.default_rng(11)
    rows = [(int(context), 1) for context in rng.integers(1, 400, size=70)]
    rows += [(int(context) + 30, 30) for context in rng.integers(0, 90, size=9)]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim(32), "block_tokens": 16}
    q, case = prepared(rng, rows, **shape, num_layers=1)
    out = run(q, case, layer=0, scale=0.2)
    for row, context in enumerate(case.contexts):
        tokens = slice(*case.batch.query_starts[row : row + 2])
        check(out[tokens], vectorised_attention(q[tokens], context[0], 0.2))


def by_token(batch):
    """The batch with its tokens as rows of their own, in host memory."""
    counts = np.diff(batch.query_starts)
    rows = dataclasses.replace(
        batch,
        query_starts=np.arange(len(batch.positions) + 1, dtype=np.int32),
        context_lens=batch.positions + np.int32(1),
        block_tables=tuple(np.repeat(table, counts, axis=0) for table in batch.block_tables),
        max_query_tokens=1,
        newest_tokens=len(batch.positions),
    )
    return dataclasses.replace(batch, token_rows=rows)


@pytest.mark.parametrize("smallest", [64, 128])
def test_paged_attention_goes_by_the_rows_of_tokens(ops, upload, activation, host, prepared, check, head_dim, smallest):
    """Steps of a few tokens a row, one layer right after the other: each appends what its attention then reads."""
    rng, layers, heads, kv_heads, dim = np.random.default_rng(17), 12, 8, 2, head_dim(smallest)
    rows = [(5, 5), (200, 3), (17, 2), (1030, 8), (64, 1), (33, 4)]
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "block_tokens": 16}
    _, case = prepared(rng, rows, **shape, num_layers=layers)
    cache_of_all, wide = activation(case.kv_cache), (heads + 2 * kv_heads) * dim
    rope = np.stack([np.ones((2000, dim // 2)), np.zeros((2000, dim // 2))]).astype(np.float32)
    qkv = [host(activation(rng.normal(size=(case.num_tokens, wide)).astype(np.float32))) for _ in range(layers)]
    with_rows = by_token(case.batch)
    batch = dataclasses.replace(upload(case.batch), token_rows=upload(with_rows.token_rows))
    given, table, found = [activation(each) for each in qkv], upload(rope), []
    for layer in range(layers):
        cache = PagedCache(data=cache_of_all, layer=layer, is_first_layer=layer == 0)
        q = ops.rope_append(given[layer], rope=table, cache=cache, batch=batch)
        found.append(ops.paged_attention(q, cache, batch=batch, scale=dim**-0.5))
    for layer, out in enumerate(found):
        of_rows, first = [], 0
        for context, queries in zip(case.contexts, np.diff(case.batch.query_starts).tolist(), strict=True):
            new = qkv[layer][first : first + queries].reshape(queries, heads + 2 * kv_heads, dim)
            for place, begin in enumerate((heads, heads + kv_heads)):
                context[layer][place][:, -queries:] = new[:, begin : begin + kv_heads].transpose(1, 0, 2)
            of_rows.append(vectorised_attention(new[:, :heads], context[layer], dim**-0.5))
            first += queries
        check(host(out), np.concatenate(of_rows))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, length=st.integers(2, 60), data=st.data())
def test_paged_attention_chunks_equal_the_whole(
    run, paged_case, prepared, check, head_dim, block_tokens, seed, length, data
):
    rng = np.random.default_rng(seed)
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4)))
    shape = {"num_kv_heads": 2, "head_dim": head_dim(8), "block_tokens": block_tokens(4)}
    q, case = prepared(rng, [(length, length)], num_heads=6, **shape)
    whole = run(q, case, layer=0, scale=0.35)
    for first, end in zip([0, *cuts], [*cuts, length], strict=True):
        chunk = paged_case(rng, [(end, end - first)], **shape)
        chunk.kv_cache, chunk.batch = case.kv_cache, with_row(chunk.batch, case.batch)
        out = run(q[first:end], chunk, layer=0, scale=0.35)
        check(out, whole[first:end], rtol=1e-5, atol=1e-6)


def with_row(batch, other):
    """`batch` over the blocks of `other`."""
    slots = other.cache_slots[0][batch.positions[0] : batch.positions[-1] + 1]
    return dataclasses.replace(batch, block_tables=other.block_tables, cache_slots=(slots,))


def test_paged_attention_shared_blocks_equal_own_blocks(run, prepared, check, head_dim, block_tokens):
    rng = np.random.default_rng(3)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim(8), "block_tokens": block_tokens(8)}
    q, case = prepared(rng, [(24, 1)], **shape)
    alone = run(q, case, layer=0, scale=0.35)
    twice = dataclasses.replace(
        case.batch,
        positions=np.array([23, 15], np.int32),
        query_starts=np.array([0, 1, 2], np.int32),
        context_lens=np.array([24, 16], np.int32),
        block_tables=(np.repeat(case.batch.block_tables[0], 2, axis=0),),
        cache_slots=(np.repeat(case.batch.cache_slots[0], 2),),
    )
    both = dataclasses.replace(case, batch=twice)
    out = run(np.repeat(q, 2, axis=0), both, layer=0, scale=0.35)
    check(out[0], alone[0], rtol=1e-6, atol=1e-6)
    check(out[1], vectorised_attention(q, case.contexts[0][0][:, :, :16], 0.35)[0])


@pytest.mark.parametrize("rows", [[(9, 1), (11, 1), (10, 1)], [(9, 4), (11, 4)], [(9, 9), (11, 2), (5, 1)]])
def test_paged_attention_not_finite_row_stays_alone(run, prepared, head_dim, block_tokens, rows):
    rng = np.random.default_rng(4)
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim(4), "block_tokens": block_tokens(4)}
    q, case = prepared(rng, rows, **shape)
    clean = run(q, case, layer=0, scale=0.5)
    broken = slice(*case.batch.query_starts[1:3])
    q[broken] = np.nan
    first_block = case.batch.block_tables[0][1, 0]
    case.kv_cache[first_block] = np.inf
    out = run(q, case, layer=0, scale=0.5)
    assert not np.isfinite(out[broken]).any()
    rest = np.delete(np.arange(case.num_tokens), broken)
    np.testing.assert_array_equal(out[rest], clean[rest])


@pytest.mark.parametrize("group", [1, 3, 8, 12, 16])
@pytest.mark.parametrize("rows", [[(700, 1)] * 3, [(130, 130), (65, 1), (513, 100)]])
def test_paged_attention_group_of_query_heads(run, prepared, check, head_dims, group, rows):
    rng = np.random.default_rng(group)
    for head_dim in head_dims[-4:]:
        shape = {"num_heads": group * 2, "num_kv_heads": 2, "head_dim": head_dim, "block_tokens": 16}
        q, case = prepared(rng, rows, **shape)
        out = run(q, case, layer=1, scale=head_dim**-0.5)
        for row, context in enumerate(case.contexts):
            tokens = slice(*case.batch.query_starts[row : row + 2])
            check(out[tokens], vectorised_attention(q[tokens], context[1], head_dim**-0.5))


def test_paged_attention_one_long_row_is_divided_and_repeatable(run, prepared, check, head_dim):
    rng = np.random.default_rng(8)
    shape = {"num_heads": 4, "num_kv_heads": 1, "head_dim": head_dim(16), "block_tokens": 16}
    q, case = prepared(rng, [(9001, 1), (1, 1)], **shape, num_layers=1)
    out = run(q, case, layer=0, scale=0.25)
    np.testing.assert_array_equal(run(q, case, layer=0, scale=0.25), out)
    check(out[:1], vectorised_attention(q[:1], case.contexts[0][0], 0.25))
    check(out[1:], vectorised_attention(q[1:], case.contexts[1][0], 0.25))


@pytest.mark.parametrize("rows", [[(3000, 16)], [(2000, 5), (2600, 33), (900, 1), (40, 40)], [(1100, 2)] * 5])
def test_paged_attention_short_pieces_behind_long_prefixes_are_divided_and_repeatable(
    run, prepared, check, head_dim, rows
):
    rng = np.random.default_rng(len(rows))
    for wanted in (16, 100, 200) if head_dim(16) > 16 else (16,):
        shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": head_dim(wanted), "block_tokens": 16}
        q, case = prepared(rng, rows, **shape, num_layers=1)
        out = run(q, case, layer=0, scale=0.25)
        np.testing.assert_array_equal(run(q, case, layer=0, scale=0.25), out)
        for row, context in enumerate(case.contexts):
            tokens = slice(*case.batch.query_starts[row : row + 2])
            check(out[tokens], vectorised_attention(q[tokens], context[0], 0.25))
