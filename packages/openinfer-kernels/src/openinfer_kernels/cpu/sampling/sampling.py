"""Drawing one token per row.

A row's answer never depends on the batch: element-wise work is done in float32 on the row's own numbers, and
sums of probabilities are float64 in an order that depends on the row alone.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.sampling.inverse_cdf import drawn_column, drawn_columns
from openinfer_kernels.cpu.sampling.logit_changes import changed_logits
from openinfer_kernels.cpu.sampling.philox import uniforms
from openinfer_kernels.cpu.sampling.top import largest_ids
from openinfer_kernels.ops import SamplingBatch

_WEIGHTS_AT_ONCE = 1 << 18


@np.errstate(over="ignore", invalid="ignore")
def sample(logits: NDArray[Any], sampling: SamplingBatch) -> NDArray[np.int32]:
    scores = changed_logits(logits, sampling)
    best = scores.argmax(axis=1)
    maxima = scores[np.arange(scores.shape[0]), best]
    tokens = np.where(np.isfinite(maxima), best, -1).astype(np.int32)
    is_drawn = np.isfinite(maxima) & (sampling.temperature > 0)
    if not is_drawn.any():
        return tokens
    numbers = uniforms(sampling.seeds, sampling.positions)
    is_cut = ((sampling.top_k > 0) & (sampling.top_k < scores.shape[1])) | (sampling.top_p < 1)
    for rows in _pieces(np.flatnonzero(is_drawn & ~is_cut), num_columns=scores.shape[1]):
        weights = _weights(scores[rows], maxima[rows], sampling, rows)
        tokens[rows] = drawn_columns(weights, numbers[rows])
    # Row by row, as each has its own number of candidates.
    for row in np.flatnonzero(is_drawn & is_cut).tolist():
        ids, weights = _likeliest(scores, maxima, sampling, row)
        tokens[row] = ids[drawn_column(weights, numbers[row])]
    return tokens


def _pieces(rows: NDArray[np.intp], *, num_columns: int) -> list[NDArray[np.intp]]:
    """Rows in pieces whose weights stay in the processor's cache."""
    size = max(1, _WEIGHTS_AT_ONCE // num_columns)
    return [rows[first : first + size] for first in range(0, rows.size, size)]


def _weights(
    scores: NDArray[Any], maxima: NDArray[Any], sampling: SamplingBatch, rows: NDArray[np.intp]
) -> NDArray[Any]:
    """Probabilities of `scores [rows, n]` relative to each row's likeliest token, which has 1; min-p applied."""
    weights = scores - maxima[:, None]
    weights /= sampling.temperature[rows, None]
    np.exp(weights, out=weights)
    min_p = sampling.min_p[rows, None]
    if min_p.any():
        weights[weights < min_p] = 0.0
    return weights


def _likeliest(
    scores: NDArray[Any], maxima: NDArray[Any], sampling: SamplingBatch, row: int
) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """Ids, ascending, and weights of what top-k, min-p and top-p leave of one row.

    Top-k before min-p leaves the same tokens as after it, and fewer exponentials to compute.
    """
    top_k, top_p = int(sampling.top_k[row]), float(sampling.top_p[row])
    ids = largest_ids(scores[row], top_k if top_k > 0 else scores.shape[1])
    candidates = scores[row, ids]
    weights = _weights(candidates[None], maxima[[row]], sampling, np.array([row]))[0]
    if top_p == 1:
        return ids, weights
    kept = _nucleus(candidates, weights, top_p)
    return ids[kept], weights[kept]


def _nucleus(scores: NDArray[Any], weights: NDArray[Any], top_p: float) -> NDArray[np.intp]:
    """Ascending indices of the fewest of the likeliest that hold `top_p` of the sum of `weights`.

    Tokens so small that they would hold less than half of the rest together need not be sorted.
    """
    total = weights.sum(dtype=np.float64)
    candidates = np.flatnonzero(weights > 0.5 * (1 - top_p) * total / weights.size)
    descending = np.sort(weights[candidates])[::-1]
    running = np.cumsum(descending, dtype=np.float64)
    count = int(running.searchsorted(float(top_p * total))) + 1
    return candidates[largest_ids(scores[candidates], count)]
