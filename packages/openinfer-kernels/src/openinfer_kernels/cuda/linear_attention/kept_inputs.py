"""What rows with drafts would change recurrent states by, kept until it is known which of their tokens count."""

from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.linear_attention.causal_conv import CausalConv
from openinfer_kernels.cuda.linear_attention.gated_delta_rule import GatedDeltaRule, kept_rule_inputs
from openinfer_kernels.ops import Array, KeptInputs

_VECTOR_CHANNELS = 8
"""That the convolution's kernel reads at once."""


class KeptStates:
    """States of the convolution and of the rule, which take in the same tokens."""

    def __init__(self, conv: CausalConv, rule: GatedDeltaRule) -> None:
        self._conv = conv
        self._rule = rule

    def keep_inputs(self, *, conv: Array, state: Array, most_tokens: int) -> KeptInputs | None:
        slots, num_layers, channels, _ = conv.shape
        rule = kept_rule_inputs(state, channels=channels, most_tokens=most_tokens)
        if rule is None or channels % _VECTOR_CHANNELS:
            return None
        keys_values, gates = rule
        conv_inputs = cupy.zeros((slots, num_layers, most_tokens, channels), bfloat16)
        return KeptInputs(conv_inputs=conv_inputs, keys_values=keys_values, gates=gates)

    def replay_inputs(self, kept: KeptInputs, *, conv: Array, state: Array, slots: Array, counts: Array) -> None:
        self._conv.replay(kept.conv_inputs, conv, slots, counts)
        self._rule.replay(kept, state, slots, counts)
