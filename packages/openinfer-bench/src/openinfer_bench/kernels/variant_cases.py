"""What is measured of windows, soft caps, sinks and GeGLU: the shapes of Gemma-2, Gemma-3 and gpt-oss on one rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer_bench.kernels.cases import BLOCK_TOKENS, Call, Case, Filler, paged_batch
from openinfer_kernels.ops import Ops, PagedCache

_MAX_DECODE_ROWS = 256
_LONG = 8
"""Times as long as asked for are the contexts that windows are measured over, next to those of that length."""
_MOST_CACHED = 1 << 18
"""Tokens of a case's cache, at most: it is filled from the host."""
_BF16_BYTES, _FLOAT32_BYTES = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantShape:
    """A model's attention, and what of it is not plain."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


GEMMA_2_9B = VariantShape(name="Gemma-2 9B", num_heads=16, num_kv_heads=8, head_dim=256, window=4096, soft_cap=50.0)
GEMMA_2_9B_GLOBAL = VariantShape(name="Gemma-2 9B", num_heads=16, num_kv_heads=8, head_dim=256, soft_cap=50.0)
GEMMA_3_27B = VariantShape(name="Gemma-3 27B", num_heads=32, num_kv_heads=16, head_dim=128, window=1024)
GPT_OSS = VariantShape(name="gpt-oss", num_heads=64, num_kv_heads=8, head_dim=64, window=128, has_sinks=True)
GPT_OSS_GLOBAL = VariantShape(name="gpt-oss", num_heads=64, num_kv_heads=8, head_dim=64, has_sinks=True)
SHAPES = (GEMMA_2_9B, GEMMA_2_9B_GLOBAL, GEMMA_3_27B, GPT_OSS, GPT_OSS_GLOBAL)
_F, _VOCABULARY = 14_336, 256_000
"""Of Gemma-2 9B."""


def variant_cases(shapes: Sequence[VariantShape], *, tokens: Sequence[int], context: int) -> Iterator[Case]:
    """All cases: decoding rows over contexts of two lengths, larger steps as one prompt, gates and logits."""
    rows = [count for count in tokens if count <= _MAX_DECODE_ROWS]
    for shape in shapes:
        for length in (context, _LONG * context):
            some = [count for count in rows if count * length <= _MOST_CACHED]
            yield from (_attention([(length, 1)] * count, shape) for count in some)
        yield from (_attention([(count, count)], shape) for count in tokens if count > _MAX_DECODE_ROWS)
    yield from (_geglu(count) for count in tokens)
    yield from (_soft_cap(count) for count in rows)


def _attention(rows: Sequence[tuple[int, int]], shape: VariantShape) -> Case:
    """`rows`: of each, tokens in the cache once this step's are, and tokens of this step."""
    tokens = sum(queries for _, queries in rows)
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim

    def prepare(ops: Ops, fill: Filler) -> Call:
        batch, num_blocks = paged_batch(ops, rows)
        cache = PagedCache(data=fill(num_blocks, 1, 2, kv_heads, BLOCK_TOKENS, head_dim), layer=0)
        q = fill(tokens, heads, head_dim)
        asked: dict[str, Any] = {"window": shape.window, "soft_cap": shape.soft_cap}
        if shape.has_sinks:
            asked["sinks"] = ops.upload(np.linspace(-2, 2, heads).astype(np.float32))
        return lambda: ops.paged_attention(q, cache, batch=batch, scale=head_dim**-0.5, **asked)

    read = sum(min(context, _reach(shape, context) + queries - 1) for context, queries in rows)
    seen = sum(int(np.minimum(_positions(row), _reach(shape, row[0])).sum()) for row in rows)
    return Case(
        operator="paged_attention",
        shape=f"{shape.name}, {len(rows)} rows x {rows[0][1]} of {rows[0][0]}, window {shape.window or 'none'}",
        tokens=tokens,
        bytes=_BF16_BYTES * head_dim * (2 * kv_heads * read + 2 * heads * tokens),
        flops=4 * heads * head_dim * seen,
        prepare=prepare,
    )


def _reach(shape: VariantShape, context: int) -> int:
    """Keys that a token sees, at most."""
    return context if shape.window is None else shape.window


def _positions(row: tuple[int, int]) -> Any:
    """Keys up to each query token of a row, its own among them."""
    context, queries = row
    return np.arange(context - queries + 1, context + 1)


def _geglu(tokens: int) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        both = fill(tokens, 2 * _F)
        return lambda: ops.geglu(both)

    size = 3 * _BF16_BYTES * tokens * _F
    return Case(operator="geglu", shape=f"{tokens} x {_F}", tokens=tokens, bytes=size, flops=0, prepare=prepare)


def _soft_cap(tokens: int) -> Case:
    def prepare(ops: Ops, fill: Filler) -> Call:
        logits = fill(tokens, _VOCABULARY).astype(np.float32)
        return lambda: ops.soft_cap(logits, cap=30.0)

    size = 2 * _FLOAT32_BYTES * tokens * _VOCABULARY
    return Case(
        operator="soft_cap", shape=f"{tokens} x {_VOCABULARY}", tokens=tokens, bytes=size, flops=0, prepare=prepare
    )
