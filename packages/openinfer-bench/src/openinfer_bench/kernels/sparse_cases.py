"""What is measured of windows, compressed entries and residual streams: DeepSeek-V4-Flash's shapes on one rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer_bench.kernels.cases import Call, Case, Filler
from openinfer_kernels.ops import Array, AttentionBatch, CompressedEntries, HyperWeights, Ops
from openinfer_kernels.rope import RopeParameters, rope_table

_BLOCK_TOKENS = 128
_MAX_DECODE_ROWS = 256
_BF16_BYTES, _FLOAT32_BYTES = 2, 4
_HEADS, _DIM, _WINDOW, _SELECTED = 64, 512, 128, 512
_INDEX_HEADS, _INDEX_DIM = 64, 128
_H, _STREAMS, _MIXES = 4096, 4, 24
_ROTATED, _EPS = 64, 1e-6


@dataclass(frozen=True, slots=True)
class _Rows:
    """Alike rows of one step."""

    rows: int
    queries: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.queries

    def __str__(self) -> str:
        return f"{self.rows} x {self.queries} of {self.context}"

    def seen(self, ratio: int, most: int | None = None) -> int:
        """Entries that all tokens see together."""
        ends = np.arange(self.context - self.queries + 1, self.context + 1) // ratio
        return self.rows * int(ends.sum() if most is None else np.minimum(ends, most).sum())

    def near(self) -> int:
        """Tokens of windows that all tokens see together."""
        ends = np.arange(self.context - self.queries + 1, self.context + 1)
        return self.rows * int(np.minimum(ends, _WINDOW).sum())

    def batch(self, ops: Ops) -> AttentionBatch:
        """On the device, with one slot per row."""
        blocks = -(-self.context // _BLOCK_TOKENS)
        tables = np.random.default_rng(0).permutation(self.rows * blocks).reshape(self.rows, blocks).astype(np.int32)
        positions = np.tile(np.arange(self.context - self.queries, self.context), self.rows).astype(np.int32)
        owners = np.repeat(np.arange(self.rows), self.queries)
        slots = tables[owners, positions // _BLOCK_TOKENS].astype(np.int64) * _BLOCK_TOKENS + positions % _BLOCK_TOKENS
        return AttentionBatch(
            positions=ops.upload(positions),
            query_starts=ops.upload(np.arange(self.rows + 1, dtype=np.int32) * self.queries),
            context_lens=ops.upload(np.full(self.rows, self.context, np.int32)),
            block_tables=(ops.upload(tables),),
            cache_slots=(ops.upload(slots),),
            max_query_tokens=self.queries,
            max_context_tokens=self.context,
            block_tokens=_BLOCK_TOKENS,
            state_slots=ops.upload(np.arange(self.rows, dtype=np.int32)),
        )

    def cache(self, fill: Filler, ratio: int, dim: int) -> Array:
        """One layer of entries."""
        blocks = self.rows * -(-self.context // _BLOCK_TOKENS)
        return fill(blocks, 1, 1, -(-_BLOCK_TOKENS // ratio), dim)


def sparse_cases(*, tokens: Sequence[int], context: int) -> Iterator[Case]:
    """All cases: up to 256 tokens as decoding rows of that context, more as one prompt."""
    for count in tokens:
        rows = _Rows(count, 1, context) if count <= _MAX_DECODE_ROWS else _Rows(1, count, count)
        yield _attention(rows, "window", None, None)
        yield _attention(rows, "heavy", 128, None)
        yield _attention(rows, "sparse", 4, _SELECTED)
        yield _index_scores(rows)
        yield _select(rows)
        yield _compress(rows)
        yield _hyper_read(count)
        yield _hyper_write(count)


def _attention(rows: _Rows, kind: str, ratio: int | None, selected: int | None) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        batch, entries = rows.batch(ops), None
        if ratio is not None:
            chosen = None if selected is None else ops.upload(_some_entries(rows, ratio, selected))
            entries = CompressedEntries(cache=rows.cache(fill, ratio, _DIM), layer=0, ratio=ratio, selected=chosen)
        arrays = fill(rows.tokens, _HEADS, _DIM), fill(rows.tokens, _DIM)
        window, sinks, rope = fill(rows.rows, 1, _WINDOW, _DIM), ops.upload(np.zeros(_HEADS, np.float32)), _rope(ops)
        keywords: dict[str, Any] = {"sinks": sinks, "window": window, "entries": entries, "rope": rope, "batch": batch}
        return lambda: ops.window_attention(*arrays, **keywords, layer=0, scale=_DIM**-0.5)

    keys = rows.near() + (0 if ratio is None else rows.seen(ratio, selected))
    once = rows.rows * (min(rows.context, _WINDOW + rows.queries) + (0 if ratio is None else rows.context // ratio))
    return Case(
        operator="window_attention",
        shape=f"{rows}, {kind}",
        tokens=rows.tokens,
        bytes=_BF16_BYTES * _DIM * (min(keys, once) + 2 * _HEADS * rows.tokens),
        flops=4 * _HEADS * _DIM * keys,
        prepare=prepare,
    )


def _index_scores(rows: _Rows) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        batch, cache = rows.batch(ops), rows.cache(fill, 4, _INDEX_DIM)
        queries = fill(rows.tokens, _INDEX_HEADS, _INDEX_DIM)
        weights = ops.upload(np.ones((rows.tokens, _INDEX_HEADS), np.float32))
        return lambda: ops.index_scores(queries, weights, cache=cache, layer=0, ratio=4, scale=0.1, batch=batch)

    entries = rows.context // 4
    moved = _BF16_BYTES * _INDEX_DIM * (rows.rows * entries + _INDEX_HEADS * rows.tokens)
    return Case(
        operator="index_scores",
        shape=str(rows),
        tokens=rows.tokens,
        bytes=moved + _FLOAT32_BYTES * rows.tokens * entries,
        flops=2 * _INDEX_HEADS * _INDEX_DIM * rows.seen(4),
        prepare=prepare,
    )


def _select(rows: _Rows) -> Case:
    entries = max(1, rows.context // 4)

    def prepare(ops: Ops, fill: Filler) -> Call:
        del fill
        scores = ops.upload(np.random.default_rng(0).normal(size=(rows.tokens, entries)).astype(np.float32))
        return lambda: ops.select_entries(scores, _SELECTED)

    moved = _FLOAT32_BYTES * rows.tokens * (entries + _SELECTED)
    return Case(
        operator="select_entries",
        shape=f"{rows.tokens} x {_SELECTED} of {entries}",
        tokens=rows.tokens,
        bytes=moved,
        flops=0,
        prepare=prepare,
    )


def _compress(rows: _Rows) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        rng = np.random.default_rng(0)
        batch, cache, norm, rope = rows.batch(ops), rows.cache(fill, 4, _DIM), fill(_DIM), _rope(ops)
        projected, ape = (ops.upload(rng.random((n, w), np.float32)) for n, w in ((rows.tokens, 2048), (4, 1024)))
        state = ops.zeros((rows.rows, 1, 8, 2048), np.float32)
        keywords: dict[str, Any] = {"ape": ape, "norm": norm, "eps": _EPS, "rope": rope, "state": state, "cache": cache}
        return lambda: ops.compress_overlapping_windows(projected, **keywords, layer=0, batch=batch)

    return Case(
        operator="compress_overlapping_windows",
        shape=str(rows),
        tokens=rows.tokens,
        bytes=_FLOAT32_BYTES * 4 * _DIM * (rows.tokens + rows.rows),
        flops=0,
        prepare=prepare,
    )


def _hyper_read(tokens: int) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        rng = np.random.default_rng(0)
        weights = HyperWeights(
            fn=ops.upload(rng.normal(size=(_MIXES, _STREAMS * _H)).astype(np.float32) / np.float32(128)),
            base=ops.upload(np.zeros(_MIXES, np.float32)),
            scale=ops.upload(np.ones(3, np.float32)),
        )
        residual = fill(tokens, _STREAMS, _H)
        return lambda: ops.hyper_read(residual, weights, eps=_EPS, mix_eps=_EPS, num_iterations=20)

    moved = _BF16_BYTES * tokens * (_STREAMS + 1) * _H + _FLOAT32_BYTES * _MIXES * _STREAMS * _H
    flops = 2 * tokens * (_MIXES + 2) * _STREAMS * _H
    return Case(operator="hyper_read", shape=f"{tokens}", tokens=tokens, bytes=moved, flops=flops, prepare=prepare)


def _hyper_write(tokens: int) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        residual, y = fill(tokens, _STREAMS, _H), ops.zeros((tokens, _H), np.float32)
        weights = HyperWeights(
            fn=ops.zeros((_MIXES, _STREAMS * _H), np.float32),
            base=ops.zeros((_MIXES,), np.float32),
            scale=ops.zeros((3,), np.float32),
        )
        _, mix = ops.hyper_read(residual, weights, eps=_EPS, mix_eps=_EPS, num_iterations=20)
        return lambda: ops.hyper_write(y, residual, mix)

    moved = tokens * _H * (2 * _BF16_BYTES * _STREAMS + _FLOAT32_BYTES)
    return Case(operator="hyper_write", shape=f"{tokens}", tokens=tokens, bytes=moved, flops=0, prepare=prepare)


def _some_entries(rows: _Rows, ratio: int, k: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Of each token, evenly spread over those that it sees, ascending."""
    ends = np.tile(np.arange(rows.context - rows.queries + 1, rows.context + 1) // ratio, rows.rows)[:, None]
    place = np.arange(k)
    spread = np.where(ends > k, place * ends // k, place)
    return np.where(place < np.minimum(ends, k), spread, -1).astype(np.int32)


def _rope(ops: Ops) -> Array:
    return ops.upload(rope_table(RopeParameters(theta=1e4), head_dim=_ROTATED, positions=1 << 16))
