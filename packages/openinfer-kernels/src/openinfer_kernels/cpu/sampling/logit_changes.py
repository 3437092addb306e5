"""What changes logits before a token is drawn: penalties, bias and token masks, in this order."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.ops import Bias, Penalties, SamplingBatch, TokenMask


def changed_logits(logits: NDArray[Any], sampling: SamplingBatch) -> NDArray[Any]:
    """Logits `[R, num_token_ids]` with all changes applied; a view of `logits` where there are none."""
    scores = logits[:, : sampling.num_token_ids]
    if sampling.penalties is None and sampling.bias is None and sampling.token_mask is None:
        return scores
    scores = scores.copy()
    if sampling.penalties is not None:
        _penalise(scores, sampling.penalties)
    if sampling.bias is not None:
        _add_bias(scores, sampling.bias)
    if sampling.token_mask is not None:
        _forbid_masked(scores, sampling.token_mask)
    return scores


def _penalise(scores: NDArray[Any], penalties: Penalties) -> None:
    num_ids = scores.shape[1]
    for index, row in enumerate(penalties.rows.tolist()):
        if row < 0:
            continue
        counts = penalties.output_counts[index, :num_ids]
        ids = np.flatnonzero((counts > 0) | penalties.prompt_seen[index, :num_ids])
        old, counts = scores[row, ids], counts[ids].astype(np.float32)
        repetition = penalties.repetition[index]
        scores[row, ids] = np.where(old > 0, old / repetition, old * repetition)
        scores[row, ids] -= penalties.frequency[index] * counts + penalties.presence[index] * (counts > 0)


def _add_bias(scores: NDArray[Any], bias: Bias) -> None:
    for index, row in enumerate(bias.rows.tolist()):
        if row < 0:
            continue
        count = int(bias.counts[index])
        token_ids, values = bias.token_ids[index, :count], bias.values[index, :count]
        sampled = token_ids < scores.shape[1]
        scores[row, token_ids[sampled]] += values[sampled]


def _forbid_masked(scores: NDArray[Any], mask: TokenMask) -> None:
    allowed_by_row = np.unpackbits(_bytes(mask.bits), axis=1, count=scores.shape[1], bitorder="little")
    for row, allowed in zip(mask.rows.tolist(), allowed_by_row, strict=True):
        if row >= 0:
            np.copyto(scores[row], -np.inf, where=allowed == 0)


def _bytes(bits: NDArray[Any]) -> NDArray[np.uint8]:
    """Words `[m, n]` as their bytes `[m, 4 n]`, the lowest first on every machine."""
    return np.ascontiguousarray(bits, dtype="<u4").view(np.uint8)
