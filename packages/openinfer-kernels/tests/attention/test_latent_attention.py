"""Attention over latents, against every head's keys and values computed token by token in float64."""

import dataclasses

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, PagedCache, RopeParameters, rope_table
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kernels.latent_forms import LatentShape

PUBLISHED = LatentShape(num_heads=16, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512)
"""The sizes of every published model, but for the heads."""
SHAPES = {
    "cpu": [
        LatentShape(num_heads=3, nope_dim=6, rope_dim=4, value_dim=5, latent_dim=12),
        LatentShape(num_heads=1, nope_dim=2, rope_dim=2, value_dim=3, latent_dim=5),
        LatentShape(num_heads=2, nope_dim=8, rope_dim=2, value_dim=8, latent_dim=4),
    ],
    "cuda": [dataclasses.replace(PUBLISHED, num_heads=heads) for heads in (16, 8, 3, 20)],
}
ROWS = [
    [(1, 1)],
    [(40, 40)],
    [(37, 1), (64, 1), (65, 1), (16, 16), (50, 17), (200, 3)],
    [(1500, 1), (3, 3), (700, 1)],
    [(400, 300), (90, 1), (260, 260), (130, 7)],
]


@dataclasses.dataclass(kw_only=True)
class LatentCase:
    shape: LatentShape
    q: np.ndarray
    kv_b_proj: np.ndarray
    paged: object

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5


@pytest.fixture(scope="session")
def shapes(ops):
    return SHAPES[ops.name]


@pytest.fixture(scope="session")
def make_case(ops, paged_case, rounded):
    """A case whose values are all as the compute dtype holds them."""

    def build(rng, rows, shape):
        entry = shape.latent_dim + shape.rope_dim
        block_tokens = 16 if ops.name == "cuda" else 4
        paged = paged_case(rng, rows, num_kv_heads=1, head_dim=entry, block_tokens=block_tokens)
        paged.kv_cache = rounded(np.ascontiguousarray(paged.kv_cache[:, :, :1]))
        paged.contexts = [rounded(context[:, 0, 0]) for context in paged.contexts]  # [layers, context, r + dr]
        rows_of_weight = shape.num_heads * (shape.nope_dim + shape.value_dim)
        return LatentCase(
            shape=shape,
            q=rounded(rng.normal(size=(paged.num_tokens, shape.num_heads, shape.head_dim)).astype(np.float32)),
            kv_b_proj=rounded(
                (rng.normal(size=(rows_of_weight, shape.latent_dim)) / shape.latent_dim**0.5).astype(np.float32)
            ),
            paged=paged,
        )

    return build


@pytest.fixture(scope="session")
def run(ops, upload, activation, host):
    def attend(case, *, layer, q=None, kv_cache=None, chunk_context_tokens=None, first_key=0):
        batch = dataclasses.replace(upload(case.paged.batch), chunk_context_tokens=chunk_context_tokens)
        out = ops.latent_attention(
            activation(case.q if q is None else q),
            PagedCache(data=activation(case.paged.kv_cache if kv_cache is None else kv_cache), layer=layer),
            kv_b_proj=activation(case.kv_b_proj),
            batch=batch,
            scale=case.scale,
            first_key=first_key,
        )
        return host(out)

    return attend


@pytest.fixture(scope="session")
def check(ops):
    """BF16 rounds what the absorbed form multiplies, queries and mixed latents, and the expanded form's keys."""

    def compare(out, expected):
        if ops.name == "cpu":
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
            return
        np.testing.assert_allclose(out, expected, rtol=2**-5, atol=3e-2)
        assert np.linalg.norm(out - expected) < 1e-2 * np.linalg.norm(expected)

    return compare


