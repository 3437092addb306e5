"""The depthwise causal convolution in front of linear attention, with the inputs that later steps still need.

Rows of one token are computed together, longer ones one by one. Both add the products of the taps in the same order,
so that a token's result does not depend on how its sequence was cut into steps.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.linear_attention.state_rows import batch_slots, long_rows, read_states, single_rows
from openinfer_kernels.ops import AttentionBatch


@np.errstate(over="ignore", invalid="ignore")
def causal_conv_silu(
    x: NDArray[Any], weight: NDArray[Any], *, state: NDArray[Any], layer: int, batch: AttentionBatch
) -> NDArray[Any]:
    out = np.empty_like(x)
    slots = batch_slots(batch)
    single = single_rows(batch)
    if len(single.rows):
        before = read_states(state, layer, slots[single.rows], single.begins)
        window = np.concatenate((before, x[single.first_tokens, :, None]), axis=2)  # [rows, C, W]
        out[single.first_tokens] = _taps(window, weight)[..., 0]
        state[slots[single.rows], layer] = window[..., 1:]
    for row, tokens, begins in long_rows(batch):
        before = read_states(state, layer, slots[[row]], np.array([begins]))[0]
        window = np.concatenate((before, x[tokens].T), axis=1)  # [C, W - 1 + n]
        out[tokens] = _taps(window, weight).T
        if batch.kept is not None and batch.kept_rows is not None and batch.kept_rows[row]:
            batch.kept.conv_inputs[slots[row], layer, : tokens.stop - tokens.start] = x[tokens]
        else:
            state[slots[row], layer] = window[:, 1 - weight.shape[1] :]
    out /= 1.0 + np.exp(-out)
    return out


def replay_convolutions(inputs: NDArray[Any], state: NDArray[Any], slots: NDArray[Any], counts: NDArray[Any]) -> None:
    """Has `state [slots, layers, C, W - 1]` take in the first of `inputs [slots, layers, M, C]`."""
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        window = np.concatenate((state[slot], inputs[slot, :, :count].swapaxes(1, 2)), axis=2)
        state[slot] = window[..., count:]


def _taps(window: NDArray[Any], weight: NDArray[Any]) -> NDArray[Any]:
    """`sum_j weight[:, j] * window[..., t + j]` for every `t`: `[..., C, n]` for `window [..., C, W - 1 + n]`."""
    width = weight.shape[1]
    num_tokens = window.shape[-1] - width + 1
    out = np.zeros((*window.shape[:-1], num_tokens), window.dtype)
    # Tap by tap, never by a product of matrices: the order of the sum must not depend on the number of tokens.
    for tap in range(width):
        out += weight[:, tap, None] * window[..., tap : tap + num_tokens]
    return out
