"""Attention over windows and compressed entries, against loops over single tokens in float64."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from openinfer_kernels import AttentionBatch, CompressedEntries, Ops, RopeParameters, rope_table
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kernels.testing.sparse_cases import sparse_cache, sparse_case, sparse_state

ROWS = ((1, 1), (7, 7), (33, 1), (50, 17), (140, 140))
EPS = 1e-6
ROPE = rope_table(RopeParameters(theta=1e4), head_dim=64, positions=256)


def rotated(x: np.ndarray, position: int, *, sign: float = 1.0) -> np.ndarray:
    """The last 64 numbers as complex ones, times `e^{i angle}`."""
    out = x.astype(np.float64)
    angles = position * 1e4 ** (-2.0 * np.arange(32) / 64)
    pairs = (out[-64::2] + 1j * out[-63::2]) * np.exp(sign * 1j * angles)
    out[-64::2], out[-63::2] = pairs.real, pairs.imag
    return out


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + EPS)


def tokens_of(batch: AttentionBatch) -> list[tuple[int, int, int]]:
    """Row, token and position of every token."""
    rows = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
    return list(zip(rows.tolist(), range(len(rows)), batch.positions.tolist(), strict=True))


def entry(cache: np.ndarray, batch: AttentionBatch, row: int, index: int, ratio: int) -> np.ndarray:
    """Where `KvLayout` says that an entry is."""
    end = index * ratio + ratio - 1
    block = batch.block_tables[0][row, end // batch.block_tokens]
    return cache[block, 1, 0, end % batch.block_tokens // ratio]


def largest_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.sqrt(np.mean(expected**2)))


def test_norm_and_rope_of_the_last_dimensions() -> None:
    rng = np.random.default_rng(0)
    batch = sparse_case(rng, ROWS)
    x, weight = rng.normal(size=(len(batch.positions), 3, 96)).astype(np.float32), rng.normal(size=96)
    got = CpuOps().norm_rope_tail(x, weight.astype(np.float32), eps=EPS, rope=ROPE, batch=batch)
    plain = CpuOps().rope_tail(x, rope=ROPE, batch=batch)
    for _, token, position in tokens_of(batch):
        for head in range(3):
            expected = rotated(normed(x[token, head]) * weight, position)
            assert np.abs(got[token, head] - expected).max() < 1e-5
            assert np.abs(plain[token, head] - rotated(x[token, head], position)).max() < 1e-5


@pytest.mark.parametrize("block_tokens", [5, 16, 48])
@pytest.mark.parametrize("chunk", [1, 3, 16, 37, 140])
@pytest.mark.parametrize("overlapping", [False, True])
def test_entries_of_a_sequence_in_pieces_are_means_of_their_windows(
    block_tokens: int, chunk: int, overlapping: bool
) -> None:
    """A sequence of 140 tokens in pieces; then every entry that it has, from whole windows in float64."""
    rng = np.random.default_rng(1)
    ratio, dim, num_tokens = 4 if overlapping else 16, 64, 140
    halves = 2 if overlapping else 1
    projected = rng.normal(size=(num_tokens, 2 * halves * dim)).astype(np.float32)
    ape, norm = rng.normal(size=(ratio, halves * dim)).astype(np.float32), rng.normal(size=dim).astype(np.float32)
    whole = sparse_case(rng, ((num_tokens, num_tokens),), block_tokens=block_tokens)
    state = np.full((3, 2, *((2 * ratio, 4 * dim) if overlapping else (3, dim))), np.nan, np.float32)
    cache = np.full_like(sparse_cache(rng, whole, ratio, dim), np.nan)
    compress = CpuOps().compress_overlapping_windows if overlapping else CpuOps().compress_windows
    for first in range(0, num_tokens, chunk):
        end = min(first + chunk, num_tokens)
        batch = dataclasses.replace(
            whole,
            positions=whole.positions[first:end],
            query_starts=np.array([0, end - first], np.int32),
            context_lens=np.array([end], np.int32),
            max_query_tokens=end - first,
            max_context_tokens=end,
        )
        tables: dict[str, Any] = {"ape": ape, "norm": norm, "eps": EPS, "rope": ROPE}
        compress(projected[first:end], **tables, state=state, cache=cache, layer=1, batch=batch)
    for window in range(num_tokens // ratio):
        value = mean_of_window(projected.astype(np.float64), ape, window, ratio, dim, overlapping=overlapping)
        expected = rotated(normed(value) * norm, window * ratio)
        assert np.abs(entry(cache, whole, 0, window, ratio) - expected).max() < 2e-5
    assert np.isfinite(cache[:, 1]).sum() == num_tokens // ratio * dim
    assert np.isnan(cache[:, 0]).all()


def mean_of_window(
    projected: np.ndarray, ape: np.ndarray, window: int, ratio: int, dim: int, *, overlapping: bool
) -> np.ndarray:
    width = projected.shape[1] // 2
    own = range(window * ratio, (window + 1) * ratio)
    parts = [(t, slice(width - dim, width)) for t in own]
    if overlapping and window:
        parts += [(t, slice(0, dim)) for t in range((window - 1) * ratio, window * ratio)]
    values = np.array([projected[t, :width][part] for t, part in parts])
    logits = np.array([projected[t, width:][part] + ape[t % ratio][part] for t, part in parts])
    weights = np.exp(logits)
    return (weights * values).sum(axis=0) / weights.sum(axis=0)


def test_scores_add_up_over_heads_and_hide_entries_that_are_not_complete() -> None:
    rng = np.random.default_rng(2)
    batch = sparse_case(rng, ROWS)
    cache = sparse_cache(rng, batch, 4, 32)
    queries = rng.normal(size=(len(batch.positions), 6, 32)).astype(np.float32)
    weights = rng.normal(size=(len(batch.positions), 6)).astype(np.float32)
    got = CpuOps().index_scores(queries, weights, cache=cache, layer=1, ratio=4, scale=0.3, batch=batch)
    assert got.shape == (len(batch.positions), 35)
    for row, token, position in tokens_of(batch):
        seen = (position + 1) // 4
        assert np.isneginf(got[token, seen:]).all()
        for index in range(seen):
            products = queries[token].astype(np.float64) @ entry(cache, batch, row, index, 4)
            assert abs(got[token, index] - weights[token] @ np.maximum(0.3 * products, 0)) < 1e-4


def test_best_entries_are_ascending_and_the_first_of_equals() -> None:
    inf = np.inf
    scores = np.array([[3, 1, 3, 2, 3], [0, -inf, 5, -inf, -inf], [-inf] * 5, [0, 0, 0, 0, 0]], np.float32)
    assert CpuOps().select_entries(scores, 2).tolist() == [[0, 2], [0, 2], [-1, -1], [0, 1]]
    assert CpuOps().select_entries(scores, 6)[:2].tolist() == [[0, 1, 2, 3, 4, -1], [0, 2, -1, -1, -1, -1]]


@pytest.fixture(params=[CpuOps, BatchInvariantCpuOps])
def cpu(request: pytest.FixtureRequest) -> Ops:
    return request.param()


@pytest.mark.parametrize(("ratio", "k", "spare", "first"), [(0, 0, 0, 0), (4, 3, 0, 0), (16, 0, 0, 0), (0, 0, 3, 1)])
def test_attention_to_a_window_and_entries_is_a_softmax_with_a_sink(
    cpu: Ops, ratio: int, k: int, spare: int, first: int
) -> None:
    """With `spare` room in the window, and no key before position `first`, whatever lies there."""
    rng = np.random.default_rng(3)
    heads, dim, width, scale = 2, 80, 12, 0.4
    room = width + spare
    seen_keys = {"num_seen": width, "first_key": first} if spare else {}
    batch = sparse_case(rng, ROWS)
    window = sparse_state(rng, batch, (room, dim))
    before = window.copy()
    num_tokens = len(batch.positions)
    q = rng.normal(size=(num_tokens, heads, dim)).astype(np.float32)
    kv = rng.normal(size=(num_tokens, dim)).astype(np.float32)
    kv[batch.positions < first] = np.nan
    sinks = rng.normal(size=heads).astype(np.float32)
    entries, cache, selected = None, np.empty(0), None
    if ratio:
        cache = sparse_cache(rng, batch, ratio, dim)
        if k:
            scores = rng.normal(size=(num_tokens, 40)).astype(np.float32)
            scores[np.arange(40) >= ((batch.positions + 1) // ratio)[:, None]] = -np.inf
            selected = cpu.select_entries(scores, k)
        entries = CompressedEntries(cache=cache, layer=1, ratio=ratio, selected=selected)
    got = cpu.window_attention(
        q, kv, sinks=sinks, window=window, layer=1, entries=entries, rope=ROPE, scale=scale, batch=batch, **seen_keys
    )
    assert batch.state_slots is not None
    for row, token, position in tokens_of(batch):
        if position < first:
            np.testing.assert_array_equal(got[token], 0)
            continue
        start = int(batch.context_lens[row] - np.diff(batch.query_starts)[row])
        first_token = int(batch.query_starts[row])
        keys = [
            kv[first_token + p - start] if p >= start else before[batch.state_slots[row], 1, p % room]
            for p in range(max(first, position - width + 1), position + 1)
        ]
        seen = range((position + 1) // ratio) if ratio else range(0)
        chosen = seen if selected is None else selected[token][selected[token] >= 0].tolist()
        keys += [entry(cache, batch, row, index, ratio) for index in chosen]
        for head in range(heads):
            weights = np.exp(scale * (np.array(keys, np.float64) @ q[token, head]))
            mixed = weights @ np.array(keys, np.float64) / (weights.sum() + np.exp(sinks[head]))
            expected = rotated(mixed, position, sign=-1.0)
            assert np.abs(got.reshape(num_tokens, heads, dim)[token, head] - expected).max() < 1e-4
    for row, context in enumerate(batch.context_lens.tolist()):
        last = int(batch.query_starts[row + 1]) - 1
        np.testing.assert_array_equal(window[batch.state_slots[row], 1, (context - 1) % room], kv[last])
    np.testing.assert_array_equal(window[:, 0], before[:, 0])
    cpu.append_window(kv, window=before, layer=1, batch=batch)
    np.testing.assert_array_equal(window, before)


def test_product_per_group(close: Callable[..., None]) -> None:
    rng = np.random.default_rng(4)
    x, weight = rng.normal(size=(5, 3 * 8)).astype(np.float32), rng.normal(size=(3, 4, 8)).astype(np.float32)
    expected = np.einsum("tgi,goi->tgo", x.reshape(5, 3, 8).astype(np.float64), weight)
    assert largest_error(CpuOps().grouped_linear(x, weight), expected.reshape(5, 12)) < 1e-5


def test_batch_invariant_operators_give_the_same_bits_alone_and_in_pieces() -> None:
    rng = np.random.default_rng(5)
    cpu, dim, num_tokens = BatchInvariantCpuOps(), 80, 60
    whole = sparse_case(rng, ((num_tokens, num_tokens),))
    cache = sparse_cache(rng, whole, 4, dim)
    q, kv = (rng.normal(size=(num_tokens, *shape)).astype(np.float32) for shape in ((2, dim), (dim,)))
    weights = rng.normal(size=(num_tokens, 2)).astype(np.float32)
    found: list[tuple[Any, ...]] = []
    for chunk in (60, 7):
        window = np.full((3, 2, 12, dim), np.nan, np.float32)
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        for first in range(0, num_tokens, chunk):
            end = min(first + chunk, num_tokens)
            batch = dataclasses.replace(
                whole,
                positions=whole.positions[first:end],
                query_starts=np.array([0, end - first], np.int32),
                context_lens=np.array([end], np.int32),
            )
            entries: dict[str, Any] = {"cache": cache, "layer": 1, "ratio": 4}
            scores = cpu.index_scores(q[first:end], weights[first:end], **entries, scale=0.1, batch=batch)
            attended = cpu.window_attention(
                q[first:end],
                kv[first:end],
                sinks=np.zeros(2, np.float32),
                window=window,
                layer=0,
                entries=CompressedEntries(**entries, selected=cpu.select_entries(scores, 5)),
                rope=ROPE,
                scale=0.1,
                batch=batch,
            )
            pieces.append((scores, attended))
        found.append(tuple(np.concatenate(each) for each in zip(*pieces, strict=True)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
