"""Inputs of tokens that may not count, kept from a step to the next, and the states that take some of them in."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.linear_attention.causal_conv import replay_convolutions
from openinfer_kernels.cpu.linear_attention.gated_delta_rule import replay_rules
from openinfer_kernels.ops import KeptInputs


def keep_inputs(*, conv: NDArray[Any], state: NDArray[Any], most_tokens: int) -> KeptInputs:
    slots, num_layers, num_heads, _, value_dim = state.shape
    channels, values = conv.shape[2], num_heads * value_dim
    tokens = slots, num_layers, most_tokens
    return KeptInputs(
        conv_inputs=np.zeros((*tokens, channels), conv.dtype),
        keys_values=np.zeros((*tokens, (channels - values) // 2 + values), conv.dtype),
        gates=np.zeros((*tokens, num_heads, 2), np.float32),
    )


def replay_inputs(
    kept: KeptInputs,
    *,
    conv: NDArray[Any],
    state: NDArray[Any],
    slots: NDArray[Any],
    counts: NDArray[Any],
) -> None:
    replay_convolutions(kept.conv_inputs, conv, slots, counts)
    replay_rules(kept, state, slots, counts)
