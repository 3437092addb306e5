"""Which compressed entries each token sees: scores of all of them, and the best."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.attention.compressor import entry_places, rows_of
from openinfer_kernels.ops import AttentionBatch

_PRODUCTS_AT_ONCE = 1 << 20


@np.errstate(over="ignore", invalid="ignore")
def index_scores(
    queries: NDArray[Any],
    weights: NDArray[Any],
    *,
    cache: NDArray[Any],
    layer: int,
    ratio: int,
    scale: float,
    batch: AttentionBatch,
    tokens_at_once: int | None = None,
) -> NDArray[Any]:
    num_tokens, num_heads, _ = queries.shape
    out = np.full((num_tokens, max(1, batch.max_context_tokens // ratio)), -np.inf, np.float32)
    for row in rows_of(batch):
        num_entries = row.end // ratio
        if not num_entries:
            continue
        blocks, rows = entry_places(batch, row.index, np.arange(num_entries), ratio)
        keys = cache[blocks, layer, 0, rows]
        size = tokens_at_once or max(1, _PRODUCTS_AT_ONCE // (num_heads * num_entries))
        for first in range(row.tokens.start, row.tokens.stop, size):
            tokens = slice(first, min(first + size, row.tokens.stop))
            seen = (row.start + np.arange(tokens.start, tokens.stop) - row.tokens.start + 1) // ratio
            most = int(seen[-1])
            products = np.maximum(queries[tokens] @ keys[:most].T * np.float32(scale), 0.0)  # [n, Hi, entries]
            scores = (weights[tokens][:, None] @ products)[:, 0]
            scores[np.arange(most) >= seen[:, None]] = -np.inf
            out[tokens, :most] = scores
    return out


def select_entries(scores: NDArray[Any], k: int) -> NDArray[np.int32]:
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    beyond = scores.shape[1]
    # Scores of -inf are entries that do not exist yet; where there are fewer than `k`, -1 fills up.
    is_seen = np.take_along_axis(scores, chosen, axis=1) > -np.inf
    ascending = np.sort(np.where(is_seen, chosen, beyond), axis=1)
    out = np.full((len(scores), k), -1, np.int32)
    out[:, : ascending.shape[1]] = np.where(ascending == beyond, -1, ascending)
    return out