@np.errstate(invalid="ignore")
def naive_attention(case: LatentCase, layer: int, *, first_key: int = 0) -> np.ndarray:
    """The definition: every head's keys and values of each row, in float64; NaN for tokens that see no key."""
    shape, outs = case.shape, []
    by_head = case.kv_b_proj.astype(np.float64).reshape(shape.num_heads, -1, shape.latent_dim)
    starts = case.paged.batch.query_starts.tolist()
    for row, context in enumerate(case.paged.contexts):
        entries = context[layer].astype(np.float64)
        q = case.q[starts[row] : starts[row + 1]].astype(np.float64)
        latents, shared = np.split(entries, [shape.latent_dim], axis=1)
        both = np.einsum("cr,hnr->hcn", latents, by_head)
        scores = np.einsum("shn,hcn->hsc", q[..., : shape.nope_dim], both[..., : shape.nope_dim])
        scores = (scores + np.einsum("shn,cn->hsc", q[..., shape.nope_dim :], shared)) * case.scale
        last_seen = len(entries) - len(q) + np.arange(len(q))
        scores[:, np.arange(len(entries)) > last_seen[:, None]] = -np.inf
        scores[..., :first_key] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        outs.append(np.einsum("hsc,hcv->shv", weights, both[..., shape.nope_dim :]).reshape(len(q), -1))
    return np.concatenate(outs)


@pytest.mark.parametrize("rows", ROWS)
def test_latent_attention_of_rows_of_any_length_equals_float64(run, make_case, check, shapes, rows):
    for index, shape in enumerate(shapes):
        case = make_case(np.random.default_rng(index), rows, shape)
        out = run(case, layer=1)
        assert out.shape == (case.paged.num_tokens, shape.num_heads * shape.value_dim)
        check(out, naive_attention(case, 1))


