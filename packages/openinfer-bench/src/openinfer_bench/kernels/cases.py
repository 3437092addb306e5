"""What is measured: each operator at a model's shapes, with the fewest bytes and FLOPs that it could need.

A case makes its operator's arrays, several times over. The copies take turns, so that weights and caches come from
memory, as they do in a model; what is small stays in L2, as it does there too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer_kernels.ops import Array, AttentionBatch, Ops, PagedCache, SamplingBatch
from openinfer_kernels.ops.sampling_columns import COLUMN_DTYPES, DEFAULTS
from openinfer_kernels.rope import RopeParameters, rope_table

BLOCK_TOKENS = 16
_MAX_DECODE_ROWS = 256
_BF16_BYTES, _FLOAT32_BYTES = 2, 4

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a dense model, by the letters of the contract."""

    h: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    f: int
    vocabulary: int

    @property
    def qkv(self) -> int:
        """Values of Q, K and V of a token."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


QWEN3_4B = ModelShape(h=2560, num_heads=32, num_kv_heads=8, head_dim=128, f=9728, vocabulary=151936)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operator at one shape."""

    operator: str
    shape: str
    tokens: int
    bytes: int
    """Each input read once, each output written once."""
    flops: int
    prepare: Callable[[Ops, "Filler"], Call]
    """Makes one copy of the operator's arrays; the result runs the operator on them."""


class Filler:
    """Arrays of normally distributed BF16 values, quickly: one pool of them is read over and over."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        values = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)
        self._pool = (values.view(np.uint32) >> 16).astype(np.uint16)

    def __call__(self, *shape: int) -> Array:
        """An array of this shape in the compute dtype of a GPU."""
        return self._ops.upload_weight(np.resize(self._pool, shape))


def cases(model: ModelShape, *, tokens: Sequence[int], context: int) -> Iterator[Case]:
    """All cases, operator by operator.

    Args:
        model: the sizes.
        tokens: of a step; attention and sampling take those up to 256 as decoding rows, attention takes larger ones
            as one prompt.
        context: tokens in the cache of each decoding row.
    """
    rows = [count for count in tokens if count <= _MAX_DECODE_ROWS]
    for name, n, k in (
        ("linear", model.qkv, model.h),
        ("linear", model.h, model.num_heads * model.head_dim),
        ("linear", model.h, model.f),
    ):
        yield from (_linear(name, count, n, k) for count in tokens)
    yield from (_swiglu(count, model.f, model.h) for count in tokens)
    yield from (_head(count, model.vocabulary, model.h) for count in rows)
    for name, value_bytes in (("embedding", _BF16_BYTES), ("residual_embedding", _FLOAT32_BYTES)):
        yield from (_embedding(name, value_bytes, count, model) for count in tokens)
    yield from (_norm(count, model.h) for count in tokens)
    yield from (_add_norm(count, model.h) for count in tokens)
    yield from (_append(count, model) for count in tokens)
    yield from (_attention([(context, 1)] * count, model) for count in rows)
    yield from (_attention([(count, count)], model) for count in tokens if count > _MAX_DECODE_ROWS)
    for kind, options in _SAMPLINGS.items():
        yield from (_sample(kind, count, model.vocabulary, options) for count in rows)
    yield from (_logprobs(count, model.vocabulary) for count in rows)


def _linear(operator: str, tokens: int, n: int, k: int) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        x, weight = fill(tokens, k), fill(n, k)
        batch, _ = paged_batch(ops, [(tokens, tokens)])
        return lambda: ops.linear(x, weight, batch)

    return Case(
        operator=operator,
        shape=f"{tokens} x {k} -> {n}",
        tokens=tokens,
        bytes=_BF16_BYTES * (tokens * k + n * k + tokens * n),
        flops=2 * tokens * n * k,
        prepare=prepare,
    )


def _head(tokens: int, n: int, k: int) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        x, weight = fill(tokens, k), fill(n, k)
        return lambda: ops.logits(x, weight)

    return Case(
        operator="logits",
        shape=f"{tokens} x {k} -> {n}",
        tokens=tokens,
        bytes=_BF16_BYTES * (tokens * k + n * k) + _FLOAT32_BYTES * tokens * n,
        flops=2 * tokens * n * k,
        prepare=prepare,
    )


def _swiglu(tokens: int, f: int, h: int) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        x, weight = fill(tokens, h), fill(2 * f, h)
        batch, _ = paged_batch(ops, [(tokens, tokens)])
        return lambda: ops.linear_swiglu(x, weight, batch)

    return Case(
        operator="linear_swiglu",
        shape=f"{tokens} x {h} -> {f}",
        tokens=tokens,
        bytes=_BF16_BYTES * (tokens * h + 2 * f * h + tokens * f),
        flops=4 * tokens * f * h,
        prepare=prepare,
    )


def _embedding(operator: str, value_bytes: int, tokens: int, model: ModelShape) -> Case:
    """`value_bytes`: of a value of the result."""

    def prepare(ops: Ops, fill: Filler) -> Call:
        rows, look_up = max(tokens, 4096), getattr(ops, operator)
        table, ids = fill(rows, model.h), ops.upload(np.arange(tokens, dtype=np.int32))
        return lambda: look_up(ids, table)

    return Case(
        operator=operator,
        shape=f"{tokens} x {model.h}",
        tokens=tokens,
        bytes=(_BF16_BYTES + value_bytes) * tokens * model.h,
        flops=0,
        prepare=prepare,
    )


def _norm(tokens: int, h: int) -> Case:
    """Of a residual, as in front of a model's first layer."""

    def prepare(ops: Ops, fill: Filler) -> Call:
        x, weight = fill(tokens, h).astype(np.float32), fill(h)
        return lambda: ops.rms_norm(x, weight, eps=1e-6)

    size = _FLOAT32_BYTES * tokens * h + _BF16_BYTES * (tokens + 1) * h
    return Case(operator="rms_norm", shape=f"{tokens} x {h}", tokens=tokens, bytes=size, flops=0, prepare=prepare)


