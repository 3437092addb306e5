"""`StepLatency`: how long a step takes on a GPU, by what its rows are; the table of `openinfer simulate fit --offline`.

    decode rows alone   decode(rows, padded to the captured size) + context + longest
    with prompt chunks  mixed(tokens, padded) + context + longest + pairs + chunks

decode, mixed   all products, norms and what one operator after another costs: a line between measured sizes
context         tokens whose keys and values are read, once per row, or once per 128 queries of a chunk
longest         tokens of the longest context: one row's keys are read by few multiprocessors
pairs           of query and key in chunks that are not masked (quadratic in a prompt)
chunks          rows of several tokens: each is admitted, and begins attention's tiles anew

Tokens of a step with prompts are padded to the captured size, and beyond the largest to whole tiles of products: 1,025
tokens take as long as 1,152. The host's part of a step is in it, as it is in what `openinfer bench offline` measures:
planned and launched while the step before runs.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from openinfer_core.scheduling import StepPlan
from openinfer_engine.cuda.step_buckets import ROW_BUCKETS, TOKEN_BUCKETS, bucket_of

_QUERY_TILE = 128  # tokens of a chunk that read keys and values together
_TOKEN_TILE = 128  # tokens that a tile of a product has: seen in qwen3-4b-offline-tiles.json


class Shape(NamedTuple):
    """What a step's time depends on."""

    num_tokens: int
    """Padded to what is captured; rows, where all decode."""
    is_decode: bool
    context_tokens: int
    longest_tokens: int
    pairs: int
    chunks: int


COEFFICIENTS = ("context_token_s", "longest_token_s", "pair_s", "chunk_s")
"""Of the last fields of a `Shape`, in their order."""


def shape_of(starts: Sequence[int], counts: Sequence[int]) -> Shape:
    """The shape of a step whose rows compute `counts` tokens each, from `starts` on."""
    first, new = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    ends, num_tokens = first + new, int(new.sum())
    is_decode = bool((new == 1).all())
    chunks = new > 1
    pairs = (first[chunks] * new[chunks] + new[chunks] * (new[chunks] + 1) // 2).sum()
    padded_tokens = bucket_of(ROW_BUCKETS if is_decode else TOKEN_BUCKETS, num_tokens)
    return Shape(
        num_tokens=padded_tokens or -(-num_tokens // _TOKEN_TILE) * _TOKEN_TILE,
        is_decode=is_decode,
        context_tokens=int((ends * -(-new // _QUERY_TILE))[new < _QUERY_TILE].sum()),
        longest_tokens=int(ends[new < _QUERY_TILE].max(initial=0)),
        pairs=int(pairs),
        chunks=int(chunks.sum()),
    )


def shape_of_plan(plan: StepPlan) -> Shape:
    """`shape_of` of a plan's rows."""
    return shape_of(plan.starts.tolist(), plan.counts.tolist())


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds at measured sizes, straight between them and beyond the last two."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes {self.sizes} must ascend, with as many seconds ({len(self.seconds)})")

    def at(self, size: int) -> float:
        return sum(weight * self.seconds[index] for index, weight in weights_at(self.sizes, size))


def weights_at(sizes: Sequence[int], size: int) -> list[tuple[int, float]]:
    """Of which points, and how much of each, the line is made at a size; the first point's value below it."""
    if len(sizes) == 1 or size <= sizes[0]:
        return [(0, 1.0)]
    right = min(bisect_left(sizes, size), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    share = (size - low) / (high - low)
    return [(right - 1, 1 - share), (right, share)]


class StepLatency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fitted model of one GPU and one checkpoint's shape."""

    decode: Line
    """By rows."""
    mixed: Line
    """By tokens."""
    context_token_s: float
    longest_token_s: float
    pair_s: float
    chunk_s: float

    def of(self, plan: StepPlan) -> float:
        """Seconds of a step."""
        return self.of_shape(shape_of_plan(plan))

    def of_shape(self, shape: Shape) -> float:
        line = self.decode if shape.is_decode else self.mixed
        return (
            line.at(shape.num_tokens)
            + shape.context_tokens * self.context_token_s
            + shape.longest_tokens * self.longest_token_s
            + shape.pairs * self.pair_s
            + shape.chunks * self.chunk_s
        )


class FitOrigin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a table is from."""

    file: str
    commit: str
    gpu: str = ""
    date: str = ""


class FittedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured figure of the results, and what the table says it is."""

    what: str
    measured_s: float
    fitted_s: float


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the engine that was measured: what its scheduler plans with."""

    max_model_tokens: int
    num_blocks: int
    block_size_tokens: int
    max_num_seqs: int
    max_step_tokens: int