@pytest.mark.parametrize("operators", [CpuOps, BatchInvariantCpuOps])
@pytest.mark.parametrize("first_key", [1, 3])
def test_batch_invariant_latent_attention_begins_at_the_first_key(make_case, ops, operators, first_key):
    """What lies before it may be anything."""
    if ops.name != "cpu":
        pytest.skip("these classes are the CPU's")
    for index, shape in enumerate(SHAPES["cpu"]):
        case = make_case(np.random.default_rng(index), [(1, 1), (40, 40), (37, 1), (9, 5), (300, 250)], shape)
        expected = naive_attention(case, 1, first_key=first_key)
        blocks = case.paged.batch.block_tables[0][:, 0]
        case.paged.kv_cache[blocks, :, :, :, :first_key] = np.nan
        out = operators().latent_attention(
            case.q,
            case.paged.cache(1),
            kv_b_proj=case.kv_b_proj,
            batch=case.paged.batch,
            scale=case.scale,
            first_key=first_key,
        )
        sees = case.paged.batch.positions >= first_key
        np.testing.assert_allclose(out[sees], expected[sees], rtol=1e-4, atol=1e-5)
        assert not np.allclose(out[sees], naive_attention(case, 1)[sees], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first_key", [1, 3, 40])
def test_latent_attention_begins_at_the_first_key(run, make_case, check, shapes, first_key):
    """What lies before it may be anything, and so may the results of tokens that see none."""
    for index, shape in enumerate(shapes):
        case = make_case(
            np.random.default_rng(index), [(1, 1), (40, 40), (37, 1), (9, 5), (300, 250), (1500, 1)], shape
        )
        expected = naive_attention(case, 1, first_key=first_key)
        kv_cache, batch = case.paged.kv_cache.copy(), case.paged.batch
        for table, context in zip(batch.block_tables[0], batch.context_lens.tolist(), strict=True):
            blocks, offsets = np.divmod(np.arange(min(first_key, context)), kv_cache.shape[4])
            kv_cache[table[blocks], :, :, :, offsets] = np.nan
        out = run(case, layer=1, kv_cache=kv_cache, first_key=first_key)
        sees = batch.positions >= first_key
        check(out[sees], expected[sees])
        with pytest.raises(AssertionError):
            check(out[sees], naive_attention(case, 1)[sees])


def test_latent_attention_told_of_the_chunks_contexts_gives_the_same(run, make_case, check, shapes):
    """A step whose rows the host knows may expand its chunks; more tokens than they are, none of them real."""
    for rows in (ROWS[4], [(900, 600), (2, 1), (513, 513)]):
        case = make_case(np.random.default_rng(7), rows, shapes[0])
        known = sum(context for context, queries in rows if queries > 1)
        for told in (known, known + 77):
            check(run(case, layer=1, chunk_context_tokens=told), naive_attention(case, 1))


def test_latent_attention_chunks_equal_the_whole(run, make_case, check, shapes):
    rng = np.random.default_rng(1)
    whole = make_case(rng, [(300, 300)], shapes[0])
    expected = run(whole, layer=0)
    for first, end in ((0, 1), (1, 30), (30, 299), (299, 300)):
        chunk = make_case(rng, [(end, end - first)], shapes[0])
        batch = dataclasses.replace(chunk.paged.batch, block_tables=whole.paged.batch.block_tables)
        paged = dataclasses.replace(whole.paged, batch=batch)
        part = dataclasses.replace(whole, q=whole.q[first:end], paged=paged)
        check(run(part, layer=0), expected[first:end])


@pytest.mark.parametrize("rows", [[(9, 1), (11, 1), (10, 1)], [(9, 4), (11, 4)], [(9, 9), (300, 280), (5, 1)]])
def test_latent_attention_not_finite_row_stays_alone(run, make_case, shapes, rows):
    case = make_case(np.random.default_rng(4), rows, shapes[0])
    clean = run(case, layer=0)
    broken = slice(*case.paged.batch.query_starts[1:3])
    q, kv_cache = case.q.copy(), case.paged.kv_cache.copy()
    q[broken] = np.nan
    kv_cache[case.paged.batch.block_tables[0][1, 0]] = np.inf
    out = run(case, layer=0, q=q, kv_cache=kv_cache)
    assert not np.isfinite(out[broken]).any()
    rest = np.delete(np.arange(case.paged.num_tokens), broken)
    np.testing.assert_array_equal(out[rest], clean[rest])


def test_latent_attention_is_repeatable(run, make_case, shapes):
    case = make_case(np.random.default_rng(2), [(3000, 1), (1, 1), (100, 60)], shapes[0])
    np.testing.assert_array_equal(run(case, layer=0), run(case, layer=0))


def test_latent_attention_large_scores_pick_few_values(ops, run, make_case, check, shapes):
    """BF16 rounds queries over latents, which moves a score of 100 by as much as 0.2."""
    case = make_case(np.random.default_rng(3), [(70, 3), (40, 1)], shapes[0])
    case.q *= 64.0 if ops.name == "cpu" else 4.0
    check(run(case, layer=0), naive_attention(case, 0))


def naive_norm_rope(q, latent, norm, eps, angles):
    """In complex numbers, as the reference does it: `(x_2i + i x_2i+1) e^(i angle)`."""

    def rotated(x):
        pairs = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(
            1j * angles.reshape(-1, *[1] * (x.ndim - 2), angles.shape[1])
        )
        return np.stack((pairs.real, pairs.imag), axis=-1).reshape(x.shape)

    size, width = len(norm), 2 * angles.shape[1]
    normed = latent[:, :size] / np.sqrt((latent[:, :size] ** 2).mean(axis=1, keepdims=True) + eps) * norm
    entries = np.concatenate((normed, rotated(latent[:, size:])), axis=1)
    return np.concatenate((q[..., :-width], rotated(q[..., -width:])), axis=-1), entries


def test_norm_rope_and_append_equal_float64_also_for_columns_of_one_array(
    ops, make_case, upload, activation, host, rounded, rounded_once, shapes, close
):
    rng = np.random.default_rng(5)
    for shape in shapes:
        case = make_case(rng, [(20, 20), (33, 1), (17, 5)], shape)
        batch, tokens = case.paged.batch, case.paged.num_tokens
        slots = batch.cache_slots[0].copy()
        slots[[3, tokens - 1]] = -1
        width, entry = shape.num_heads * shape.head_dim, shape.latent_dim + shape.rope_dim
        both = rounded(rng.normal(size=(tokens, width + entry)).astype(np.float32))
        norm = rounded(rng.normal(size=shape.latent_dim).astype(np.float32))
        parameters = RopeParameters(theta=100.0)
        table = rope_table(parameters, head_dim=shape.rope_dim, positions=64)
        on_device, cache = activation(both), activation(case.paged.kv_cache)
        out = ops.latent_norm_rope_append(
            on_device[:, :width],
            on_device[:, width:],
            head_dim=shape.head_dim,
            norm=activation(norm),
            eps=1e-3,
            rope=ops.upload(table),
            cache=PagedCache(data=cache, layer=1),
            batch=upload(dataclasses.replace(batch, cache_slots=(slots,))),
        )
        angles = batch.positions[:, None] * 100.0 ** (-2.0 * np.arange(shape.rope_dim // 2) / shape.rope_dim)
        q, entries = naive_norm_rope(
            both[:, :width].reshape(tokens, -1, shape.head_dim).astype(np.float64),
            both[:, width:].astype(np.float64),
            norm,
            1e-3,
            angles,
        )
        close(host(out), q, rtol=1e-4, atol=2e-2 if ops.name == "cuda" else 1e-5)
        np.testing.assert_array_equal(host(on_device), both)
        after, expected = host(cache), case.paged.kv_cache.copy()
        block_tokens = expected.shape[4]
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // block_tokens, 1, 0, 0, slot % block_tokens] = entries[token]
        close(after, expected, rtol=1e-4, atol=2e-2 if ops.name == "cuda" else 1e-5)
        rounded_once(after[..., : shape.latent_dim], expected[..., : shape.latent_dim])
        np.testing.assert_array_equal(after[:, 0], case.paged.kv_cache[:, 0])


def test_batch_invariant_operators_give_a_token_the_same_bits_however_it_comes(make_case, ops):
    if ops.name != "cpu":
        pytest.skip("this class is the CPU's")
    rng, own, shape = np.random.default_rng(6), BatchInvariantCpuOps(), SHAPES["cpu"][0]
    whole = make_case(rng, [(90, 90)], shape)

    def attend(case, q):
        return own.latent_attention(
            q, case.paged.cache(0), kv_b_proj=case.kv_b_proj, batch=case.paged.batch, scale=case.scale
        )

    expected = attend(whole, whole.q)
    np.testing.assert_allclose(expected, naive_attention(whole, 0), rtol=1e-4, atol=1e-5)
    for first, end in ((0, 7), (7, 8), (8, 90)):
        part = make_case(rng, [(end, end - first)], shape)
        batch = dataclasses.replace(part.paged.batch, block_tables=whole.paged.batch.block_tables)
        part = dataclasses.replace(whole, paged=dataclasses.replace(whole.paged, batch=batch))
        np.testing.assert_array_equal(attend(part, whole.q[first:end]), expected[first:end])


def test_forms_cost_alike_at_the_published_sizes_from_171_tokens_on():
    assert 170 < PUBLISHED.least_expanded_tokens < 171
    tiny = LatentShape(num_heads=2, nope_dim=8, rope_dim=2, value_dim=8, latent_dim=4)
    assert tiny.least_expanded_tokens == float("inf")


@pytest.mark.parametrize(
    "shapes_given",
    [
        ((3, 16, 192), (9, 2, 2, 1, 16, 576), (4096, 512)),
        ((3, 16, 192), (9, 2, 1, 1, 16, 512), (4096, 512)),
        ((3, 15, 192), (9, 2, 1, 1, 16, 576), (4097, 512)),
        ((3, 16, 64), (9, 2, 1, 1, 16, 576), (4096, 512)),
    ],
)
def test_shapes_that_do_not_agree_are_refused(shapes_given):
    with pytest.raises(ArrayMismatchError, match=r"are not \[T, H, dn \+ dr\]"):
        LatentShape.of(*shapes_given)
