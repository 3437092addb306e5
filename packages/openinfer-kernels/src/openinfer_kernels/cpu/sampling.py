"""Drawing one token per row.

A row's answer never depends on the batch: element-wise work is done in float32 on the row's own numbers, and what is
summed (cumulative probabilities) is summed in float64 in a fixed order, by token id or by rank within the row.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.logit_changes import changed_logits
from openinfer_kernels.cpu.philox import uniforms
from openinfer_kernels.cpu.top import top_ids
from openinfer_kernels.ops import SamplingBatch

_ELEMENTS_AT_ONCE = 1 << 18
_FIRST_CANDIDATES = 256


@np.errstate(over="ignore", invalid="ignore")
def sample(logits: NDArray[Any], sampling: SamplingBatch) -> NDArray[np.int32]:
    """One token per row of `logits [R, V]`, -1 where a row has no finite maximum: `[R]` int32."""
    scores = changed_logits(logits, sampling)
    best = scores.argmax(axis=1)
    maxima = scores[np.arange(scores.shape[0]), best]
    answerable = np.isfinite(maxima)
    tokens = np.where(answerable, best, -1).astype(np.int32)
    drawn = answerable & (sampling.temperature > 0)
    if not drawn.any():
        return tokens
    numbers = uniforms(sampling.seeds, sampling.positions)
    truncated = _is_truncated(sampling, scores.shape[1])
    for rows in _slices_of(np.flatnonzero(drawn & ~truncated), scores.shape[1]):
        tokens[rows] = _draw_from_all(scores, maxima, sampling, numbers, rows)
    for row in np.flatnonzero(drawn & truncated).tolist():
        tokens[row] = _draw_from_likeliest(scores[row], maxima[row], sampling, numbers[row], row)
    return tokens


def _is_truncated(sampling: SamplingBatch, num_ids: int) -> NDArray[np.bool_]:
    """Which rows need their likeliest tokens in order."""
    return ((sampling.top_k > 0) & (sampling.top_k < num_ids)) | (sampling.top_p < 1)


def _slices_of(rows: NDArray[np.intp], num_ids: int) -> list[NDArray[np.intp]]:
    """Row ids in pieces whose logits stay in the processor's cache."""
    size = max(1, _ELEMENTS_AT_ONCE // num_ids)
    return [rows[start : start + size] for start in range(0, rows.size, size)]


def _draw_from_all(
    scores: NDArray[Any],
    maxima: NDArray[Any],
    sampling: SamplingBatch,
    numbers: NDArray[np.float64],
    rows: NDArray[np.intp],
) -> NDArray[np.intp]:
    """Tokens of rows that keep everything but what min-p drops."""
    weights = scores[rows]
    weights -= maxima[rows, None]
    weights /= sampling.temperature[rows, None]
    np.exp(weights, out=weights)
    min_p = sampling.min_p[rows, None]
    if min_p.any():
        weights[weights < min_p] = 0.0
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    targets = numbers[rows] * cumulative[:, -1]
    return np.count_nonzero(cumulative <= targets[:, None], axis=1)


def _draw_from_likeliest(
    scores: NDArray[Any], maximum: np.floating[Any], sampling: SamplingBatch, number: np.float64, row: int
) -> int:
    """The token of one row with top-k or top-p."""
    top_k, top_p, min_p = int(sampling.top_k[row]), float(sampling.top_p[row]), sampling.min_p[row]
    temperature = sampling.temperature[row]
    if 0 < top_k < scores.shape[0]:
        ids = top_ids(scores, top_k)
        weights = np.exp((scores[ids] - maximum) / temperature)
        weights[weights < min_p] = 0.0
        kept = _nucleus_size(weights, top_p, weights.sum(dtype=np.float64))
        ids, weights = ids[:kept], weights[:kept]
    else:
        weights = np.exp((scores - maximum) / temperature)
        weights[weights < min_p] = 0.0
        ids = _nucleus(scores, weights, top_p)
        weights = weights[ids]
    by_id = np.argsort(ids)
    cumulative = np.cumsum(weights[by_id], dtype=np.float64)
    chosen = np.searchsorted(cumulative, number * cumulative[-1], side="right")
    return int(ids[by_id[chosen]])


def _nucleus(scores: NDArray[Any], weights: NDArray[Any], top_p: float) -> NDArray[np.intp]:
    """Ids of the likeliest tokens that hold `top_p` of all `weights`; few candidates are ordered where few suffice."""
    total = weights.sum(dtype=np.float64)
    count = _FIRST_CANDIDATES
    while True:
        ids = top_ids(scores, count)
        if count >= scores.shape[0] or weights[ids].sum(dtype=np.float64) >= top_p * total:
            return ids[: _nucleus_size(weights[ids], top_p, total)]
        count *= 8


def _nucleus_size(weights: NDArray[Any], top_p: float, total: np.float64) -> int:
    """How many of `weights`, likeliest first, are needed to reach `top_p * total`."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(cumulative, top_p * total, side="left")) + 1