def _add_norm(tokens: int, h: int) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        x, residual, weight = fill(tokens, h), fill(tokens, h).astype(np.float32), fill(h)
        return lambda: ops.add_rms_norm(x, residual, weight, eps=1e-6)

    size = 2 * _FLOAT32_BYTES * tokens * h + _BF16_BYTES * (2 * tokens + 1) * h
    return Case(operator="add_rms_norm", shape=f"{tokens} x {h}", tokens=tokens, bytes=size, flops=0, prepare=prepare)


def _append(tokens: int, model: ModelShape) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        batch, num_blocks = paged_batch(ops, [(tokens, tokens)])
        data = fill(num_blocks, 1, 2, model.num_kv_heads, BLOCK_TOKENS, model.head_dim)
        cache = PagedCache(data=data, layer=0)
        qkv, q_norm, k_norm = fill(tokens, model.qkv), fill(model.head_dim), fill(model.head_dim)
        table = rope_table(RopeParameters(theta=1e6), head_dim=model.head_dim, positions=tokens)
        rope = ops.upload(table)
        return lambda: ops.qk_norm_rope_append(
            qkv, q_norm=q_norm, k_norm=k_norm, eps=1e-6, rope=rope, cache=cache, batch=batch
        )

    return Case(
        operator="qk_norm_rope_append",
        shape=f"{tokens} x {model.qkv}",
        tokens=tokens,
        bytes=tokens * (2 * _BF16_BYTES * model.qkv + 4 * model.head_dim),
        flops=0,
        prepare=prepare,
    )


def _attention(rows: Sequence[tuple[int, int]], model: ModelShape) -> Case:
    """`rows`: of each, tokens in the cache once this step's are, and tokens of this step."""
    tokens = sum(queries for _, queries in rows)
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim

    def prepare(ops: Ops, fill: Filler) -> Call:
        batch, num_blocks = paged_batch(ops, rows)
        cache = PagedCache(data=fill(num_blocks, 1, 2, kv_heads, BLOCK_TOKENS, head_dim), layer=0)
        q = fill(tokens, heads, head_dim)
        return lambda: ops.paged_attention(q, cache, batch=batch, scale=head_dim**-0.5)

    seen = sum(queries * (2 * context - queries + 1) // 2 for context, queries in rows)
    return Case(
        operator="paged_attention",
        shape=f"{len(rows)} rows x {rows[0][1]} of {rows[0][0]}",
        tokens=tokens,
        bytes=_BF16_BYTES * head_dim * (2 * kv_heads * sum(context for context, _ in rows) + 2 * heads * tokens),
        flops=4 * heads * head_dim * seen,
        prepare=prepare,
    )


_SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
}


def _sample(kind: str, rows: int, vocabulary: int, options: dict[str, float]) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        logits = fill(rows, vocabulary).astype(np.float32)
        columns: dict[str, Any] = {
            name: ops.upload(np.full(rows, options.get(name, default), COLUMN_DTYPES[name]))
            for name, default in DEFAULTS.items()
        }
        batch = SamplingBatch(
            num_token_ids=vocabulary,
            **columns,
            seeds=ops.upload(np.arange(rows, dtype=np.uint64)),
            positions=ops.upload(np.arange(rows, dtype=np.int64)),
        )
        return lambda: ops.sample(logits, batch)

    size = _FLOAT32_BYTES * rows * vocabulary
    return Case(operator="sample", shape=f"{rows} rows, {kind}", tokens=rows, bytes=size, flops=0, prepare=prepare)


def _logprobs(rows: int, vocabulary: int) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        logits, ids = fill(rows, vocabulary).astype(np.float32), ops.upload(np.arange(rows, dtype=np.int32))
        return lambda: ops.logprobs(logits, ids, top=5)

    size = _FLOAT32_BYTES * rows * vocabulary
    return Case(operator="logprobs", shape=f"{rows} rows, top 5", tokens=rows, bytes=size, flops=0, prepare=prepare)


def paged_batch(ops: Ops, rows: Sequence[tuple[int, int]]) -> tuple[AttentionBatch, int]:
    """The batch of such rows, their blocks scattered over the cache, and the blocks that the cache needs."""
    per_row = [-(-context // BLOCK_TOKENS) for context, _ in rows]
    order = np.random.default_rng(0).permutation(sum(per_row)).astype(np.int32)
    tables = np.zeros((len(rows), max(per_row)), np.int32)
    positions: list[np.ndarray[Any, Any]] = []
    slots: list[np.ndarray[Any, Any]] = []
    for row, ((context, queries), blocks) in enumerate(zip(rows, per_row, strict=True)):
        tables[row, :blocks], order = order[:blocks], order[blocks:]
        place = np.arange(context - queries, context)
        positions.append(place)
        slots.append(tables[row, place // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + place % BLOCK_TOKENS)
    batch = AttentionBatch(
        positions=ops.upload(np.concatenate(positions).astype(np.int32)),
        query_starts=ops.upload(np.cumsum([0, *(queries for _, queries in rows)]).astype(np.int32)),
        context_lens=ops.upload(np.array([context for context, _ in rows], np.int32)),
        block_tables=(ops.upload(tables),),
        cache_slots=(ops.upload(np.concatenate(slots)),),
        max_query_tokens=max(queries for _, queries in rows),
        max_context_tokens=max(context for context, _ in rows),
    )
    return batch, sum(per_row)
