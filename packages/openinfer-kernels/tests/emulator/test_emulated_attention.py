"""Attention with windows, soft caps and sinks as the CUDA kernels compute it, emulated, against the CPU's operator."""

import dataclasses
import random

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, PagedCache
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.testing.paged import make_paged_case

NO_BLOCK = -(1 << 20)


class Case:
    """Rows of `(context, query tokens)`; what lies before their windows is NaN, and block ids there are no block's."""

    def __init__(
        self, on_device, rows, *, heads, kv_heads, head_dim, block_tokens=16, seed=0, table=1, sinks=False, **asked
    ):
        rng = np.random.default_rng(seed)
        shape = {"num_kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
        case = make_paged_case(rng, rows, **shape, table=table)
        self.asked = {**asked, "scale": 1.5 * head_dim**-0.5}
        if sinks:
            self.asked["sinks"] = (4 * rng.normal(size=heads)).astype(np.float32)
        self.q = on_device(rng.normal(size=(case.num_tokens, heads, head_dim)))
        cache, tables = on_device(case.kv_cache), [each.copy() for each in case.batch.block_tables]
        self.expected = CpuOps().paged_attention(
            self.q.astype(np.float32),
            PagedCache(data=cache.astype(np.float32), layer=1, table=table),
            batch=case.batch,
            **self.asked,
        )
        for row, (context, queries) in enumerate(rows):
            first_seen = max(0, context - queries + 1 - (asked.get("window") or context))
            cache[tables[table][row, first_seen // block_tokens], :, :, :, : first_seen % block_tokens] = np.nan
            tables[table][row, : first_seen // block_tokens] = NO_BLOCK
        self.cache = PagedCache(data=cache, layer=1, table=table)
        self.batch = dataclasses.replace(case.batch, block_tables=tuple(tables))

    def check(self, attention):
        out = attention.paged_attention(self.q, self.cache, batch=self.batch, **self.asked).astype(np.float32)
        np.testing.assert_allclose(out, self.expected, rtol=2**-6, atol=2e-2)
        assert np.linalg.norm(out - self.expected) < 6e-3 * np.linalg.norm(self.expected)


@pytest.fixture(params=[False, True], ids=["any GPU", "Hopper"])
def hopper(request):
    return request.param


ASKED = [
    {"window": 30},
    {"window": 128, "soft_cap": 2.0},
    {"soft_cap": 50.0, "sinks": True},
    {"window": 17, "soft_cap": 1.0, "sinks": True},
]


@pytest.mark.parametrize("asked", ASKED, ids="-".join)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_steps_of_decode_rows_chunks_and_prompts(make_attention, on_device, hopper, head_dim, asked):
    rows = [(170, 1), (17, 1), (200, 75), (33, 33), (1, 1), (140, 2)]
    case = Case(on_device, rows, heads=6, kv_heads=2, head_dim=head_dim, **asked)
    case.check(make_attention(hopper=hopper))
    case.check(make_attention(hopper=hopper, batch_invariant=True))


@pytest.mark.parametrize("asked", [{"sinks": True}, {"window": 700}, {"window": 1101, "sinks": True}], ids="-".join)
@pytest.mark.parametrize(("rows", "head_dim"), [([(1500, 1)], 256), ([(1200, 16), (700, 2)], 64)])
def test_contexts_that_many_blocks_share_and_counters_that_are_left_at_zero(
    make_attention, on_device, hopper, rows, head_dim, asked
):
    attention = make_attention(hopper=hopper, multiprocessors=40)
    case = Case(on_device, rows, heads=4, kv_heads=1, head_dim=head_dim, **asked)
    for _ in range(2):
        case.check(attention)


@pytest.mark.parametrize("seed", range(6))
def test_random_rows_with_anything_asked(make_attention, on_device, hopper, seed):
    rng = random.Random(seed)
    for batch_invariant in (False, True):
        attention = make_attention(
            hopper=hopper, multiprocessors=rng.choice((1, 4, 13)), batch_invariant=batch_invariant
        )
        for _ in range(3):
            kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4, 8, 9))
            rows = []
            for _ in range(rng.randint(1, 4)):
                queries, past = rng.choice((1, 1, 2, 17, 40)), rng.choice((0, 1, 15, 16, 63, 64, 128, 200))
                rows.append((past + queries, queries))
            Case(
                on_device,
                rows,
                heads=group * kv_heads,
                kv_heads=kv_heads,
                head_dim=rng.choice((32, 64, 64, 128)),
                block_tokens=rng.choice((16, 32, 64)),
                seed=seed,
                window=rng.choice((1, 2, 15, 16, 17, 63, 64, 65, 128, 10**9)),
                soft_cap=rng.choice((None, 0.7, 50.0)),
                sinks=rng.random() < 0.5,
            ).check(attention)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_rows_of_one_token_see_nothing_before_the_first_key(make_attention, on_device, hopper, head_dim):
    rows = [(context, 1) for context in (2, 3, 16, 17, 63, 65, 200)]
    case = Case(on_device, rows, heads=6, kv_heads=2, head_dim=head_dim, first_key=1)
    case.cache.data[case.batch.block_tables[1][:, 0], :, :, :, 0] = np.nan
    case.check(make_attention(hopper=hopper))
    case.check(make_attention(hopper=hopper, batch_invariant=True))


def test_chunks_from_a_first_key_on_are_refused_where_no_kernel_serves_them(make_attention, on_device, hopper):
    case = Case(on_device, [(40, 3)], heads=2, kv_heads=1, head_dim=64, first_key=1)
    with pytest.raises(ArrayMismatchError, match="rows of one token alone"):
        case.check(make_attention(hopper=hopper))


def test_batch_invariant_rows_have_the_same_bits_in_any_chunk(make_attention, on_device, hopper):
    attention = make_attention(hopper=hopper, batch_invariant=True)
    context, queries = 300, 140
    for head_dim in (64, 256):
        asked = {"window": 50, "soft_cap": 2.0, "sinks": True}
        case = Case(on_device, [(context, queries)], heads=6, kv_heads=2, head_dim=head_dim, **asked)

        def attend(first, last, case=case):
            batch = dataclasses.replace(
                case.batch,
                query_starts=np.array([0, last - first], np.int32),
                context_lens=np.array([context - queries + last], np.int32),
                max_query_tokens=last - first,
            )
            return attention.paged_attention(case.q[first:last], case.cache, batch=batch, **case.asked)

        whole = attend(0, queries).view(np.uint16)
        for cut in (1, 64, 139):
            chunks = np.concatenate([attend(0, cut), attend(cut, queries)])
            np.testing.assert_array_equal(chunks.view(np.uint16), whole)
