"""Log-probabilities and ranks of tokens under a row of logits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.sampling.top import top_ids
from openinfer_kernels.ops import Logprobs


@np.errstate(over="ignore", invalid="ignore")
def logprobs(logits: NDArray[Any], token_ids: NDArray[Any], *, top: int) -> Logprobs:
    num_rows = len(logits)
    result = Logprobs(
        chosen=np.empty(num_rows, np.float32),
        ranks=np.empty(num_rows, np.int32),
        top_ids=np.empty((num_rows, top), np.int32),
        top=np.empty((num_rows, top), np.float32),
    )
    for index, (row, token_id) in enumerate(zip(logits, token_ids.tolist(), strict=True)):
        _fill_row(result, index, row, token_id)
    return result


def _fill_row(result: Logprobs, index: int, row: NDArray[Any], token_id: int) -> None:
    maximum = row.max()
    log_sum = maximum + np.log(np.exp(row - maximum).sum(dtype=np.float64))
    if token_id < 0:
        result.chosen[index], result.ranks[index] = np.nan, 0
    else:
        result.chosen[index] = row[token_id] - log_sum
        result.ranks[index] = 1 + np.count_nonzero(row > row[token_id])
    if result.top.shape[1]:
        # A comparison with NaN is false, which would leave too few columns above the threshold.
        comparable = np.where(np.isnan(row), -np.inf, row) if np.isnan(maximum) else row
        ids = top_ids(comparable, result.top.shape[1])
        result.top_ids[index] = ids
        result.top[index] = row[ids] - log_sum
